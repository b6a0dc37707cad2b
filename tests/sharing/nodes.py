"""Real nodes on loopback that share: their engines are clients in this process, their links real sockets."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from kvservice.app import LocalNode
from kvservice.client import Client, RoundPrompt
from kvservice.model.cache import Tier
from kvservice.model.errors import ConfigError
from kvservice.model.geometry import attention_geometry
from kvservice.peers.member import MemberState
from kvservice.peers.streams_local_server import LocalServer
from tests.client.builders import Engine, free_port, make_identity, make_prompt, make_settings

IDENTITY = make_identity(attention_geometry(layers=6, heads=2, head_size=32, dtype="bfloat16"))
MIB = 1 << 20
WAIT_S = 30.0
PATIENT: dict[str, object] = {"host_bytes": 32 * MIB, "peer_deadline_s": 10.0}
"""Nodes whose peers may share a core with many others."""
Rows = list[list[torch.Tensor]]


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for what the nodes do by themselves."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"{what} did not come within {WAIT_S:g} s"
        threading.Event().wait(0.02)


@contextmanager
def shared_node(folder: Path, port: int, **changes: object) -> Iterator[LocalNode]:
    """A node with a peer port and a folder of its own."""
    values: dict[str, object] = {"peer_port": port, "state_folder": str(folder / "state")} | PATIENT
    folder.mkdir(exist_ok=True)
    with LocalNode(make_settings(folder, **(values | changes))) as node:
        yield node


@contextmanager
def sidecar(folder: Path, *ports: int, **changes: object) -> Iterator[LocalNode]:
    """A node beside an engine, which shares with those at ``ports``; ready once it has met one of them."""
    folder.mkdir(exist_ok=True)
    values: dict[str, object] = {"shared": addresses(*ports)} | PATIENT
    with LocalNode(make_settings(folder, **(values | changes))) as node:
        if ports:
            until(lambda: bool(live(node)), "a shared node that answers")
        yield node


def without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes open no socket for others of this host."""

    def refuse(_: LocalServer) -> int:
        raise ConfigError("not in this test")

    monkeypatch.setattr(LocalServer, "start", refuse)


def addresses(*ports: int) -> str:
    return ",".join(f"127.0.0.1:{port}" for port in ports)


def live(node: LocalNode) -> list[str]:
    """The members that a node takes for live."""
    cluster = node.peers.cluster
    assert cluster is not None
    return [str(one.node.uuid) for one in cluster.directory.members if one.state is MemberState.LIVE]


def held(node: LocalNode) -> int:
    """How many caches a node has."""
    return node.on_loop(lambda one: sum(len(space.caches()) for space in one.catalog.spaces.values()))


@contextmanager
def group(folder: Path, count: int, **changes: object) -> Iterator[tuple[list[LocalNode], list[int]]]:
    """So many shared nodes that know each other."""
    ports = [free_port() for _ in range(count)]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(shared_node(folder / f"n{index}", port, shared=addresses(*ports), **changes))
            for index, port in enumerate(ports)
        ]
        until(lambda: all(len(live(node)) == count for node in nodes), "nodes that all know each other")
        yield nodes, ports


class Worker:
    """An engine beside a node: stores prompts and restores them."""

    def __init__(self, node: LocalNode) -> None:
        self.node = node
        self.client = Client.in_process(node, IDENTITY)

    def close(self) -> None:
        self.client.close()

    def store(self, prompt: RoundPrompt, seed: int = 0) -> Rows:
        engine = Engine(IDENTITY.geometry, blocks=1000, seed=seed)
        slots = engine.allocate(prompt.token_count)
        self.client.store(prompt, engine.planes, slots)
        return engine.rows(slots)

    def pushed(self) -> None:
        sharing = self.node.on_loop(lambda node: node.sharing)
        assert sharing is not None
        until(lambda: self.node.on_loop(lambda _: sharing.pushes.is_idle), "an empty queue")

    def restore(self, prompt: RoundPrompt) -> tuple[Rows, set[Tier]] | None:
        """What comes back, and from which tiers; None if not all of it is found."""
        engine = Engine(IDENTITY.geometry, blocks=1000, seed=99)
        slots = engine.allocate(prompt.token_count)
        with self.client.lookup([prompt]) as plans:
            if plans.hit_tokens != prompt.token_count:
                return None
            tiers = {one.record.tier for one in plans[0].plan.segments if one.record}
            self.client.restore(plans, engine.planes, [slots]).wait()
        return engine.rows(slots), tiers


@contextmanager
def worker(node: LocalNode) -> Iterator[Worker]:
    """A worker beside a node."""
    one = Worker(node)
    try:
        yield one
    finally:
        one.close()


def prompt_of(seed: int, tokens: int = 200) -> RoundPrompt:
    """A history of its own, in chunks, and two shared segments."""
    return make_prompt(IDENTITY, private=tokens, shared=(tokens, tokens // 2), seed=seed, chunk_tokens=64)
