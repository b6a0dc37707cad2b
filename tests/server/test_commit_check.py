"""A record that is checked as its bytes come ends as one that is checked at its commit, whatever is wrong with it."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvservice.commit_check import CommitCheck
from kvservice.model.geometry import attention_geometry
from kvservice.model.segment import ContextId
from kvservice.peers.streams_channel import cut
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import RecordReader, master_layout
from tests.server.builders import World, make_identity, make_meta, make_planes, write_record

GEOMETRY = attention_geometry(layers=6, heads=2, head_size=64, dtype="bfloat16")
IDENTITY = make_identity(GEOMETRY)
META = make_meta(IDENTITY, tokens=64)
Spoil = Callable[[Bytes], Any]
Bring = Callable[[CommitCheck, Bytes, Bytes], None]


def nothing(_: Bytes) -> None:
    return


def flipped(at: float) -> Spoil:
    def spoil(view: Bytes) -> None:
        view[int(at * len(view))] ^= 16

    return spoil


def in_pieces(length: int) -> Bring:
    def bring(check: CommitCheck, view: Bytes, whole: Bytes) -> None:
        for start, end in cut(0, len(view), length):
            view[start:end] = whole[start:end]
            check.arrived(start, end)

    return bring


async def outcome_of(spoil: Spoil, bring: Bring | None, *, said: int = 0, meta: Any = META, planes: Any = None) -> str:
    """The code of its commit, "" for a record that is held; ``bring``: how its bytes come, None: all at once."""
    world = World()
    client = world.client(IDENTITY)
    id_ = (await client.reserve(meta, master_layout(META).record_bytes)).reserved.id
    reservation = world.node.store.open[id_]
    view = world.node.tier.view(reservation.extent)
    checksum = write_record(view, META, planes or make_planes(GEOMETRY, META.tokens))
    spoil(view)
    if bring is not None:
        whole = view.copy()
        view[:] = 0
        reservation.check = check = world.node.store.check(reservation)
        bring(check, view, whole)
    outcome = await client.commit(id_, checksum ^ said)
    assert bool(world.node.tier.used_bytes) is not bool(outcome.error.code)
    world.check()
    code: str = outcome.error.code
    return code


def hostile_planes() -> Any:
    planes = make_planes(GEOMETRY, META.tokens)
    planes[4][1][5, 5] = 0x7F80
    return planes


@pytest.mark.parametrize("piece", [777, 4096, 1 << 20])
@pytest.mark.parametrize(
    ("spoil", "more", "code"),
    [
        (nothing, {}, ""),
        (flipped(0.0), {}, "CORRUPT"),
        (flipped(0.5), {}, "CHECKSUM_MISMATCH"),
        (flipped(0.999), {}, "CHECKSUM_MISMATCH"),
        (nothing, {"said": 1}, "CHECKSUM_MISMATCH"),
        (flipped(0.5), {"said": 1}, "CHECKSUM_MISMATCH"),
        (nothing, {"planes": hostile_planes()}, "NON_FINITE"),
        (nothing, {"meta": replace(META, key=replace(META.key, context=ContextId(bytes(32))))}, "INVALID_INPUT"),
    ],
)
async def test_in_pieces_or_at_once_the_outcome_is_the_same(spoil: Spoil, more: Any, code: str, piece: int) -> None:
    at_once = await outcome_of(spoil, None, **more)
    assert await outcome_of(spoil, in_pieces(piece), **more) == at_once
    assert (at_once == code) or (code == "CORRUPT" and at_once), at_once


@pytest.mark.parametrize(
    ("spoil", "more", "code"),
    [(nothing, {}, ""), (flipped(0.5), {}, "CHECKSUM_MISMATCH"), (nothing, {"planes": hostile_planes()}, "NON_FINITE")],
)
@pytest.mark.parametrize("seed", range(5))
async def test_the_outcome_is_the_same_in_any_order_and_from_many_threads(
    spoil: Spoil, more: Any, code: str, seed: int
) -> None:
    def bring(check: CommitCheck, view: Bytes, whole: Bytes) -> None:
        parts = cut(0, len(view), 3000)
        random.Random(seed).shuffle(parts)

        def one(part: tuple[int, int]) -> None:
            view[slice(*part)] = whole[slice(*part)]
            check.arrived(*part)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(one, parts))

    assert await outcome_of(spoil, bring, **more) == code


async def test_what_was_checked_as_it_came_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    verify_layer = RecordReader.verify_layer

    def verify(self: RecordReader, layer: int) -> None:
        read.append(layer)
        verify_layer(self, layer)

    monkeypatch.setattr(RecordReader, "verify_layer", verify)
    assert not await outcome_of(nothing, in_pieces(4096))
    assert read == list(range(GEOMETRY.layers))


async def test_layers_are_checked_when_their_last_byte_is_there() -> None:
    world = World()
    client = world.client(IDENTITY)
    id_, checksum = await client.begin(META, make_planes(GEOMETRY, META.tokens))
    reservation = world.node.store.open[id_]
    view = world.node.tier.view(reservation.extent)
    reader, check = RecordReader(view), CommitCheck(reservation, view)
    last = reader.layout.section_offsets[-1]
    broken = np.copy(view)
    view[last:] ^= 1
    check.arrived(0, last)
    check.arrived(last, len(view) - 1)
    view[:] = broken
    assert check.finish(checksum).meta == META
