"""Pieces that come in any order and from several threads are looked at in order, and by one thread at a time."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.model.errors import CorruptError
from kvservice.model.geometry import attention_geometry
from kvservice.storage.arrival import InOrder, RecordArrival
from kvservice.storage.record import RecordReader, master_layout
from tests.server.builders import make_identity, make_meta, make_planes, write_record

GEOMETRY = attention_geometry(layers=12, heads=2, head_size=64, dtype="bfloat16")
META = make_meta(make_identity(GEOMETRY), tokens=64)
WAIT_S = 20


@given(st.permutations(range(9)))
def test_what_is_looked_at_grows_and_has_no_gap(order: list[int]) -> None:
    seen, there = [0], set[int]()

    def look(end: int) -> None:
        assert end >= seen[-1]
        assert set(range(end)) <= there
        seen.append(end)

    pieces = InOrder(look)
    for number in order:
        there.add(number)
        pieces.arrived(number, number + 1)
        whole = next(end for end in range(10) if end not in there)
        assert seen[-1] == whole
    assert seen[-1] == 9


def test_who_comes_while_another_looks_leaves_it_to_that_one() -> None:
    looking, go_on, seen = threading.Event(), threading.Event(), list[tuple[int, int]]()

    def look(end: int) -> None:
        seen.append((end, threading.get_ident()))
        looking.set()
        assert go_on.wait(WAIT_S)

    pieces = InOrder(look)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(pieces.arrived, 0, 1)
        assert looking.wait(WAIT_S)
        pieces.arrived(2, 3)
        pieces.arrived(1, 2)
        assert len(seen) == 1, "not looked at here"
        go_on.set()
        first.result(WAIT_S)
        its_thread = other.submit(threading.get_ident).result()
    assert seen == [(1, its_thread), (3, its_thread)]


def test_after_an_error_the_next_piece_looks_again() -> None:
    seen = list[int]()

    def look(end: int) -> None:
        seen.append(end)
        if len(seen) == 1:
            raise KeyError(end)

    pieces = InOrder(look)
    with pytest.raises(KeyError):
        pieces.arrived(0, 1)
    pieces.arrived(1, 2)
    assert seen == [1, 2]


@pytest.mark.parametrize("wrong", [None, 7])
def test_many_threads_verify_each_layer_once(monkeypatch: pytest.MonkeyPatch, wrong: int | None) -> None:
    source = np.zeros(master_layout(META).record_bytes, np.uint8)
    write_record(source, META, make_planes(GEOMETRY, META.tokens))
    reader, verified = RecordReader(source), list[int]()
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

        def bring(part: tuple[int, int], target: "np.ndarray[tuple[int], np.dtype[np.uint8]]" = target) -> int:
            target[part[0] : part[1]] = source[part[0] : part[1]]
            return arrival.arrived(*part)  # noqa: B023  used in its own turn

        with ThreadPoolExecutor(4) as pool:
            results = [pool.submit(bring, part) for part in parts]
        errors = [one.exception() for one in results]
        if wrong is None:
            assert not any(errors)
            assert verified == list(range(GEOMETRY.layers))
            assert max(one.result() for one in results) == arrival.layers == GEOMETRY.layers
        else:
            assert any(isinstance(error, CorruptError) for error in errors)
            assert arrival.layers == wrong
            assert set(verified) == set(range(wrong + 1))
