"""All that is asked is accounted for: asked = host + ssd + remote + moved + miss + error, by whatever name it goes."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.accounting import ANSWERS, ERRORS, OTHER, AccountLimits, Accounts, place_of
from kvservice.caches import Space
from kvservice.limits import NodeLimits
from kvservice.lookup import Finding
from kvservice.model.cache import Tier
from kvservice.model.errors import LeaseExpiredError
from kvservice.model.identity import INT8, Identity
from kvservice.model.plan import Match, MissReason, Outcome
from kvservice.stats.metrics import METRICS
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import Client, World, make_identity, make_meta, make_planes, query
from tests.server.ssd_world import SsdWorld, arrived, leave_host, written

IDENTITIES = [
    replace(make_identity(tenant=f"t{tenant}"), salt=salt, lossy=lossy)
    for tenant in range(3)
    for salt, lossy in (("", ""), ("a", INT8))
]
NAMES = range(3)
STRANGER = make_identity(tenant="stranger")
FEW = AccountLimits(namespaces_max=2, tenants_max=2)
MISS = Finding(None, Match.NONE, MissReason.UNKNOWN_SEGMENT, 0)


def answer_of(reply: wire.SegmentReply) -> str:
    """What a client would call it."""
    if reply.outcome == Outcome.HIT:
        is_from_ssd = Tier.SSD in (reply.record.tier, reply.master.tier)
        return "moved" if reply.match == Match.SHIFTED else "ssd" if is_from_ssd else "host"
    return "error" if reply.miss_reason in ERRORS else "miss"


def asked_for(rng: random.Random, identity: Identity) -> wire.PromptQuery:
    """A prompt of held and unheld segments, some asked for wrongly, some to be had from anywhere."""
    segments: list[wire.SegmentQuery] = []
    for _ in range(rng.randint(1, 4)):
        meta = make_meta(identity, rng.choice([*NAMES, "nothing"]), rng.choice([(), ("a",)]))
        changes: dict[str, Any] = {"tokens": rng.choice([meta.tokens] * 4 + [3]), "may_shift": rng.random() < 0.4}
        segments += query(meta, **changes).segments
    return wire.PromptQuery(namespace=identity.namespace(), segments=segments)


class Story:
    """Lookups of many identities, counted here as a client hears of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(limits=NodeLimits(lookup_slice=4))
        self.world.node.accounts = Accounts(FEW)
        self.client = self.world.client(*IDENTITIES)
        self.segments: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.exact_tokens = 0
        self.asked: dict[str, int] = {}

    async def store(self) -> None:
        meta = make_meta(self.rng.choice(IDENTITIES), self.rng.choice(NAMES))
        outcome = await self.client.reserve(meta, 1)
        if outcome.WhichOneof("outcome") == "reserved":
            await self.client.call("Abort", wire.AbortRequest(reservation_ids=[outcome.reserved.id]))
            await self.client.store(meta, make_planes())

    async def look_up(self) -> None:
        identities = self.rng.choices([*IDENTITIES, STRANGER], k=self.rng.randint(1, 5))
        prompts = [asked_for(self.rng, identity) for identity in identities]
        reply = await self.client.lookup(*prompts)
        for identity, prompt, answered in zip(identities, prompts, reply.prompts, strict=True):
            for asked, found in zip(prompt.segments, answered.segments, strict=True):
                is_exact = found.match == Match.EXACT and not identity.is_lossy
                self.exact_tokens += asked.tokens if is_exact else 0
                self.segments[answer_of(found)] += 1
                self.tokens[answer_of(found)] += asked.tokens
        if reply.lease.id:
            await self.client.release(reply.lease.id)

    async def break_off(self) -> None:
        """The session ends while its lookup lets others in."""
        prompts = [asked_for(self.rng, self.rng.choice(IDENTITIES)) for _ in range(12)]
        task = asyncio.ensure_future(self.client.lookup(*prompts))
        await asyncio.sleep(0)
        self.client.close()
        with pytest.raises(LeaseExpiredError):
            await task
        self.client = self.world.client(*IDENTITIES)
        document: Any = self.world.node.stats_document()["accounting"]
        for unit, counts in (("segments", self.segments), ("tokens", self.tokens)):
            counts.update({name: document[unit][name] - counts[name] for name in ANSWERS})
            of_prompts = [1 if unit == "segments" else one.tokens for prompt in prompts for one in prompt.segments]
            assert sum(of_prompts) == document[f"asked_{unit}"] - self.asked[unit]
        self.exact_tokens = document["exact_tokens"]
        assert document["error_tokens"]["broken_off"] > 0

    async def go(self, steps: int) -> None:
        for _ in range(steps):
            self.asked = {"segments": self.segments.total(), "tokens": self.tokens.total()}
            await self.rng.choice([self.store, self.look_up, self.look_up, self.break_off])()
            self.check()

    def check(self) -> None:
        self.world.check()
        document: Any = self.world.node.stats_document()
        for unit, counts in (("segments", self.segments), ("tokens", self.tokens)):
            assert document["accounting"][f"asked_{unit}"] == counts.total()
            assert document["accounting"][unit] == {name: counts[name] for name in ANSWERS}
        assert document["accounting"]["exact_tokens"] == self.exact_tokens
        assert len(document["by_namespace"]) <= FEW.namespaces_max + 1
        assert len(document["by_tenant"]) <= FEW.tenants_max + 1


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_nothing_is_left_over_whoever_asks_and_however_it_ends(seed: int) -> None:
    asyncio.run(Story(seed).go(12))


async def test_what_has_to_be_read_from_ssd_is_told_apart_and_counted_once() -> None:
    identity = make_identity()
    metas = [make_meta(identity, name) for name in NAMES]
    async with SsdWorld() as world:
        client = world.client(identity)
        for meta in metas:
            await client.store(meta, make_planes())
        await written(world)
        await leave_host(world, *metas)
        _, lease = await client.find(metas[0])
        await arrived(client, lease)
        await client.find(metas[0])
        await client.find(make_meta(identity, 1, ("b",)), may_shift=True)
        document: Any = world.node.stats_document()
    answers = document["accounting"]["segments"]
    assert answers == {"host": 1, "ssd": 1, "remote": 0, "moved": 1, "miss": 0, "error": 0}
    assert document["accounting"]["moved_tokens"]["ssd"] == document["accounting"]["tokens"]["moved"] == 16
    assert document["lookups"]["from_ssd"] == 2
    assert (document["accounting"]["exact_tokens"], document["accounting"]["lossy_tokens"]) == (32, 16)
    assert document["accounting"]["exact_ratio"] == pytest.approx(2 / 3, abs=1e-6)


# Names


def make_space(tenant: str, salt: str = "") -> Space:
    identity = replace(make_identity(tenant=tenant), salt=salt)
    return Space(identity.namespace(), identity)


def names_of(accounts: Accounts) -> set[tuple[str, str]]:
    return {(ledger.tenant, ledger.namespace) for ledger in accounts.named.values()}


def ask(accounts: Accounts, spaces: Sequence[Space], times: int = 1) -> None:
    for space in [*spaces] * times:
        ledger = accounts.of(space)
        ledger.segments[place_of(MISS)] += 1
        ledger.tokens[place_of(MISS)] += 10


def asked(accounts: Accounts) -> int:
    return sum(sum(ledger.tokens) for ledger in accounts)


def test_the_first_keep_their_names_however_busy_others_are() -> None:
    accounts = Accounts(FEW)
    first, busy = [make_space("a"), make_space("b")], [make_space("c"), make_space("a", "x")]
    ask(accounts, first)
    for _ in range(5):
        ask(accounts, busy, 5)
        assert names_of(accounts) == {(one.identity.tenant, one.namespace.hex()) for one in first}
    assert accounts.tenants == ("a", "b")
    assert asked(accounts) == 2 * 10 + 50 * 10
    assert sum(accounts.rest.exact.tokens) == 25 * 10, "what has no tenant with a name"
    assert sum(accounts.of(busy[1]).tokens) == 25 * 10, "a named tenant's namespace without a name"


Series = dict[tuple[str, tuple[str, ...]], float]


def series_of(document: Any) -> Series:
    """Every sample of every counter by metric and labels."""
    return {
        (spec.name, labels): value for spec in METRICS if spec.is_counter for labels, value in spec.samples(document)
    }


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_no_series_falls_or_rises_by_what_it_did_not_see(seed: int) -> None:
    """Tenants and namespaces come and go, more than have names: every series rises by its own lookups alone."""
    rng, world = random.Random(seed), World()
    world.node.accounts = Accounts(FEW)
    identities = [replace(make_identity(tenant=f"t{rng.randrange(4)}"), salt=str(number)) for number in range(8)]

    async def go() -> None:
        before = series_of(world.node.stats_document())
        for identity in rng.choices(identities, k=40):
            client = world.client(identity)
            tokens = make_meta(identity).tokens
            await client.find(make_meta(identity))
            client.close()  # the namespace, and perhaps the tenant, is gone
            after = series_of(world.node.stats_document())
            assert before.keys() <= after.keys(), "a name that was told once is told on"
            for (name, labels), value in after.items():
                change, was = value - before.get((name, labels), 0.0), f"{name} {labels}"
                assert change >= 0, was
                if name.endswith("_answered_tokens_total") and len(labels) == 2:
                    told = identity.tenant if "tenant" in name else identity.namespace().hex()
                    is_told = any(known == name and of[0] == told for known, of in after)
                    meant = labels == (told if is_told else OTHER, "miss")
                    assert change == (tokens if meant else 0), was
            for whose in ("tenant", "namespace"):
                name = f"kvservice_{whose}_answered_tokens_total"
                whole = sum(value for (one, _), value in after.items() if one == name)
                assert whole == after["kvservice_lookup_tokens_total", ()]
            before = after

    asyncio.run(go())


@pytest.mark.parametrize("tenant", [OTHER, "x" * 129])
def test_a_tenant_called_other_or_with_a_long_name_is_counted_with_the_others(tenant: str) -> None:
    accounts = Accounts(FEW)
    ask(accounts, [make_space(tenant)])
    assert accounts.tenants == ()
    assert next(iter(accounts.named.values())).tenant == OTHER
    assert asked(accounts) == 10


def test_after_a_start_the_largest_namespaces_have_names() -> None:
    accounts = Accounts(FEW)
    spaces = [make_space("a", str(number)) for number in range(4)]
    for size, space in enumerate(spaces):
        space.totals.ssd_bytes = size
    accounts.note_restored(spaces)
    assert names_of(accounts) == {("a", one.namespace.hex()) for one in spaces[2:]}


async def test_bytes_are_told_by_tenant_and_namespace_kind_and_tier() -> None:
    first, second = make_identity(tenant="a"), make_identity(tenant="b")
    world = World()
    client = world.client(first, second)
    for name in NAMES:
        await client.store(make_meta(first, name), make_planes())
    await client.store(make_meta(second), make_planes())
    await client.find(make_meta(first, 0))
    await client.find(make_meta(second))
    document: Any = world.node.stats_document()
    held = {name: part["held"] for name, part in document["by_tenant"].items()}
    assert held["a"]["bytes_by_tier"]["host"] == 3 * held["b"]["bytes_by_tier"]["host"] > 0
    assert (held["a"]["caches"], held["b"]["caches"], held[OTHER]["caches"]) == (3, 1, 0)
    named = document["by_namespace"][first.namespace().hex()]
    assert (named["tenant"], named["model"]) == ("a", "tiny")
    assert named["held"] == held["a"]
    assert named["tokens"]["host"] == 16


async def _evict(world: World, client: Client, count: int) -> None:
    for number in range(count):
        await client.store(make_meta(make_identity(), ("evict", number)), make_planes())


async def test_evictions_are_told_by_reason_and_age() -> None:
    world = World(arena_bytes=1 << 16)
    client = world.client()
    await _evict(world, client, 4)
    world.clock.now_s += 30.0
    world.node.expire()
    await client.reserve(make_meta(make_identity(), "last"), 60000)
    evictions: Any = world.node.stats_document()["evictions"]["host"]
    assert evictions["groups"] == evictions["groups_for"]["write"] == 4
    assert evictions["age_s"]["buckets"]["10"] == 0
    assert evictions["age_s"]["buckets"]["60"] == evictions["age_s"]["buckets"]["+Inf"] == 4
    assert evictions["age_s"]["sum"] == 120.0
