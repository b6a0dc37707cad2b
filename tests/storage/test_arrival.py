"""A record's pieces come in any order and from several threads; each layer is verified once it is whole."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.model.errors import CorruptError
from kvservice.model.geometry import attention_geometry
from kvservice.storage.arrival import RecordArrival, Sections, is_head_here
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import RecordReader, master_layout
from tests.server.builders import make_identity, make_meta, make_planes, write_record

GEOMETRY = attention_geometry(layers=12, heads=2, head_size=64, dtype="bfloat16")
META = make_meta(make_identity(GEOMETRY), tokens=64)
WAIT_S = 20


def record(seed: int = 0) -> Bytes:
    view = np.zeros(master_layout(META).record_bytes, np.uint8)
    write_record(view, META, make_planes(GEOMETRY, META.tokens, seed))
    return view


def bounds_of(view: Bytes) -> tuple[int, ...]:
    return RecordReader(view).layout.bounds


@given(st.data())
def test_each_layer_is_told_once_and_when_its_last_byte_is_there(data: st.DataObject) -> None:
    view, told = record(), list[int]()
    there = np.zeros(len(view), bool)
    bounds, sections = bounds_of(view), Sections(view, lambda: bounds_of(view))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(view) - 1), max_size=40)))
    parts = data.draw(st.permutations(list(pairwise([0, *cuts, len(view)]))))
    for start, end in parts:
        there[start:end] = True
        new = sections.arrived(start, end)
        told += new
        until = len(view) if there.all() else int(there.argmin())
        whole = [one for one in range(GEOMETRY.layers) if there[slice(*bounds[one : one + 2])].all()]
        assert new == sorted(new)
        assert set(told) <= set(whole)
        assert sorted(told) == whole or not is_head_here(view, until)
    assert sorted(told) == list(range(GEOMETRY.layers))


def test_layers_without_bytes_are_whole_with_the_head() -> None:
    view = record()
    first, end = bounds_of(view)[0], len(view)
    sections = Sections(view, lambda: (first, first, end, end, end))
    assert sections.arrived(first, end - 4) == []
    assert sections.arrived(0, first) == [0, 2, 3]
    assert sections.arrived(end - 4, end) == [1]


def test_after_a_head_that_is_wrong_the_next_piece_tries_again() -> None:
    view, calls = record(), list[int]()
    bounds = bounds_of(view)

    def open_head() -> tuple[int, ...]:
        calls.append(1)
        if len(calls) == 1:
            raise CorruptError("wrong")
        return bounds

    sections = Sections(view, open_head)
    with pytest.raises(CorruptError):
        sections.arrived(0, bounds[1])
    assert sections.arrived(bounds[1], bounds[2]) == [0, 1]


def test_bytes_that_come_twice_are_no_record() -> None:
    view = record()
    bounds = bounds_of(view)
    sections = Sections(view, lambda: bounds)
    assert sections.arrived(0, bounds[2]) == [0, 1]
    with pytest.raises(CorruptError, match="came twice"):
        sections.arrived(bounds[0], bounds[1])


def test_no_layer_is_right_while_another_thread_opens_the_head() -> None:
    view = record()
    arrival = RecordArrival(view, META.namespace, META.key, RecordReader(view).generation, None)

    class Opened(bytearray):
        """Replaced while somebody looks into it."""

        def find(self, *asked: Any) -> int:
            arrival._right = bytearray(GEOMETRY.layers)
            return super().find(*asked)

    arrival._right = Opened()
    assert arrival.layers == 0


def test_two_threads_look_at_their_layers_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    view, both = record(), threading.Barrier(2, timeout=WAIT_S)
    bounds, generation = bounds_of(view), RecordReader(view).generation
    monkeypatch.setattr(RecordReader, "verify_layer", lambda *_: both.wait())
    arrival = RecordArrival(view, META.namespace, META.key, generation, None)
    assert arrival.arrived(0, bounds[0]) == 0
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(arrival.arrived, bounds[:2], bounds[1:3]))
    assert arrival.layers == 2


@pytest.mark.parametrize("wrong", [None, 7])
def test_many_threads_verify_each_layer_once(monkeypatch: pytest.MonkeyPatch, wrong: int | None) -> None:
    source, verified = record(), list[int]()
    reader = RecordReader(source)
    if wrong is not None:
        source[reader.layout.section_offsets[wrong]] ^= 1
    verify_layer = RecordReader.verify_layer

    def verify(self: RecordReader, layer: int) -> None:
        verified.append(layer)
        verify_layer(self, layer)

    monkeypatch.setattr(RecordReader, "verify_layer", verify)
    for seed in range(20):
        target = np.zeros(len(source), np.uint8)
        arrival = RecordArrival(target, META.namespace, META.key, reader.generation, None)
        parts = [(at, min(at + 5000, len(source))) for at in range(0, len(source), 5000)]
        random.Random(seed).shuffle(parts)
        verified.clear()

        def bring(part: tuple[int, int], target: Bytes = target) -> int:
            target[part[0] : part[1]] = source[part[0] : part[1]]
            return arrival.arrived(*part)  # noqa: B023  used in its own turn

        with ThreadPoolExecutor(4) as pool:
            results = [pool.submit(bring, part) for part in parts]
        errors = [one.exception() for one in results]
        if wrong is None:
            assert not any(errors)
            assert sorted(verified) == list(range(GEOMETRY.layers))
            assert max(one.result() for one in results) == arrival.layers == GEOMETRY.layers
        else:
            assert any(isinstance(error, CorruptError) for error in errors)
            assert arrival.layers == wrong
            assert verified.count(wrong) == 1
