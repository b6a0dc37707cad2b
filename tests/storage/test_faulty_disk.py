"""The double: what each fault does, what a crash may take and what never, and that a seed repeats a run."""

import random
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
import pytest

from kvservice.model.errors import ConfigError, DiskError, DiskFullError
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import BLOCK_BYTES, block_buffer
from tests.storage import faulty_disk
from tests.storage.faulty_disk import FAULT_NAMES, NO_FAULTS, SECTOR_BYTES, Faults, FaultyDisk, FaultyFile, all_faults

SEEDS = range(40)
BLOCKS = 16
OLD, NEW, NEWER = 1, 2, 3


def filled(count: int, value: int) -> Bytes:
    buffer = block_buffer(count * BLOCK_BYTES)
    buffer[:] = value
    return buffer


def make(disk: FaultyDisk, value: int = OLD) -> FaultyFile:
    """A file of sixteen blocks of one synced value, whatever faults are set."""
    faults, disk.faults = disk.faults, NO_FAULTS
    file = disk.open("slab.kv", BLOCKS * BLOCK_BYTES)
    file.write_from(0, [filled(BLOCKS, value)])
    file.sync()
    disk.faults = faults
    return file


def values(disk: FaultyDisk) -> list[int]:
    """The one value that each block holds."""
    table = disk.raw("slab.kv").reshape(-1, BLOCK_BYTES)
    assert (table == table[:, :1]).all(), f"{disk}: a block is torn"
    return [int(value) for value in table[:, 0]]


def write(file: FaultyFile, first: int, count: int, value: int) -> None:
    file.write_from(first * BLOCK_BYTES, [filled(count, value)])


def changed(disk: FaultyDisk) -> list[int]:
    """Offsets of the bytes that are not OLD."""
    return np.flatnonzero(disk.raw("slab.kv") != OLD).tolist()


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("write_error", DiskError, "Input/output error"),
        ("is_full", DiskFullError, "No space left"),
        ("short_write", DiskError, "ended after"),
        ("torn_write", DiskError, "Input/output error"),
    ],
)
def test_a_failing_write_says_so_with_the_seed_and_only_a_first_part_arrives(
    fault: str, kind: type[DiskError], message: str
) -> None:
    lengths: set[int] = set()
    for seed in SEEDS:
        disk = FaultyDisk(seed, Faults(**{fault: 1.0}))
        file = make(disk)
        with pytest.raises(kind, match=rf"write at offset 8192 of /faulty-disk-of-seed-{seed}/slab\.kv.*{message}"):
            write(file, 2, 4, NEW)
        assert disk.counts == {fault: 1}
        there = changed(disk)
        assert there == list(range(2 * BLOCK_BYTES, 2 * BLOCK_BYTES + len(there)))
        lengths.add(len(there))
    steps = {"write_error": {0}, "torn_write": set(range(0, 4 * BLOCK_BYTES, SECTOR_BYTES))}
    assert lengths <= steps.get(fault, set(range(0, 4 * BLOCK_BYTES, BLOCK_BYTES)))
    assert fault == "write_error" or len(lengths) > 3


def test_a_silent_fault_of_a_write_raises_nothing() -> None:
    torn: set[int] = set()
    for seed in SEEDS:
        disk = FaultyDisk(seed, Faults(silent_torn_write=1.0))
        write(make(disk), 2, 4, NEW)
        torn.add(len(changed(disk)))
        disk = FaultyDisk(seed, Faults(lost_write=1.0))
        write(make(disk), 2, 4, NEW)
        assert not changed(disk)
        disk = FaultyDisk(seed, Faults(flipped_write=1.0))
        write(make(disk), 2, 4, NEW)
        wrong = disk.raw("slab.kv")[2 * BLOCK_BYTES : 6 * BLOCK_BYTES] ^ NEW
        assert np.bitwise_count(wrong).sum() == 1
        assert disk.counts == {"flipped_write": 1}
    assert all(length % SECTOR_BYTES == 0 and length < 4 * BLOCK_BYTES for length in torn)
    assert any(length % BLOCK_BYTES for length in torn)


def test_a_misdirected_write_lands_whole_on_other_blocks() -> None:
    places: set[int] = set()
    for seed in range(200):
        disk = FaultyDisk(seed, Faults(misdirected_write=1.0))
        write(make(disk), 2, 4, NEW)
        place = values(disk).index(NEW)
        assert values(disk) == [NEW if place <= block < place + 4 else OLD for block in range(BLOCKS)]
        places.add(place)
    assert places == set(range(BLOCKS - 3)) - {2}
    disk = FaultyDisk(0, Faults(misdirected_write=1.0))
    write(make(disk), 0, BLOCKS, NEW)  # no other place
    assert (values(disk), disk.counts) == ([NEW] * BLOCKS, {})


def test_a_failing_read_leaves_nothing_that_could_be_taken_for_data() -> None:
    for seed in SEEDS:
        for fault in ("read_error", "short_read"):
            disk = FaultyDisk(seed, Faults(**{fault: 1.0}))
            file, targets = make(disk), [filled(1, NEW), filled(3, NEW)]
            with pytest.raises(DiskError, match=f"read at offset 4096 of .*seed-{seed}/"):
                file.read_into(BLOCK_BYTES, targets)
            read = np.concatenate(targets)
            good = int((read == OLD).sum())
            assert good % BLOCK_BYTES == 0
            assert good < len(read) if fault == "short_read" else good == 0
            assert (read[good:] == faulty_disk.POISON).all()


def test_a_bit_flipped_while_reading_is_right_the_next_time() -> None:
    for seed in SEEDS:
        disk = FaultyDisk(seed, Faults(flipped_read=1.0))
        file, targets = make(disk), [filled(1, 0), filled(3, 0)]
        file.read_into(BLOCK_BYTES, [targets[0], targets[1][:0], targets[1]])
        assert np.bitwise_count(np.concatenate(targets) ^ OLD).sum() == 1
        assert not changed(disk)


def test_a_crash_takes_any_part_of_what_is_not_synced_and_nothing_else() -> None:
    few: set[tuple[int, ...]] = set()
    many: set[tuple[int, ...]] = set()
    for seed in range(100):
        disk = FaultyDisk(seed)
        file = make(disk)
        write(file, 0, 4, NEW)
        write(file, 8, 8, NEW)
        after = values(disk.crash())
        assert set(after) <= {OLD, NEW}
        assert after[4:8] == [OLD] * 4
        few.add(tuple(after[:4]))
        many.add(tuple(after[8:]))
    assert len(few) == 16  # every subset
    assert {(OLD,) * 8, (NEW,) * 8} < many  # all and none of many blocks happen too


def test_a_block_written_twice_may_come_back_as_any_of_its_versions() -> None:
    found: set[int] = set()
    for seed in SEEDS:
        disk = FaultyDisk(seed)
        file = make(disk)
        write(file, 0, 4, NEW)
        write(file, 3, 2, NEWER)
        found.add(values(disk.crash())[3])
    assert found == {OLD, NEW, NEWER}


def test_what_was_synced_survives_every_crash_and_what_was_killed_survives_until_one() -> None:
    losses = 0
    for seed in SEEDS:
        disk = FaultyDisk(seed)
        file = make(disk)
        write(file, 0, 8, NEW)
        file.sync()
        write(file, 8, 8, NEW)
        disk = disk.kill()
        assert values(disk) == [NEW] * BLOCKS
        after = values(disk.crash())
        assert after[:8] == [NEW] * 8
        losses += OLD in after
    assert losses


def test_a_sync_after_one_that_failed_does_not_make_up_for_it() -> None:
    found: set[tuple[int, ...]] = set()
    for seed in SEEDS:
        disk = FaultyDisk(seed, Faults(sync_error=1.0))
        file = make(disk)
        write(file, 0, 4, NEW)
        with pytest.raises(DiskError, match=rf"cannot sync .*seed-{seed}/slab\.kv: Input/output error"):
            file.sync()
        disk.faults = NO_FAULTS
        write(file, 2, 4, NEWER)
        file.sync()
        write(file, 1, 1, NEWER)
        after = values(disk.crash())
        assert after[2:6] == [NEWER] * 4  # written anew, then synced well
        found.add(tuple(after[:2]))
    assert found == {(OLD, OLD), (OLD, NEWER), (NEW, NEW), (NEW, NEWER)}


def test_a_punched_hole_may_be_filled_again_by_a_crash_unless_it_was_synced() -> None:
    found: set[int] = set()
    for seed in SEEDS:
        disk = FaultyDisk(seed)
        file = make(disk)
        file.punch(0, 4 * BLOCK_BYTES)
        file.sync()
        file.punch(8 * BLOCK_BYTES, BLOCK_BYTES)
        disk = disk.crash()
        after = values(disk)
        assert after[:4] == [0] * 4
        found.add(after[8])
        with closing(disk.open("slab.kv")) as again:
            assert again.next_data(0) == 4 * BLOCK_BYTES
            assert again.physical_bytes() == sum(map(bool, after)) * BLOCK_BYTES
    assert found == {0, OLD}


def test_small_files_and_the_sizes_of_files_survive_a_crash() -> None:
    disk = FaultyDisk(1)
    make(disk).resize(20 * BLOCK_BYTES)
    disk.write_small("epoch", b"7")
    disk.remove("none")
    disk = disk.crash()
    assert disk.read_small("epoch") == b"7"
    assert values(disk) == [OLD] * BLOCKS + [0] * 4


def test_small_files_fail_whole() -> None:
    disk = FaultyDisk(3)
    disk.write_small("epoch", b"1")
    for faults in (Faults(write_error=1.0), Faults(is_full=1.0)):
        disk.faults = faults
        with pytest.raises(DiskError, match="write /faulty-disk-of-seed-3/epoch"):
            disk.write_small("epoch", b"2")
    disk.faults = Faults(read_error=1.0)
    with pytest.raises(DiskError, match="read /faulty-disk-of-seed-3/epoch"):
        disk.read_small("epoch")
    disk.faults = Faults(flipped_read=1.0)
    assert disk.read_small("epoch") != b"1"
    disk.faults = NO_FAULTS
    assert disk.read_small("epoch") == b"1"


def test_the_dead_do_nothing_and_hold_no_lock() -> None:
    disk = FaultyDisk(5)
    file, other = make(disk), disk.beside()
    disk.lock("the dead one")
    with pytest.raises(ConfigError, match="seed-5 is in use by the dead one"):
        other.lock("the next one")
    heir = disk.crash()
    for call in (file.sync, file.physical_bytes, disk.free_bytes, other.free_bytes, disk.kill):
        with pytest.raises(AssertionError, match="seed-5: this process has died"):
            call()
    heir.lock("the next one")
    heir.close()
    with pytest.raises(AssertionError, match="seed-5 is closed"):
        heir.free_bytes()
    heir.kill().lock("the one after it")


def test_what_is_not_closed_can_be_seen_and_the_closed_cannot_be_used() -> None:
    disk = FaultyDisk(5)
    file = make(disk)
    assert disk.open_files == {file}
    file.close()
    file.close()
    assert not disk.open_files
    with pytest.raises(AssertionError, match=r"seed-5/slab\.kv is closed"):
        file.sync()


def test_capacity_is_taken_by_files_and_given_back() -> None:
    disk = FaultyDisk(9, capacity_bytes=20 * BLOCK_BYTES)
    file = make(disk)
    assert disk.free_bytes() == 4 * BLOCK_BYTES
    disk.write_small("epoch", b"7")
    assert disk.free_bytes() == 3 * BLOCK_BYTES
    file.punch(0, 2 * BLOCK_BYTES)
    with closing(disk.open("other", 5 * BLOCK_BYTES)):
        assert disk.free_bytes() == 0
    too_much: list[Callable[[], None]] = [
        lambda: write(file, 1, 2, NEW),
        lambda: disk.write_small("more", b"1"),
        lambda: file.resize(1 << 20),
    ]
    for call in too_much:
        with pytest.raises(DiskFullError, match=r"seed-9/.*No space left"):
            call()
    write(file, 2, 2, NEW)  # over blocks that are taken already
    disk.remove("other")
    write(file, 0, 2, NEW)
    assert disk.free_bytes() == 3 * BLOCK_BYTES


def test_the_oldest_of_very_much_unsynced_is_written_back_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulty_disk, "UNSYNCED_BLOCKS_MAX", 4)
    for seed in SEEDS:
        disk = FaultyDisk(seed)
        file = make(disk)
        for block in range(BLOCKS):
            write(file, block, 1, NEW)
        assert values(disk.crash())[: BLOCKS - 4] == [NEW] * (BLOCKS - 4)


def run(seed: int, faults: Faults, steps: int, goal: int = 0) -> FaultyDisk:
    """Random operations, until ``steps`` are done and ``goal`` faults have struck."""
    disk, chance = FaultyDisk(seed, faults), random.Random(seed)
    file, buffer, step = make(disk), filled(BLOCKS, NEW), 0
    while step < steps or disk.counts.total() < goal:
        step += 1
        offset, length = chance.randrange(8) * BLOCK_BYTES, chance.randint(1, 4) * BLOCK_BYTES
        arrays: Sequence[Bytes] = [buffer[:length], buffer[-BLOCK_BYTES:]]
        try:
            match chance.randrange(16):
                case 0:
                    file.sync()
                case 1:
                    file.punch(offset, length)
                case 2 if chance.random() < 0.1:
                    disk = disk.crash()
                    file = disk.open("slab.kv")
                case operation if operation % 2:
                    file.write_from(offset, arrays)
                case _:
                    file.read_into(offset, arrays)
        except DiskError as error:
            if f"seed-{seed}/" not in str(error):
                raise
    return disk


def test_a_seed_repeats_a_run() -> None:
    first, again, other = (run(seed, all_faults(0.02), 2000) for seed in (1, 1, 2))
    assert first.counts == again.counts != other.counts
    assert np.array_equal(first.raw("slab.kv"), again.raw("slab.kv"))
    assert str(first).startswith("FaultyDisk(seed=1) after {")


def test_a_hundred_thousand_faults_of_every_kind_leave_the_books_in_order() -> None:
    disk = run(11, all_faults(0.2), 0, goal=100_000)
    assert set(disk.counts) == set(FAULT_NAMES)
    content = disk._medium.files["slab.kv"]
    assert content.taken_blocks == np.count_nonzero(content.is_taken)
    assert not (content.has_data & ~content.is_taken).any()
    assert not content.bytes.reshape(-1, BLOCK_BYTES)[~content.has_data].any()
