"""Several nodes, one shared cache: over real sockets, by the public client. A lost node costs misses, nothing else."""

from pathlib import Path

import pytest

from kvservice.app import LocalNode
from kvservice.model.cache import Tier
from kvservice.sharing.place import HOT_USES
from tests.client.builders import assert_equal_bits, free_port, make_settings
from tests.sharing.nodes import (
    IDENTITY,
    PATIENT,
    addresses,
    group,
    held,
    live,
    prompt_of,
    shared_node,
    sidecar,
    until,
    worker,
)


def test_what_one_engine_stored_the_other_one_loads_bit_for_bit(tmp_path: Path) -> None:
    port = free_port()
    with (
        shared_node(tmp_path / "shared", port),
        sidecar(tmp_path / "a", port) as first,
        sidecar(tmp_path / "b", port) as second,
        worker(first) as writer,
        worker(second) as reader,
    ):
        prompt = prompt_of(1)
        rows = writer.store(prompt)
        writer.pushed()
        found = reader.restore(prompt)
        assert found is not None
        assert found[1] == {Tier.REMOTE}
        assert_equal_bits(found[0], rows)
        again = reader.restore(prompt)
        assert again is not None
        assert again[1] == {Tier.HOST}
        assert_equal_bits(again[0], rows)


def test_segments_have_owners_and_each_is_kept_once(tmp_path: Path) -> None:
    with group(tmp_path, 3) as (nodes, ports), sidecar(tmp_path / "a", *ports) as node, worker(node) as writer:
        until(lambda: len(live(node)) == 3, "three live nodes")
        rows = {seed: writer.store(prompt_of(seed), seed) for seed in range(4)}
        writer.pushed()
        shares = [held(one) for one in nodes]
        assert sum(shares) == held(node)
        assert min(shares) > 0, f"one of three owns nothing: {shares}"
        with sidecar(tmp_path / "b", *ports) as other, worker(other) as reader:
            until(lambda: len(live(other)) == 3, "three live nodes")
            for seed, expected in rows.items():
                found = reader.restore(prompt_of(seed))
                assert found is not None
                assert_equal_bits(found[0], expected)


def test_a_lost_node_costs_misses_and_work_goes_on_when_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    with (
        LocalNode(make_settings(tmp_path, shared=addresses(port), **PATIENT)) as node,
        worker(node) as writer,
    ):
        prompt = prompt_of(2)
        assert writer.restore(prompt) is None
        rows = writer.store(prompt)
        with shared_node(tmp_path / "shared", port) as owner:
            until(lambda: bool(live(node)), "the node that was away")
            other = prompt_of(3)
            writer.store(other)
            writer.pushed()
            assert held(owner) > 0
        found = writer.restore(prompt)
        assert found is not None
        assert_equal_bits(found[0], rows)
        assert writer.restore(prompt_of(4)) is None


def test_a_node_that_drains_gives_away_what_it_has(tmp_path: Path) -> None:
    with group(tmp_path, 2) as (nodes, ports), worker(nodes[0]) as writer:
        prompt = prompt_of(5)
        rows = writer.store(prompt)
        writer.pushed()
        network = nodes[0].peers
        told = nodes[0].run_on_loop(network.drain(20.0))
        assert told["waiting"] == 0
        assert held(nodes[1]) == held(nodes[0])
        with sidecar(tmp_path / "b", ports[1]) as other, worker(other) as reader:
            found = reader.restore(prompt)
            assert found is not None
            assert_equal_bits(found[0], rows)


def test_a_delete_reaches_the_shared_node(tmp_path: Path) -> None:
    port = free_port()
    with (
        shared_node(tmp_path / "shared", port) as owner,
        sidecar(tmp_path / "a", port) as node,
        worker(node) as writer,
    ):
        prompt = prompt_of(6)
        writer.store(prompt)
        writer.pushed()
        assert held(owner) > 0
        writer.client.delete(namespace=IDENTITY.namespace())
        assert held(owner) == 0
        assert writer.restore(prompt) is None


def cold_folder(folder: Path) -> str:
    """The URL of a folder, which must be there."""
    (folder / "cold").mkdir()
    return f"file://{folder}/cold"


def test_what_is_in_cold_storage_behind_the_owner_is_found_by_everybody(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    port, cold = free_port(), cold_folder(tmp_path)
    with (
        shared_node(tmp_path / "shared", port, shared=addresses(port), cold=cold) as owner,
        sidecar(tmp_path / "a", port) as node,
        worker(node) as writer,
    ):
        rows = writer.store(prompt_of(8))
        writer.pushed()
        with worker(owner) as own:
            own.pushed()
    with (
        shared_node(tmp_path / "again", port, shared=addresses(port), cold=cold),
        sidecar(tmp_path / "b", port) as other,
        worker(other) as reader,
    ):
        found = reader.restore(prompt_of(8))
        assert found is not None
        assert_equal_bits(found[0], rows)


def test_cold_storage_alone_needs_no_other_node(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    cold = cold_folder(tmp_path)
    with LocalNode(make_settings(tmp_path, cold=cold, **PATIENT)) as node, worker(node) as writer:
        rows = writer.store(prompt_of(9))
        writer.pushed()
    with LocalNode(make_settings(tmp_path, cold=cold, **PATIENT)) as node, worker(node) as reader:
        found = reader.restore(prompt_of(9))
        assert found is not None
        assert found[1] == {Tier.REMOTE}
        assert_equal_bits(found[0], rows)


def test_a_hot_master_has_a_copy_at_the_next_owner(tmp_path: Path) -> None:
    with (
        group(tmp_path, 2, replicas=2) as (nodes, ports),
        sidecar(tmp_path / "a", *ports) as node,
        worker(node) as writer,
    ):
        until(lambda: len(live(node)) == 2, "two live nodes")
        writer.store(prompt_of(10))
        writer.pushed()
        cold = held(nodes[0]) + held(nodes[1])
        for _ in range(HOT_USES + 1):
            for one in nodes:
                with worker(one) as reader:
                    reader.restore(prompt_of(10))
        for one in nodes:
            with worker(one) as reader:
                reader.pushed()
        assert held(nodes[0]) + held(nodes[1]) > cold
