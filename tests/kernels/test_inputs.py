"""Bad input is refused with a sentence that says what to do, and nothing has been written."""

from collections.abc import Callable

import numpy as np
import pytest

from kvservice.kernels import cpu
from kvservice.kernels.shapes import KernelInputError, MirrorRows, PlaneShape, Rotation, Target, check_slots
from tests.kernels.builders import Restore, make_restore


def make_case() -> Restore:
    case = make_restore(3, geometry="small", tokens=8, targets=1)
    rows = [plane[:3].copy() for plane in case.master]
    runs = np.array([[1, 2], [5, 1]], np.int32)
    case.targets[0] = Target(9, np.arange(8), MirrorRows(4, [runs, runs], rows))
    return case


def mirror_of(case: Restore) -> MirrorRows:
    mirror = case.targets[0].mirror
    assert mirror is not None
    return mirror


def set_runs(runs: list[list[int]], dtype: type = np.int32) -> Callable[[Restore], None]:
    def change(case: Restore) -> None:
        mirror_of(case).runs = [np.array(runs, dtype)] * 2

    return change


def set_slots(slots: object) -> Callable[[Restore], None]:
    def change(case: Restore) -> None:
        case.targets[0].slots = slots

    return change


def narrow_master(case: Restore) -> None:
    case.master[1] = case.master[1][:, :-1]


def apart_master(case: Restore) -> None:
    case.master[0] = np.asfortranarray(case.master[0])


def short_plane(case: Restore) -> None:
    case.master[1] = case.master[1][:-1].copy()


def wrong_type(case: Restore) -> None:
    case.master[0] = case.master[0].astype(np.uint32)


def unknown_type(case: Restore) -> None:
    case.dtype = "float8"


def missing_frequency(case: Restore) -> None:
    case.rotation = Rotation((1.0,))


def too_far(case: Restore) -> None:
    case.targets[0].position = 2**40


def outside_head(case: Restore) -> None:
    case.shapes = [PlaneShape(3, 8, 4, 8), PlaneShape(3, 8)]


BAD: list[tuple[Callable[[Restore], None], str]] = [
    (set_runs([[1, 2], [2, 1]]), "disjoint"),
    (set_runs([[5, 1], [1, 2]]), "sorted"),
    (set_runs([[-1, 3]]), "inside"),
    (set_runs([[6, 3]]), "inside"),
    (set_runs([[1, 0], [2, 3]]), "not empty"),
    (set_runs([[1, 1]]), "cover 1"),
    (set_runs([[1, 2], [5, 1]], np.int64), "int32"),
    (set_slots(np.arange(7)), r"int64 \[8\]"),
    (set_slots(np.arange(8) - 2), "does not fit"),
    (set_slots(np.arange(8) + 1000), "outside paged memory"),
    (narrow_master, "contiguous"),
    (apart_master, "contiguous"),
    (short_plane, "give all rows"),
    (wrong_type, "uint16"),
    (unknown_type, "no kernel"),
    (missing_frequency, "one a pair"),
    (too_far, "nearer position"),
    (outside_head, "inside the head"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_restore_is_refused_before_anything_is_written(change: Callable[[Restore], None], message: str) -> None:
    case = make_case()
    paged = case.make_paged()
    before = [memory.copy() for memory in paged]
    change(case)
    with pytest.raises(KernelInputError, match=message):
        cpu.restore_layer(
            case.master, case.master_position, case.targets, paged, case.shapes, case.rotation, case.dtype
        )
    for memory, old in zip(paged, before, strict=True):
        np.testing.assert_array_equal(memory, old)


@pytest.mark.parametrize(
    ("slots", "message"),
    [([[0, 1], [1, -1]], "share a slot"), ([[0, 16]], "do not fit"), ([[-2, 0]], "do not fit"), ([[3, 3]], "share")],
)
def test_slots_out_of_range_or_used_twice_are_refused(slots: list[list[int]], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        check_slots([np.array(column) for column in slots], 16)


def test_good_slots_pass_and_left_out_rows_may_repeat() -> None:
    check_slots([np.array([-1, -1, 3]), np.array([15, -1])], 16)
    check_slots([], 0)


def test_a_gather_refuses_left_out_rows_and_read_only_output() -> None:
    case = make_case()
    paged, out = case.make_paged(), [plane.copy() for plane in case.master]
    with pytest.raises(KernelInputError, match="leave out rows"):
        cpu.gather_layer(paged, np.arange(8) - 1, case.shapes, out, case.dtype)
    out[1].flags.writeable = False
    with pytest.raises(KernelInputError, match="read-only"):
        cpu.gather_layer(paged, np.arange(8), case.shapes, out, case.dtype)


def test_caches_of_different_lengths_are_not_compared() -> None:
    case = make_case()
    short = [plane[:-1].copy() for plane in case.master]
    with pytest.raises(KernelInputError, match="not one segment"):
        cpu.diff_layer(case.master, 0, short, 0, case.shapes, case.rotation, case.dtype)
    with pytest.raises(KernelInputError, match="not caches of one segment"):
        cpu.deviation_layer([case.master, short], [0, 0], case.shapes, case.rotation, case.dtype)
    with pytest.raises(KernelInputError, match="equally many"):
        cpu.row_deviation(case.master[0], short[0], case.shapes[0], case.dtype)


def test_planes_may_be_read_only_views_of_an_arena() -> None:
    case = make_case()
    wanted, written = case.make_paged(), case.make_paged()
    cpu.restore_layer(case.master, case.master_position, case.targets, wanted, case.shapes, case.rotation, case.dtype)
    mirror = mirror_of(case)
    for array in (*case.master, *mirror.rows, *mirror.runs, case.targets[0].slots):
        array.flags.writeable = False
    cpu.restore_layer(case.master, case.master_position, case.targets, written, case.shapes, case.rotation, case.dtype)
    for left, right in zip(written, wanted, strict=True):
        np.testing.assert_array_equal(left, right)
