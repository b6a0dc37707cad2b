"""Real nodes that are far from each other: what the other one has is found, and what does not come is a miss."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvservice.app import LocalNode
from kvservice.client import RoundPrompt
from kvservice.model.cache import Tier
from kvservice.node import Node
from kvservice.peers.streams_client import LinkCounters, PeerLink
from kvservice.stats.counters import RemoteCounters
from tests.client.builders import assert_equal_bits, free_port, make_prompt
from tests.peers.far_link import LOCALHOST, FarLink
from tests.sharing.nodes import (
    IDENTITY,
    Rows,
    Worker,
    held,
    live,
    prompt_of,
    shared_node,
    sidecar,
    until,
    worker,
)

FAR_S = 0.02
BOUND_S = 20.0
"""What is far below this on any machine is bounded."""
OVER_TCP = {"shares_memory": False}


class Far(NamedTuple):
    """A shared node, a writer at it, and an engine that is far away from it, beside a sidecar."""

    link: FarLink
    node: LocalNode
    writer: Worker
    reader: Worker

    @property
    def peer(self) -> PeerLink:
        """What the sidecar reaches the other node by."""
        cluster = self.node.peers.cluster
        assert cluster is not None
        (link,) = cluster.links.values()
        assert isinstance(link, PeerLink)
        return link

    def counters(self) -> tuple[RemoteCounters, LinkCounters]:
        """Of the sidecar, and of its link."""
        return self.node.on_loop(lambda node: node.counters.remote), self.peer.counters

    def find(self, prompt: RoundPrompt, rows: Rows) -> None:
        """All of it comes from the other node, bit for bit."""
        found = self.reader.restore(prompt)
        assert found is not None
        assert found[1] == {Tier.REMOTE}
        assert_equal_bits(found[0], rows)


@contextmanager
def far_nodes(
    folder: Path, *, delay_s: float = FAR_S, bytes_per_s: float = math.inf, **changes: object
) -> Iterator[Far]:
    """``changes``: to the sidecar's settings."""
    port = free_port()
    with (
        shared_node(folder / "shared", port, **OVER_TCP) as shared,
        FarLink((LOCALHOST, port), delay_s, bytes_per_s) as link,
        sidecar(folder / "far", link.address[1], **(OVER_TCP | changes)) as node,
        worker(shared) as writer,
        worker(node) as reader,
    ):
        yield Far(link, node, writer, reader)


def test_what_is_far_away_is_found_and_what_is_stored_far_away_arrives(tmp_path: Path) -> None:
    with far_nodes(tmp_path) as far:
        far.find(prompt_of(1), far.writer.store(prompt_of(1)))
        rows = far.reader.store(prompt_of(2), seed=2)
        far.reader.pushed()
        assert held(far.writer.node) == held(far.node)
        found = far.writer.restore(prompt_of(2))
        assert found is not None
        assert_equal_bits(found[0], rows)


def test_a_lookup_of_many_records_takes_few_round_trips(tmp_path: Path) -> None:
    prompt = make_prompt(IDENTITY, private=16 * 64, shared=(), chunk_tokens=64)
    with far_nodes(tmp_path, delay_s=0.0) as far:
        far.find(prompt_of(1), far.writer.store(prompt_of(1)))  # what compiles and connects
        before = held(far.writer.node)
        rows = far.writer.store(prompt)
        assert held(far.writer.node) == before + 16
        far.link.delay_s = 0.1
        began_s = time.monotonic()
        far.find(prompt, rows)
        assert (time.monotonic() - began_s) / (2 * far.link.delay_s) < 13, "one for each record would be sixteen"


def test_a_stall_that_is_shorter_than_the_deadline_costs_nothing_but_its_time(tmp_path: Path) -> None:
    with far_nodes(tmp_path) as far:
        rows = far.writer.store(prompt_of(1))
        far.link.back.after(300_000, lambda: far.link.stall(0.3))
        far.find(prompt_of(1), rows)
        remote, link = far.counters()
        assert (remote.failed, remote.unreachable) == (0, 0)
        assert (link.failed, link.expired, link.resumed) == (0, 0, 0)


def test_a_stall_that_is_longer_is_a_miss_soon_and_ends_by_itself(tmp_path: Path) -> None:
    with far_nodes(tmp_path, peer_deadline_s=1.0) as far:
        rows = far.writer.store(prompt_of(1))
        far.link.stall()
        began_s = time.monotonic()
        assert far.reader.restore(prompt_of(1)) is None
        assert far.reader.restore(prompt_of(2)) is None
        assert time.monotonic() - began_s < BOUND_S
        until(lambda: not live(far.node), "the loss of the other node")
        far.link.thaw()
        until(lambda: bool(live(far.node)) and far.peer.is_answering, "the other node")
        far.find(prompt_of(1), rows)


def test_a_cut_in_the_middle_of_a_record_is_mended_unseen(tmp_path: Path) -> None:
    prompt = make_prompt(IDENTITY, private=1000, shared=(), chunk_tokens=1000)  # 1.5 MB
    with far_nodes(tmp_path) as far:
        rows = far.writer.store(prompt)
        before = far.link.back.passed
        far.link.back.after(700_000, far.link.cut)
        far.find(prompt, rows)
        remote, link = far.counters()
        assert (remote.failed, link.resumed) == (0, 1)
        assert far.link.back.passed - before < 2_000_000, "it did not begin anew"


def say_prefill_s(node: LocalNode, token_s: float) -> None:
    """As writers do."""

    def say(one: Node) -> None:
        for _ in range(99):  # a mean over what they say
            one.catalog.spaces[IDENTITY.namespace()].note_prefill(1, token_s)

    node.on_loop(say)


def test_over_a_slow_link_the_engine_computes_what_comes_later(tmp_path: Path) -> None:
    with far_nodes(tmp_path, bytes_per_s=2e6) as far:
        far.find(prompt_of(1), far.writer.store(prompt_of(1)))  # nobody has said how fast prefill is
        far.writer.store(prompt_of(2, tokens=100), seed=2)  # a token's 1.5 KiB take 0.8 ms at least
        say_prefill_s(far.node, 2e-5)
        assert far.reader.restore(prompt_of(2, tokens=100)) is None
        remote, _ = far.counters()
        assert remote.computed_sooner > 0
        say_prefill_s(far.node, 1.0)
        assert far.reader.restore(prompt_of(2, tokens=100)) is not None
        assert live(far.node), "it is slow, not lost"


def test_engines_on_both_sides_work_at_a_time(tmp_path: Path) -> None:
    with far_nodes(tmp_path) as far:
        rows = {seed: far.writer.store(prompt_of(seed), seed) for seed in (1, 2)}

        def work() -> None:
            for seed in (11, 12):
                far.reader.store(prompt_of(seed), seed)

        with worker(far.node) as other, ThreadPoolExecutor(1) as pool:
            storing = pool.submit(work)
            for seed, expected in rows.items():
                found = other.restore(prompt_of(seed))
                assert found is not None
                assert_equal_bits(found[0], expected)
            storing.result(BOUND_S)
        far.reader.pushed()
        assert held(far.writer.node) == held(far.node)
