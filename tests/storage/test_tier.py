"""One contract, every tier."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvservice.model.cache import Extent
from kvservice.model.errors import InvalidInputError
from kvservice.storage.arena import Arena
from kvservice.storage.buffer import Bytes
from kvservice.storage.host_tier import HostTier
from kvservice.storage.record import RecordReader
from kvservice.storage.slab import FoundRecord, Slab
from kvservice.storage.ssd_tier import SsdTier
from kvservice.storage.tier import NaiveTier, Tier
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.slab_builders import make_record, scan

CAPACITY = 1 << 20


def host_tier() -> Tier:
    return HostTier(Arena(CAPACITY))


def naive_tier() -> Tier:
    return NaiveTier(CAPACITY)


def ssd_tier() -> Tier:
    return SsdTier(Slab.create(FaultyDisk(), CAPACITY))


@pytest.fixture(params=[naive_tier, host_tier, ssd_tier])
def tier(request: pytest.FixtureRequest) -> Iterator[Tier]:
    make: Callable[[], Tier] = request.param
    made = make()
    yield made
    if isinstance(made, HostTier):
        made.arena.close()
    if isinstance(made, SsdTier):
        made.slab.close()


def largest_bytes(tier: Tier) -> int:
    """The largest record; what remains of the capacity is the tier's own."""
    return tier.slab.record_bytes_max if isinstance(tier, SsdTier) else tier.capacity_bytes


def reserve(tier: Tier, length: int) -> Extent:
    extent = tier.reserve(length)
    assert extent is not None
    return extent


def content(length: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8)


def read(tier: Tier, extent: Extent) -> Bytes:
    target = np.empty(extent.length, np.uint8)
    tier.read(extent, target)
    return target


def test_what_was_written_is_read(tier: Tier) -> None:
    lengths = (1, 63, 4096, 4097, 100_000)
    extents = [reserve(tier, length) for length in lengths]
    for extent in extents:
        tier.write(extent, content(extent.length))
    assert [extent.length for extent in extents] == list(lengths)
    for extent in extents:
        np.testing.assert_array_equal(read(tier, extent), content(extent.length))


def test_the_source_and_what_was_read_are_copies(tier: Tier) -> None:
    extent, source = reserve(tier, 100), content(100)
    tier.write(extent, source)
    source[:] = 0
    read(tier, extent)[:] = 1
    np.testing.assert_array_equal(read(tier, extent), content(100))


def test_a_source_may_be_read_only(tier: Tier) -> None:
    extent, source = reserve(tier, 8), content(8)
    source.flags.writeable = False
    tier.write(extent, source)
    np.testing.assert_array_equal(read(tier, extent), source)


def test_a_full_tier_gives_nothing_and_has_room_again_after_a_free(tier: Tier) -> None:
    extent = reserve(tier, largest_bytes(tier))
    assert tier.reserve(1) is None
    tier.free(extent)
    assert tier.used_bytes == 0
    assert reserve(tier, largest_bytes(tier)).length == largest_bytes(tier)
    assert tier.used_bytes == tier.capacity_bytes


def test_used_bytes_cover_what_is_reserved(tier: Tier) -> None:
    extents = [reserve(tier, length) for length in (1, 5000)]
    assert 5001 <= tier.used_bytes <= tier.capacity_bytes
    for extent in extents:
        tier.free(extent)
    assert tier.used_bytes == 0


def test_a_record_larger_than_the_tier_is_not_reserved(tier: Tier) -> None:
    for length in (largest_bytes(tier) + 1, tier.capacity_bytes + 1):
        assert tier.reserve(length) is None
    assert tier.used_bytes == 0


@pytest.mark.parametrize("length", [0, -1])
def test_senseless_lengths_are_refused(tier: Tier, length: int) -> None:
    with pytest.raises(InvalidInputError, match="1 byte or more"):
        tier.reserve(length)


def test_an_extent_that_was_freed_is_refused(tier: Tier) -> None:
    extent = reserve(tier, 10)
    tier.free(extent)
    for use in (tier.free, lambda freed: tier.write(freed, content(10)), lambda freed: read(tier, freed)):
        with pytest.raises(InvalidInputError, match=r"not reserved|not allocated"):
            use(extent)


def test_a_part_of_an_extent_is_no_extent(tier: Tier) -> None:
    extent = reserve(tier, 100)
    with pytest.raises(InvalidInputError, match="not reserved"):
        read(tier, Extent(extent.offset, 50))


@pytest.mark.parametrize("array", [content(9), content(11), np.zeros(10, np.int8), np.zeros((1, 10), np.uint8)])
def test_arrays_that_do_not_match_are_refused(tier: Tier, array: Bytes) -> None:
    extent = reserve(tier, 10)
    for move in (tier.write, tier.read):
        with pytest.raises(InvalidInputError, match="flat uint8"):
            move(extent, array)


def test_threads_move_different_extents_at_once(tier: Tier) -> None:
    extents = [reserve(tier, 60_000) for _ in range(16)]

    def move(number: int) -> Bytes:
        tier.write(extents[number], content(60_000, seed=number))
        return read(tier, extents[number])

    with ThreadPoolExecutor(4) as pool:
        moved = list(pool.map(move, range(16)))
    for number, found in enumerate(moved):
        np.testing.assert_array_equal(found, content(60_000, seed=number))


def test_a_host_view_is_the_extent_itself() -> None:
    tier = HostTier(Arena(CAPACITY))
    extent = reserve(tier, 5000)
    tier.view(extent)[:] = content(5000)
    np.testing.assert_array_equal(read(tier, extent), content(5000))
    assert np.shares_memory(tier.view(extent), tier.arena.view)
    assert tier.view(extent).ctypes.data % 4096 == 0
    tier.free(extent)
    with pytest.raises(InvalidInputError, match="not reserved"):
        tier.view(extent)
    tier.arena.close()


def test_a_naive_tier_poisons_what_was_not_written() -> None:
    tier = NaiveTier(100)
    assert set(read(tier, reserve(tier, 10)).tolist()) == {0xCB}


def test_the_ssd_tier_writes_records_that_a_scan_finds_until_they_are_freed() -> None:
    tier = SsdTier(Slab.create(FaultyDisk(), CAPACITY))
    records = [make_record(tokens=100, seed=seed) for seed in range(3)]
    extents = [reserve(tier, len(record)) for record in records]
    for extent, record in zip(extents, records, strict=True):
        tier.write(extent, record)
    tier.free(extents.pop(1))
    found = [one for one in scan(tier.slab) if isinstance(one, FoundRecord)]
    assert [one.extent for one in found] == extents
    assert [one.head.header_checksum for one in found] == [
        RecordReader(read(tier, extent)).header_checksum for extent in extents
    ]
    assert found[0].stamp.sequence < found[1].stamp.sequence
