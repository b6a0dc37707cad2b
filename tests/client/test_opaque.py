"""Opaque rows: what was put comes back bit for bit, once, to its owner only, or there is a reason why not."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from kvservice.app import LocalNode, Service
from kvservice.client import Client, PartKind, RoundPrompt, Session, SharedMemoryTransport, opaque
from kvservice.client.in_process import InProcessTransport
from kvservice.client.opaque import FoundRows, OpaqueStore
from kvservice.limits import NodeLimits
from kvservice.model.cache import Tier
from kvservice.model.errors import (
    CapacityError,
    CorruptError,
    GeometryMismatchError,
    InvalidIdentityError,
    InvalidInputError,
    KVServiceError,
    LeaseExpiredError,
    LimitError,
    StaleEpochError,
    UnavailableError,
)
from kvservice.model.geometry import attention_geometry, opaque_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import opaque_rope
from kvservice.model.segment import root_context
from kvservice.storage.slab import SLAB_NAME
from kvservice.wire.v1 import cache_pb2 as wire
from tests.client.builders import make_settings

MIB = 1 << 20
SIZES = (1, 2, 63, 64, 65, 4095, 4096, 4097, 524_288, 524_289, 3_000_001)


def identity_of(row_bytes: int, weights: str = "r1") -> Identity:
    return Identity("test", "tiny", weights, opaque_geometry(row_bytes), (opaque_rope(),))


def content(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng([size, seed]).bytes(size)


@contextmanager
def opened(service: Service | LocalNode, weights: str = "r1") -> Iterator[OpaqueStore]:
    with session_of(service, weights) as session:
        yield OpaqueStore(session, lambda row_bytes: identity_of(row_bytes, weights))


def session_of(service: Service | LocalNode, weights: str = "r1", *, is_writer: bool = True) -> Session:
    if isinstance(service, LocalNode):
        return Session(InProcessTransport(service), [identity_of(1, weights)], is_writer=is_writer)
    return Session(SharedMemoryTransport(address_of(service)), [identity_of(1, weights)], is_writer=is_writer)


def address_of(service: Service) -> str:
    return f"unix:{service.addresses.socket}"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(make_settings(tmp_path, host_bytes=16 * MIB)) as service:
        yield service


@pytest.fixture
def store(service: Service) -> Iterator[OpaqueStore]:
    with opened(service) as store:
        yield store


def read(found: FoundRows, index: int, size: int, *, verify: bool = True) -> bytes:
    target = bytearray(size)
    found.read(index, target, verify=verify)
    return bytes(target)


def get(store: OpaqueStore, key: bytes, size: int) -> bytes | None:
    with store.find([(key, size)]) as found:
        return read(found, 0, size) if found.present[0] else None


def session_behind(store: OpaqueStore) -> Session:
    return store._session


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_objects_of_any_size_come_back_bit_for_bit(tmp_path: Path, is_local: bool, verify: bool) -> None:
    settings = make_settings(tmp_path, host_bytes=16 * MIB)
    with (LocalNode if is_local else Service)(settings) as node, opened(node) as store:
        keys = [(b"key %d" % size, size) for size in SIZES]
        assert store.put([(key, content(size)) for key, size in keys]) == [None] * len(SIZES)
        with store.find(keys) as found:
            assert found.present == (True,) * len(SIZES)
            assert set(found.tiers) == {Tier.HOST}
            for index, (_, size) in enumerate(keys):
                assert read(found, index, size, verify=verify) == content(size)


def test_nan_like_bytes_are_bytes(store: OpaqueStore) -> None:
    ones = b"\xff" * 4096
    assert store.put([(b"k", ones)]) == [None]
    assert get(store, b"k", 4096) == ones


def test_many_objects_take_one_call_and_one_lease(store: OpaqueStore) -> None:
    items = [(b"%d" % index, content(512, index)) for index in range(1000)]
    assert store.put(items) == [None] * 1000
    with store.find([(key, 512) for key, _ in items] + [(b"none", 512)]) as found:
        assert found.present == (True,) * 1000 + (False,)
        assert session_behind(store).leases_held == 1
        assert [read(found, index, 512) for index in range(1000)] == [value for _, value in items]
    assert session_behind(store).leases_held == 0


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        memoryview,
        lambda value: np.frombuffer(value, np.uint16),
        lambda value: np.array([[*value]], np.uint8),
    ],
)
def test_any_contiguous_buffer_will_do(store: OpaqueStore, make: object) -> None:
    value = content(256)
    assert store.put([(b"k", make(value))]) == [None]  # type: ignore[operator]
    target = np.zeros((2, 64), np.uint16)
    with store.find([(b"k", 256)]) as found:
        found.read(0, target)
    assert target.tobytes() == value


def test_the_first_writer_of_a_key_wins(store: OpaqueStore, service: Service) -> None:
    assert store.put([(b"k", b"first"), (b"k", b"other")]) == [None, None]
    with opened(service) as second:
        assert second.put([(b"k", b"later")]) == [None]
        assert get(second, b"k", 5) == b"first"
    assert get(store, b"k", 5) == b"first"


def test_what_was_held_already_is_told_apart_when_asked(store: OpaqueStore) -> None:
    store.put([(b"k", b"1234")])
    existed: set[int] = set()
    assert store.put([(b"l", b"1234"), (b"k", b"1234"), (b"m", b"")], existed=existed)[:2] == [None, None]
    assert existed == {1}


def test_one_key_in_two_sizes_is_two_objects(store: OpaqueStore) -> None:
    assert store.put([(b"k", b"long one"), (b"k", b"short")]) == [None, None]
    assert (get(store, b"k", 8), get(store, b"k", 5)) == (b"long one", b"short")


def test_what_is_missing_or_deleted_is_not_there(store: OpaqueStore) -> None:
    assert get(store, b"k", 4) is None
    store.put([(b"k", b"1234"), (b"l", b"5678")])
    assert store.delete([(b"k", 4), (b"m", 4)]) == 1
    assert (get(store, b"k", 4), get(store, b"l", 4)) == (None, b"5678")
    assert store.delete([]) == 0
    with store.find([]) as nothing:
        assert nothing.present == ()


def test_what_is_leased_is_read_though_it_was_deleted(store: OpaqueStore) -> None:
    store.put([(b"k", b"1234")])
    with store.find([(b"k", 4)]) as found:
        store.delete([(b"k", 4)])
        assert read(found, 0, 4) == b"1234"


def test_a_lease_that_ended_reads_nothing(store: OpaqueStore) -> None:
    store.put([(b"k", b"1234")])
    found = store.find([(b"k", 4)])
    found.close()
    found.close()
    with pytest.raises(LeaseExpiredError):
        read(found, 0, 4)


def test_a_lease_from_before_a_reconnect_reads_nothing_and_the_store_goes_on(store: OpaqueStore) -> None:
    store.put([(b"k", b"1234")])
    found = store.find([(b"k", 4)])
    session_behind(store).reconnect()
    with pytest.raises(StaleEpochError):
        read(found, 0, 4)
    found.close()
    assert get(store, b"k", 4) == b"1234"


def test_a_lease_lost_during_the_copy_fails_the_read(store: OpaqueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put([(b"k", b"1234")])
    found, view = store.find([(b"k", 4)]), Session.read_view

    def lose(session: Session, place: object) -> object:
        found.close()
        return view(session, place)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "read_view", lose)
    with pytest.raises(LeaseExpiredError):
        read(found, 0, 4)


@pytest.mark.parametrize("place", ["header", "middle", "end"])
def test_a_flipped_byte_is_never_delivered(store: OpaqueStore, place: str) -> None:
    store.put([(b"k", content(700_000)), (b"l", b"fine")])
    with store.find([(b"k", 700_000), (b"l", 4)]) as found:
        extent = found._places[0][1].extent  # type: ignore[union-attr]
        at = {"header": 60, "middle": 500_000, "end": 700_000}[place]
        session_behind(store)._transport.arena()[extent.offset + at] ^= 1
        with pytest.raises(CorruptError):
            read(found, 0, 700_000)
        assert read(found, 1, 4) == b"fine"
    with store.find([(b"k", 700_000), (b"l", 4)]) as found:
        assert found.present == (False, True)


def test_objects_are_read_from_ssd_after_a_restart(tmp_path: Path) -> None:
    settings = make_settings(
        tmp_path, host_bytes=16 * MIB, ssd_folder=str(tmp_path / "ssd"), ssd_bytes=64 * MIB, ssd_free_floor_bytes=0
    )
    keys = [(b"%d" % size, size) for size in SIZES]
    with Service(settings) as service, opened(service) as store:
        assert store.put([(key, content(size)) for key, size in keys]) == [None] * len(SIZES)
    with Service(settings) as service, opened(service) as store, store.find(keys) as found:
        assert set(found.tiers) == {Tier.SSD}
        assert [read(found, index, size) for index, size in enumerate(SIZES)] == [content(one) for one in SIZES]
    slab = tmp_path / "ssd" / SLAB_NAME
    data = bytearray(slab.read_bytes())
    at = data.rindex(content(3_000_001)[2_999_000:]) + 5
    data[at] ^= 1
    slab.write_bytes(data)
    with Service(settings) as service, opened(service) as store:
        with store.find([(b"3000001", 3_000_001)]) as found, pytest.raises(CorruptError):
            read(found, 0, 3_000_001)
        assert get(store, b"3000001", 3_000_001) is None
        assert get(store, b"4097", 4097) == content(4097)


def test_a_full_arena_refuses_by_name_and_loses_nothing(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, host_bytes=4 * MIB)
    with Service(settings) as service, opened(service) as store:
        store.put([(b"kept", content(MIB))])
        with store.find([(b"kept", MIB)]) as found:
            verdicts = store.put([(b"a", content(MIB, 1)), (b"huge", bytes(8 * MIB)), (b"b", content(MIB, 2))])
            assert isinstance(verdicts[1], CapacityError)
            assert [verdicts[0], verdicts[2]] == [None, None]
            full = store.put([(b"%d" % index, content(MIB, index)) for index in range(3, 9)])
            assert {type(one) for one in full} == {type(None), CapacityError}
            assert read(found, 0, MIB) == content(MIB)
        assert json.loads(session_behind(store).stats_json())["handles"]["reservations"] == 0


def test_stores_of_other_identities_never_meet(service: Service, store: OpaqueStore) -> None:
    store.put([(b"k", b"1234")])
    with opened(service, "r2") as other:
        assert get(other, b"k", 4) is None
        assert other.put([(b"k", b"5678")]) == [None]
        assert other.delete([(b"k", 4)]) == 1
    assert get(store, b"k", 4) == b"1234"


def test_wrong_input_is_told_by_item_and_the_rest_is_stored(store: OpaqueStore) -> None:
    strided = np.zeros(64, np.uint8)[::2]
    empty, uneven, fine = store.put([(b"a", b""), (b"b", strided), (b"c", b"1234")])
    assert isinstance(empty, InvalidInputError)
    assert isinstance(uneven, InvalidInputError)
    assert fine is None
    with store.find([(b"c", 4), (b"d", 4)]) as found:
        with pytest.raises(GeometryMismatchError, match="4 bytes"):
            read(found, 0, 5)
        with pytest.raises(InvalidInputError, match="read-only"):
            found.read(0, bytes(4))
        for index in (1, 2, -1):
            with pytest.raises(InvalidInputError):
                read(found, index, 4)


@pytest.mark.parametrize("rope", ["pinned", "geometry"])
def test_an_identity_that_is_not_of_opaque_rows_is_refused(service: Service, rope: str) -> None:
    other = attention_geometry(layers=1, heads=1, head_size=4, dtype="bfloat16", rotary_size=0)
    wrong = Identity("t", "m", "w", opaque_geometry(9) if rope == "pinned" else other, (opaque_rope(),))
    with session_of(service) as session, pytest.raises(InvalidIdentityError, match="opaque_geometry"):
        OpaqueStore(session, lambda _: wrong).find([(b"k", 8)])


def test_more_sizes_than_a_session_may_register_are_refused_by_themselves(store: OpaqueStore) -> None:
    limit = NodeLimits().identities_per_session_max
    verdicts = store.put([(b"k", bytes(size)) for size in range(1, limit + 10)])
    assert {type(one) for one in verdicts} == {type(None), LimitError}
    assert verdicts.count(None) >= limit - 2
    assert get(store, b"k", 7) == bytes(7)
    with pytest.raises(LimitError):
        store.find([(b"k", 10_000)])
    assert get(store, b"k", 8) == bytes(8)


def test_a_reader_reads_and_does_not_write(service: Service, store: OpaqueStore) -> None:
    store.put([(b"k", b"1234")])
    with session_of(service, is_writer=False) as session:
        reader = OpaqueStore(session, identity_of)
        assert get(reader, b"k", 4) == b"1234"
        assert isinstance(reader.put([(b"l", b"1234")])[0], KVServiceError)
        assert get(reader, b"l", 4) is None


def test_a_node_that_is_gone_is_an_error_and_never_bytes(tmp_path: Path) -> None:
    with Service(make_settings(tmp_path)) as service:
        session = session_of(service)
        store = OpaqueStore(session, identity_of)
        store.put([(b"k", b"1234")])
        found = store.find([(b"k", 4)])
    with pytest.raises(UnavailableError):
        store.put([(b"l", b"1234")])
    with pytest.raises(UnavailableError):
        store.find([(b"k", 4)])
    found.close()
    session.close()


def test_threads_share_a_store(store: OpaqueStore) -> None:
    start = threading.Barrier(8)

    def work(number: int) -> bool:
        start.wait(10)
        good = True
        for turn in range(20):
            size = 100 + (turn % 3)
            key = b"%d" % (turn % 7)
            good &= store.put([(key, content(size, turn % 7)), (b"%d own" % number, content(64, number))]) == [None] * 2
            good &= get(store, key, size) in (content(size, turn % 7), None)  # None: another thread is at it
            good &= get(store, b"%d own" % number, 64) == content(64, number)
        return good

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert session_behind(store).leases_held == 0


def test_kernels_are_never_asked_for_opaque_rows(service: Service) -> None:
    identity = identity_of(8)
    prompt = RoundPrompt.from_parts(identity.namespace(), [(PartKind.SHARED, [1])])
    paged = [[torch.zeros((4, 4, 1, 8), dtype=torch.uint8)]]
    with Client.connect(address_of(service), identity) as client:
        with pytest.raises(InvalidIdentityError, match="OpaqueStore"):
            client.store(prompt, paged, np.arange(1))
        with client.lookup([prompt]) as plans, pytest.raises(InvalidIdentityError, match="OpaqueStore"):
            client.restore(plans, paged, [np.arange(1)])


def test_two_contexts_of_one_opaque_segment_are_never_folded(
    service: Service, store: OpaqueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put([(b"k", content(4096))])
    with session_of(service) as session:
        strange = OpaqueStore(session, identity_of)
        keys = [strange.meta(b"k", 4096).key]
        monkeypatch.setattr(opaque, "root_context", lambda namespace: root_context(namespace, b"other"))
        assert strange.put([(b"k", content(4096, 1))]) == [None]
        keys.append(strange.meta(b"k", 4096).key)
        members = [wire.CacheKey(segment=key.segment, context=key.context) for key in keys]
        namespace = identity_of(4096).namespace()
        assert not session.commit_round(wire.CommitRoundRequest(namespace=namespace, members=members)).elections
        assert get(strange, b"k", 4096) == content(4096, 1)
    monkeypatch.undo()
    assert get(store, b"k", 4096) == content(4096)
