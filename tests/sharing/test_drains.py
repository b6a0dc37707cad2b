"""Real nodes: what waits for a node that is away, what a drain gives and says, and that no stop waits for a drain."""

import threading
import time
from pathlib import Path

import pytest

from kvservice.app import LocalNode, Service
from kvservice.client import Client
from kvservice.sharing import command
from tests.client.builders import Engine, free_port, make_settings
from tests.sharing.nodes import (
    IDENTITY,
    MIB,
    PATIENT,
    addresses,
    held,
    live,
    prompt_of,
    shared_node,
    until,
    worker,
)


@pytest.mark.heavy
def test_what_its_owner_was_away_for_is_given_when_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    values = PATIENT | {"peer_deadline_s": 1.0, "shared": addresses(port)}
    with LocalNode(make_settings(tmp_path, **values)) as node, worker(node) as writer:
        with shared_node(tmp_path / "shared", port):
            until(lambda: len(live(node)) == 1, "the owner")
        until(lambda: not live(node), "the word that it is lost")
        writer.store(prompt_of(3))
        writer.pushed()
        assert node.stats()["pushes"]["queued"] == held(node) > 0
        with shared_node(tmp_path / "shared", port) as again:
            until(lambda: held(again) == held(node), "what it has missed")
            writer.pushed()
            assert node.stats()["pushes"]["queued"] == 0


def test_what_nobody_was_greeted_for_yet_is_given_to_the_first_one(tmp_path: Path) -> None:
    port = free_port()
    with LocalNode(make_settings(tmp_path, shared=addresses(port), **PATIENT)) as node, worker(node) as writer:
        writer.store(prompt_of(3))
        writer.pushed()
        with shared_node(tmp_path / "shared", port) as owner:
            until(lambda: held(owner) == held(node), "what it has missed")


def test_a_drain_gives_what_is_on_ssd_only(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    ssd = {"ssd_folder": str(tmp_path / "ssd"), "ssd_bytes": 32 * MIB, "ssd_free_floor_bytes": 0}
    with (
        shared_node(tmp_path / "n0", ports[0], shared=addresses(*ports), push="off", **ssd) as leaving,
        shared_node(tmp_path / "n1", ports[1], shared=addresses(*ports)) as other,
        worker(leaving) as writer,
    ):
        until(lambda: len(live(leaving)) == 2, "two live nodes")
        writer.store(prompt_of(1))
        until(lambda: leaving.on_loop(lambda one: one.catalog.totals.ssd_caches) == held(leaving), "all of it on SSD")
        leaving.on_loop(lambda one: [one.catalog.evict_host() for _ in range(100)])
        assert leaving.on_loop(lambda one: one.catalog.totals.host_caches) == 0
        told = leaving.run_on_loop(leaving.peers.drain(20.0))
        assert (told["given"], told["waiting"]) == (held(leaving), 0)
        assert held(other) == held(leaving) > 0


def test_a_stop_ends_a_drain_which_says_what_it_did_not_give(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, shared=addresses(free_port()), push="off", host_bytes=32 * MIB)
    said: list[tuple[int, str]] = []
    with Service(settings) as service:
        engine, prompt = Engine(IDENTITY.geometry, blocks=1000, seed=1), prompt_of(1)
        with Client.connect(f"unix:{service.addresses.socket}", IDENTITY) as client:
            client.store(prompt, engine.planes, engine.allocate(prompt.token_count))
        drain = threading.Thread(target=lambda: said.append(command.drain(settings.socket, 300.0)))
        drain.start()
        until(lambda: command.ask(settings.socket, "GET", "members", {}, 10.0)["is_draining"], "the drain")
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 10
    drain.join(10.0)
    (status, text) = said[0]
    assert status == 1
    assert "no node to give it to" in text
