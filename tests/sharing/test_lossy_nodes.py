"""Real nodes that share what was rounded: over a slow link it goes as 8 bits, told as such, and no bit differs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvservice.app import LocalNode
from kvservice.client import Client
from kvservice.model.identity import INT8, Identity
from kvservice.peers.packing_kernels import KERNELS
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Medium, Why
from tests.client.builders import assert_equal_bits, free_port, make_prompt
from tests.sharing.nodes import IDENTITY, Worker, held, shared_node, sidecar

LOSSY = replace(IDENTITY, lossy=INT8)
OVER_TCP: dict[str, object] = {"shares_memory": False, "is_load_gated": False}
SLOW, FAST = 1e6, 1e13
STREAM, INT8_STREAM = Medium.STREAM, Medium.INT8_STREAM


class Engine(Worker):
    """An engine of some identity."""

    def __init__(self, node: LocalNode, identity: Identity) -> None:
        super().__init__(node)
        self.client.close()
        self.client = Client.in_process(node, identity)


@contextmanager
def nodes(folder: Path, identity: Identity) -> Iterator[tuple[LocalNode, Engine, Engine, str]]:
    """A shared node, engines at two sidecars, and what these call the shared node."""
    KERNELS.load()
    port = free_port()
    with ExitStack() as stack:
        shared = stack.enter_context(shared_node(folder / "shared", port, **OVER_TCP))
        engines = [
            Engine(stack.enter_context(sidecar(folder / name, port, **OVER_TCP)), identity) for name in ("a", "b")
        ]
        for engine in engines:
            stack.callback(engine.close)
        yield shared, engines[0], engines[1], f"node 127.0.0.1:{port}"


def knows(engine: Engine, router: Router, peer: str, bytes_per_s: float) -> None:
    """The node beside an engine takes its stream to a peer for so fast."""
    for _ in range(20):
        engine.node.on_loop(lambda _: router.measured(peer, STREAM, 1 << 24, (1 << 24) / bytes_per_s))


def network(node: LocalNode) -> Any:
    return node.stats()["network"]


@pytest.mark.parametrize(
    ("identity", "bytes_per_s", "medium"),
    [(LOSSY, SLOW, INT8_STREAM), (LOSSY, FAST, STREAM), (IDENTITY, SLOW, STREAM)],
)
def test_rows_go_as_8_bits_where_they_are_that_and_the_link_is_slow(
    tmp_path: Path, identity: Identity, bytes_per_s: float, medium: Medium
) -> None:
    prompt = make_prompt(identity, private=200, shared=(200, 100), seed=1, chunk_tokens=64)
    with nodes(tmp_path, identity) as (shared, writer, reader, peer):
        for engine in (writer, reader):
            for router in (engine.node.peers.router, engine.node.peers.given):
                knows(engine, router, peer, bytes_per_s)
        writer.store(prompt)
        writer.pushed()
        stored, found = writer.restore(prompt), reader.restore(prompt)
        assert stored is not None
        assert found is not None
        assert_equal_bits(found[0], stored[0])
        came, went = network(reader.node), network(writer.node)
        count = held(shared)
        assert went["given_media"][medium]["choices"] == came["media"][medium]["choices"] == count > 0
        assert sum(went["given_reasons"].values()) == sum(came["reasons"].values()) == count
        assert went["given_reasons"][Why.FALLBACK] == came["reasons"][Why.FALLBACK] == 0
        is_packed = medium is INT8_STREAM
        sizes = {name: [one[f"packed_{name}"] for one in (came, went)] for name in ("bytes", "wire_bytes")}
        there = network(shared)
        assert there["packed_bytes"] == sum(sizes["bytes"])
        assert all((size > 0) is is_packed for size in sizes["bytes"])
        if is_packed:
            assert 0.4 < sum(sizes["wire_bytes"]) / sum(sizes["bytes"]) < 0.6


def test_the_document_tells_how_it_comes_and_goes(tmp_path: Path) -> None:
    prompt = make_prompt(LOSSY, private=200, shared=(200, 100), seed=1, chunk_tokens=64)
    with nodes(tmp_path, LOSSY) as (_, writer, reader, peer):
        knows(writer, writer.node.peers.given, peer, SLOW)
        knows(reader, reader.node.peers.router, peer, SLOW)
        writer.store(prompt)
        writer.pushed()
        assert reader.restore(prompt) is not None
        (came,), (went,) = network(reader.node)["others"], network(writer.node)["others"]
        for ways in (came["ways"], went["given_ways"]):
            assert set(ways) == {STREAM, INT8_STREAM}
            packed = ways[INT8_STREAM]
            assert packed["transfers"] == packed["chosen"] == sum(packed["reasons"].values()) > 0
            assert packed["bytes"] > 0
            assert packed["bytes_per_s"] > 0
        accounting: Any = reader.node.stats()["accounting"]
        assert (accounting["exact_tokens"], accounting["lossy_tokens"]) == (0, prompt.token_count)
