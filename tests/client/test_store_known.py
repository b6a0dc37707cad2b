"""Differences that are known rather than found: stored as they are, and whole where their master goes meanwhile."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvservice.app import LocalNode
from kvservice.client import Client, Plans, Session, StoreOutcome, StoreRequest
from kvservice.client.store_draft import Diff
from kvservice.kernels import reference
from kvservice.model.cache import MasterReference
from kvservice.model.errors import CorruptError, LeaseExpiredError
from kvservice.model.identity import INT8, Identity
from tests.client.builders import (
    GEOMETRIES,
    POLICY,
    TORCH_DTYPES,
    Engine,
    assert_equal_bits,
    bits_of,
    make_identity,
    make_prompt,
)
from tests.client.conftest import Connect
from tests.client.test_store import assert_nothing_is_held, restore_into, store_whole

SHARED, CHANGED = 12, [0, 3, 4, 11]
Hook = Callable[[], None]


def known_diff(engine: Engine, slots: torch.Tensor) -> Diff:
    """Rows CHANGED of a segment whose rows lie at ``slots``."""
    runs = np.array([[0, 1], [3, 2], [11, 1]], np.int32)
    rows = [[plane.flatten(1).numpy() for plane in layer] for layer in engine.rows(slots[CHANGED])]
    bits = np.uint16 if engine.geometry.element_bytes == 2 else np.uint32
    return Diff(
        tuple([runs] * len(layer) for layer in rows), tuple([one.view(bits) for one in layer] for layer in rows)
    )


class World:
    """A master that one prompt has stored, and another prompt that was restored from it and changed in four rows."""

    def __init__(self, client: Client, identity: Identity) -> None:
        self.client, self.identity = client, identity
        self.first, self.second = (
            make_prompt(identity, private=private, shared=(SHARED,), seed=private, policy=POLICY) for private in (4, 8)
        )
        store_whole(client, identity, self.first)
        self.engine = Engine(identity.geometry, seed=3)
        self.index = len(self.second.segments) - 1

    def refresh(self, plans: Plans) -> StoreRequest:
        """Restore and change; the segment is stored without slots, as a pass does."""
        (slots,) = restore_into(self.client, plans, self.engine, [self.second])
        start = self.second.segments[self.index].position
        self.engine.change(slots[start:][CHANGED])
        self.wanted = self.engine.rows(slots[start:])
        diff = known_diff(self.engine, slots[start:])
        nowhere = torch.full((self.second.token_count,), -1)
        return StoreRequest(
            self.second, nowhere, base=plans[0], is_refreshed=True, segments=[self.index], diffs={self.index: diff}
        )

    def store(self, request: StoreRequest) -> Any:
        (result,) = self.client.store_round([request], self.engine.planes)
        return result.segments[0]

    def delete_master(self) -> None:
        assert self.client.delete([self.first.key(len(self.first.segments) - 1)]) == 1

    def assert_comes_back(self) -> MasterReference | None:
        """The segment has the bits that the engine had, its own rows as they are stored; returns whom its record refers
        to."""
        again = Engine(self.identity.geometry, seed=4)
        with self.client.lookup([self.second]) as plans:
            (slots,) = restore_into(self.client, plans, again, [self.second])
            found = plans[0].plan.segments[self.index].reference
        assert_equal_bits(again.rows(slots[self.second.segments[self.index].position :]), self._stored())
        return found

    def _stored(self) -> list[list[torch.Tensor]]:
        """Restored rows stay what they were, also where they are rebuilt: they are not rounded again."""
        if not self.identity.is_lossy:
            return self.wanted
        dtype, stored = TORCH_DTYPES[self.identity.geometry.dtype], [[one.clone() for one in at] for at in self.wanted]
        for layer in stored:
            for plane in layer:
                plane[CHANGED] = bits_of(reference.round_to_8_bits(plane[CHANGED].view(dtype)))
        return stored


@pytest.fixture(params=[*GEOMETRIES, "lossy"])
def world(request: pytest.FixtureRequest, local: Connect) -> World:
    is_lossy = request.param == "lossy"
    identity = make_identity(GEOMETRIES["gqa-bf16" if is_lossy else request.param], lossy=INT8 if is_lossy else "")
    return World(local(identity), identity)


@pytest.fixture
def small(local: Connect) -> World:
    identity = make_identity()
    return World(local(identity), identity)


def before(monkeypatch: pytest.MonkeyPatch, name: str, hook: Hook) -> None:
    """Do ``hook`` before the session's first such call."""
    original, done = getattr(Session, name), list[int]()

    def call(session: Session, items: Sequence[Any]) -> Any:
        if not done:
            done.append(1)
            hook()
        return original(session, items)

    monkeypatch.setattr(Session, name, call)


def test_a_known_difference_is_stored_without_being_compared(world: World) -> None:
    with world.client.lookup([world.second]) as plans:
        stored = world.store(world.refresh(plans))
    assert stored.outcome is StoreOutcome.MIRROR
    assert world.assert_comes_back() is not None
    assert_nothing_is_held(world.client)


@pytest.mark.parametrize("call", ["reserve", "commit"])
def test_where_its_master_goes_before_the_call_it_is_stored_whole(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with world.client.lookup([world.second]) as plans:
        request = world.refresh(plans)
        before(monkeypatch, call, world.delete_master)
        stored = world.store(request)
    assert stored.outcome is StoreOutcome.MASTER
    assert stored.record_bytes > SHARED * world.identity.geometry.token_bytes
    assert world.assert_comes_back() is None
    assert_nothing_is_held(world.client)


def test_where_the_lease_is_lost_too_it_alone_is_refused(small: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_prompt(small.identity, private=5, shared=(), seed=77)
    with small.client.lookup([small.second]) as plans:
        request = small.refresh(plans)

        def lose() -> None:
            small.delete_master()
            plans.close()

        before(monkeypatch, "reserve", lose)
        plain = StoreRequest(other, small.engine.allocate(other.token_count))
        results = small.client.store_round([request, plain], small.engine.planes)
    assert results[0].segments[0].outcome is StoreOutcome.REFUSED
    assert isinstance(results[0].segments[0].error, LeaseExpiredError)
    assert {one.outcome for one in results[1].segments} == {StoreOutcome.MASTER}
    assert_nothing_is_held(small.client)


def test_no_record_is_rebuilt_of_a_master_whose_bytes_changed(
    small: World, local_node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small.client.lookup([small.second]) as plans:
        request = small.refresh(plans)
        place = plans[0].plan.segments[small.index].record
        assert place is not None
        before(monkeypatch, "reserve", small.delete_master)
        local_node.arena[place.extent.end - 70] ^= 1
        stored = small.store(request)
    assert stored.outcome is StoreOutcome.REFUSED
    assert isinstance(stored.error, CorruptError)
    assert_nothing_is_held(small.client)
