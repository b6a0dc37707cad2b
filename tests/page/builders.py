"""A node with traffic behind the real HTTP application, on a loop of its own, with a clock that tests move."""

from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

from aiohttp import web

from kvservice.app import LoopThread, build_application
from kvservice.model.identity import Identity
from kvservice.wire.v1 import cache_pb2 as wire
from tests.curves.builders import zipf
from tests.server.builders import Client, World, encode_key, make_identity, make_meta, make_planes, make_relative

T = TypeVar("T")
SEGMENTS, LOOKUPS, ARENA_BYTES = 300, 1500, 1 << 20
HOSTILE = '<img src=x onerror="document.title=1">'
PLANES = make_planes()


def make_named(model: str, tenant: str = "test") -> Identity:
    base = make_identity(tenant=tenant)
    return Identity(tenant, model, base.weights, base.geometry, base.rope)


async def look_up(world: World, client: Client, identity: Identity, numbers: list[int]) -> None:
    """Look up, and store what was not found."""
    for number in numbers:
        meta = make_meta(identity, number)
        _, lease = await client.find(meta)
        if lease:
            await client.release(lease)
        else:
            await client.store(meta, PLANES, prefill_s=0.01)
        world.clock.now_s += 0.1
        world.node.curves.work()


async def commit_round(world: World, identity: Identity, name: str, agents: int = 4, segments: int = 3) -> None:
    """A round of agents whose caches are alike but for a row: every segment gets a master and mirrors."""
    client = world.client(identity)
    metas = []
    for segment in range(segments):
        base = make_meta(identity, f"{name}{segment}")
        await client.store(base, PLANES, prefill_s=1.0)
        metas.append(base)
        for agent in range(1, agents):
            meta = make_meta(identity, f"{name}{segment}", history=[f"agent {agent}"])
            moved = make_relative(identity, PLANES, 0, meta.position, rows=[agent], seed=agent)
            await client.store(meta, moved, prefill_s=1.0)
            metas.append(meta)
    members = [encode_key(meta.key) for meta in metas]
    request = wire.CommitRoundRequest(round=name, namespace=identity.namespace(), members=members)
    await client.call("CommitRound", request)
    client.close()


class PageWorld:
    """``with PageWorld() as page``: ``page.address`` answers over HTTP."""

    def __init__(self, *, lookups: int = LOOKUPS, rounds: int = 0, names: tuple[str, ...] = ("tiny",)) -> None:
        self._lookups, self._rounds, self._names = lookups, rounds, names

    def __enter__(self) -> Self:
        self.thread = LoopThread("page")
        try:
            self.thread.run(self._start(), 120)
        except BaseException:
            self.thread.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self.runner.cleanup())
        self.thread.close()

    def run(self, work: Awaitable[T]) -> T:
        """The result of ``work``, run where the node is."""
        return self.thread.run(work, 60)

    def look_up(self, *numbers: int) -> None:
        """Traffic, a tenth of a second each."""
        self.run(look_up(self.world, self.client, self.identities[0], list(numbers)))

    def commit_round(self, name: str) -> None:
        """One more round."""
        self.run(commit_round(self.world, self.identities[0], name))

    async def _start(self) -> None:
        self.world = World(arena_bytes=ARENA_BYTES)
        self.identities = [make_named(name, tenant=f"tenant {name}") for name in self._names]
        self.client = self.world.client(*self.identities)
        for number, identity in enumerate(self.identities):
            trace = zipf(SEGMENTS, self._lookups, 0.7 + 0.2 * number, seed=4)
            await look_up(self.world, self.client, identity, trace)
        for number in range(self._rounds):
            await commit_round(self.world, self.identities[0], f"round {number} {self._names[-1]}")
        self.runner = web.AppRunner(build_application(self.world.node), access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self.runner.addresses[0][1]}"
