"""Mooncake Store: the pooled memory of a cluster, over TCP or RDMA.

    mooncake://master[:port][/prefix] ? protocol=tcp|rdma devices= local= metadata= replicas= insecure_plaintext=

    name              -> label record              records of up to 128 KiB less the label
                       | label head                larger ones; written last, it makes the pieces be found
    name/checksum/i   -> piece i of the record     2 MiB each; checksum is the header's, so that two writers never mix

Its answers are never trusted: an empty or negative one is a miss, what comes is verified by who asked, and a record of
which a piece was evicted is forgotten. There are no credentials and no TLS. Its calls block, cannot be cancelled and
take 30 s and more when a server hangs: they run in threads of their own, into memory of their own (slots.py).
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from kvservice.model.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    KVServiceError,
    NotListedError,
    RecordFormatError,
    StaleEpochError,
    UnavailableError,
)
from kvservice.model.identity import Namespace
from kvservice.model.segment import ContextId, SegmentId
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import RecordHead, read_head
from kvservice.storage.remote.contract import RemoteFeatures, RemoteName, RemoteRecord
from kvservice.storage.remote.label import LABEL_BYTES, Label, boxed, read_label
from kvservice.storage.remote.library import require_library
from kvservice.storage.remote.object_names import ObjectNames
from kvservice.storage.remote.objects import FirstBytes
from kvservice.storage.remote.pieces import Landing, cut, move_in_order
from kvservice.storage.remote.place_url import PLAINTEXT, PlaceUrl, is_loopback
from kvservice.storage.remote.slots import Slot, Slots
from kvservice.storage.remote.unreachable import UnreachableError
from kvservice.storage.remote.workers import Workers

T = TypeVar("T")
SCHEMES = ("mooncake",)
_OPTIONS = ("protocol", "devices", "local", "metadata", "replicas", PLAINTEXT)
_PORT = 50051
_METADATA = "P2PHANDSHAKE"
_THREADS, _SLOTS, _PIECES_AT_ONCE = 4, 8, 3
_PIECE_BYTES = 2 << 20
"""Part of the format. From 1 to 8 MiB the library is about as fast; the first layers come sooner in small ones."""
_HEAD_BYTES_MAX = 128 << 10
"""Label and head, and the whole of a small record."""
_HEADS_AT_ONCE = _PIECE_BYTES // _HEAD_BYTES_MAX
_RECORD_BYTES_MAX = 4 << 30
_NO_SPACE, _ABSENT = -200, -704
_LIBRARY_BUFFER_BYTES = 0
_SET_UP_S = 15.0
"""It is done in 50 ms, or the library tries other ports for a while; a master that hangs costs it 90 s."""


class MooncakeObjects:
    """Implements objects.Objects over one client of a cluster. ``store`` is set up."""

    def __init__(self, store: Any, replicas: Any, names: ObjectNames, workers: Workers, slots: Slots) -> None:
        self._store = store
        self._replicas = replicas
        self._names = names
        self._workers = workers
        self._slots = slots
        self._running = 0

    @property
    def name(self) -> str:
        """Its name."""
        return "mooncake"

    @property
    def features(self) -> RemoteFeatures:
        """What Mooncake can do: it forgets everything when its master restarts, and lists nothing."""
        return RemoteFeatures(
            reads_ranges=True,
            creates_once=True,
            lists_segments=False,
            is_durable=False,
            record_bytes_max=_RECORD_BYTES_MAX,
        )

    async def check(self) -> None:
        """Ask for a name. Raises what any call may raise."""
        _require_answer(await self._call(functools.partial(self._store.is_exist, self._names.start)))

    async def first_bytes(self, names: Sequence[RemoteName], most: int) -> list[FirstBytes | None]:
        """See objects.Objects. Two round trips for every 16 names: heads, then whether all pieces are there."""
        found: list[FirstBytes | None] = []
        for at in range(0, len(names), _HEADS_AT_ONCE):
            found.extend(await self._first_bytes([self._names.record(one) for one in names[at : at + _HEADS_AT_ONCE]]))
        return found

    async def contexts(self, namespace: Namespace, segment: SegmentId, most: int) -> list[ContextId]:
        """Nothing: it cannot list."""
        return []

    async def read(self, record: RemoteRecord, landing: Landing, start: int) -> None:
        """See objects.Objects."""
        name = self._names.record(record.name)
        if _is_small(record.record_bytes):
            await self._read_small(name, record, landing, start)
            return
        keys = _piece_keys(name, record.head)

        async def piece(begin: int, end: int) -> None:
            at = begin // _PIECE_BYTES
            length = min(_PIECE_BYTES, record.record_bytes - at * _PIECE_BYTES)
            async with self._slots.take() as slot:
                get = functools.partial(self._store.get_into, keys[at], slot.address, length)
                if _require_answer(await self._call(get, slot)) != length:
                    await self._forget_head(name)
                    raise StaleEpochError(f"{name}: piece {at} is gone; look up again")
                offset = begin - at * _PIECE_BYTES
                await landing.put(begin, slot.view[offset : offset + end - begin])

        await move_in_order(cut(start, record.record_bytes, _PIECE_BYTES), _PIECES_AT_ONCE, piece)

    async def create(self, name: RemoteName, label: Label, record: Bytes) -> bool:
        """See objects.Objects. The head is read back: of two that create one name the library tells neither."""
        key = self._names.record(name)
        if _require_answer(await self._call(functools.partial(self._store.is_exist, key))) > 0:
            return False
        head, pieces = read_head(record), []
        if not _is_small(len(record)):
            pieces = _piece_keys(key, head)
            await self._put_pieces(pieces, record)
            record = record[: label.head_bytes]
        await self._put_head(key, label, record)
        winner = await self._head_at(key)
        if winner is not None and winner[0].version == label.version:
            return True
        if winner is not None and winner[1].header_checksum != head.header_checksum and pieces:
            await self._call(functools.partial(self._store.batch_remove, pieces, True))
        return False

    async def delete(self, name: RemoteName) -> bool:
        """See objects.Objects. Forced: a lease of the library's must not keep what is to be forgotten."""
        key = self._names.record(name)
        head = await self._head_at(key)
        was_there = await self._forget_head(key)
        if head is not None and not _is_small(head[0].record_bytes):
            await self._call(functools.partial(self._store.batch_remove, _piece_keys(key, head[1]), True))
        return was_there

    def delete_all(self, namespace: Namespace) -> AsyncGenerator[int]:
        """See objects.Objects. It cannot."""
        raise NotListedError(
            f"the pool cannot list what it holds, so it keeps what else it has of namespace {namespace.hex()[:12]}, "
            "until it needs the room; delete caches by their keys"
        )

    async def close(self) -> None:
        """Close the client, unless one of its calls hangs: closing under it is not safe, so that one stays."""
        try:
            if not self._running:
                await self._call(self._end)
        finally:
            self._workers.close()

    def _end(self) -> None:
        self._store.unregister_buffer(self._slots.memory.ctypes.data)
        self._store.close()

    async def _call(self, call: Callable[[], T], *slots: Slot) -> T:
        """Make a blocking call in a thread. Given up, it keeps its slots until the thread comes back."""
        for slot in slots:
            slot.hold()

        def ended() -> None:
            self._running -= 1
            for slot in slots:
                slot.leave()

        try:
            future = self._workers.submit(call, ended)
        except UnavailableError:
            for slot in slots:
                slot.leave()
            raise
        self._running += 1
        return await future

    async def _first_bytes(self, keys: list[str]) -> list[FirstBytes | None]:
        found: list[FirstBytes | None] = []
        async with self._slots.take() as slot:
            places = [slot.address + at * _HEAD_BYTES_MAX for at in range(len(keys))]
            sizes = [_HEAD_BYTES_MAX] * len(keys)
            answers = await self._call(functools.partial(self._store.batch_get_into, keys, places, sizes), slot)
            for at, answer in enumerate(answers):
                length = _require_answer(answer)
                start = at * _HEAD_BYTES_MAX
                found.append(_first(slot.view[start : start + length]) if length > 0 else None)
        await self._drop_incomplete(keys, found)
        return found

    async def _drop_incomplete(self, keys: list[str], found: list[FirstBytes | None]) -> None:
        """A record of which a piece was evicted is not held, and its head must not keep it from being stored anew."""
        pieces: dict[int, list[str]] = {}
        for at, first in enumerate(found):
            parsed = None if first is None else _parsed(first.data)
            if parsed is not None and not _is_small(parsed[0].record_bytes):
                pieces[at] = _piece_keys(keys[at], parsed[1])
        asked = [piece for several in pieces.values() for piece in several]
        if not asked:
            return
        answers = await self._call(functools.partial(self._store.batch_is_exist, asked))
        held = {piece for piece, answer in zip(asked, answers, strict=True) if _require_answer(answer) > 0}
        for at, several in pieces.items():
            if not held.issuperset(several):
                found[at] = None
                await self._forget_head(keys[at])

    async def _read_small(self, name: str, record: RemoteRecord, landing: Landing, start: int) -> None:
        async with self._slots.take() as slot:
            get = functools.partial(self._store.get_into, name, slot.address, _HEAD_BYTES_MAX)
            length = _require_answer(await self._call(get, slot))
            if length <= 0:
                raise StaleEpochError(f"{name} is gone; look up again")
            if read_label(slot.view[:LABEL_BYTES].tobytes()).version != record.version:
                raise CorruptError(f"{name}: another object lies there by now")
            if length != LABEL_BYTES + record.record_bytes:
                raise CorruptError(f"{name}: {length} bytes, {LABEL_BYTES + record.record_bytes} were found")
            await landing.put(start, slot.view[LABEL_BYTES + start : length])

    async def _put_pieces(self, keys: list[str], record: Bytes) -> None:
        async def put(begin: int, end: int) -> None:
            async with self._slots.take() as slot:
                await self._workers.run_to_end(lambda: np.copyto(slot.view[: end - begin], record[begin:end]))
                await self._put(keys[begin // _PIECE_BYTES], slot, end - begin)

        try:
            await move_in_order(cut(0, len(record), _PIECE_BYTES), _PIECES_AT_ONCE, put)
            await self._require_pieces(keys)
        except CapacityError:
            await self._call(functools.partial(self._store.batch_remove, keys, True))
            raise

    async def _require_pieces(self, keys: list[str]) -> None:
        held = await self._call(functools.partial(self._store.batch_is_exist, keys))
        if min(map(_require_answer, held)) <= 0:
            raise CapacityError("the pool is full: it gave away some pieces of a record for the others")

    async def _put_head(self, key: str, label: Label, record: Bytes) -> None:
        async with self._slots.take() as slot:
            box = boxed(label, record)
            np.copyto(slot.view[: len(box)], box)
            await self._put(key, slot, len(box))

    async def _put(self, key: str, slot: Slot, length: int) -> None:
        put = functools.partial(self._store.put_from, key, slot.address, length, self._replicas)
        answer = await self._call(put, slot)
        if answer == _NO_SPACE:
            raise CapacityError("the pool is full, and what it holds is in use")
        if answer < 0:
            raise UnavailableError(f"the pool did not take {key}: error {answer}")

    async def _head_at(self, key: str) -> tuple[Label, RecordHead] | None:
        async with self._slots.take() as slot:
            get = functools.partial(self._store.get_into, key, slot.address, _HEAD_BYTES_MAX)
            length = _require_answer(await self._call(get, slot))
            return _parsed(slot.view[:length].copy()) if length > 0 else None

    async def _forget_head(self, key: str) -> bool:
        answer = await self._call(functools.partial(self._store.remove, key, True))
        if answer not in (0, _ABSENT):
            raise UnavailableError(f"the pool did not forget {key}: error {answer}")
        return bool(answer == 0)


def _is_small(record_bytes: int) -> bool:
    return LABEL_BYTES + record_bytes <= _HEAD_BYTES_MAX


def _piece_keys(name: str, head: RecordHead) -> list[str]:
    pieces = -(-head.layout.record_bytes // _PIECE_BYTES)
    return [f"{name}/{head.header_checksum:016x}/{at}" for at in range(pieces)]


def _parsed(data: Bytes) -> tuple[Label, RecordHead] | None:
    """Label and head, None for what is none: who reads it says so."""
    try:
        return read_label(data[:LABEL_BYTES].tobytes()), read_head(data[LABEL_BYTES:])
    except (CorruptError, RecordFormatError):
        return None


def _first(view: Bytes) -> FirstBytes:
    data = view.copy()
    parsed = _parsed(data)
    is_whole = parsed is None or _is_small(parsed[0].record_bytes)
    return FirstBytes(data, len(data) if is_whole else -1)


def _require_answer(answer: int) -> int:
    """A number that is not negative, or -1 for a miss of any kind. Raises UnavailableError where nobody answered."""
    if answer <= -800:  # transfer and RPC errors: a store or the master is gone or hangs
        raise UnavailableError(f"the pool does not answer: error {answer}")
    return max(answer, -1)


async def open_mooncake(url: PlaceUrl, deadline_s: float) -> MooncakeObjects:
    """Open and ask once. Raises ConfigError for what a person has to mend."""
    url.check_options(_OPTIONS)
    library = require_library("mooncake.store", "mooncake")
    if not url.host:
        raise ConfigError(f"{url}: no master in the URL; write mooncake://master:{_PORT}/prefix")
    if url.user or url.password:
        raise ConfigError(f"{url}: a Mooncake master knows no credentials; keep its network to yourself")
    url.require_private(url.host, False, "there is no TLS in Mooncake")
    names = ObjectNames(url.path.strip("/") or "kvservice")
    arguments = _setup_arguments(url, await _own_address(url, deadline_s))
    replicas = library.ReplicateConfig()
    replicas.replica_num = url.number("replicas", 1, 1, 16)
    workers, slots = Workers("kvservice-mooncake", _THREADS), Slots(_SLOTS, _PIECE_BYTES)
    with _closed_unless_opened(workers):
        store = await _set_up(url, library, arguments, workers, slots)
        objects = MooncakeObjects(store, replicas, names, workers, slots)
        try:
            async with asyncio.timeout(deadline_s):
                await objects.check()
        except (TimeoutError, KVServiceError) as error:
            raise UnreachableError(f"{url}: the master does not answer as it should: {error}") from error
    return objects


@contextlib.contextmanager
def _closed_unless_opened(workers: Workers) -> Iterator[None]:
    try:
        yield
    except BaseException:
        workers.close()
        raise


async def _own_address(url: PlaceUrl, deadline_s: float) -> str:
    """What stores reach us by. Also finds out whether the master is there: the library would try for 90 s."""
    try:
        async with asyncio.timeout(deadline_s):
            _, writer = await asyncio.open_connection(url.host, url.port or _PORT)
    except (TimeoutError, OSError) as error:
        raise UnreachableError(f"{url}: no master answers there: {error!r}; is it running?") from error
    address: str = writer.get_extra_info("sockname")[0]
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    said = url.text_option("local", address)
    if is_loopback(said) and not is_loopback(url.host):
        raise ConfigError(f"{url}: local={said!r}: stores on other hosts do not reach this one by that name")
    return said


def _setup_arguments(url: PlaceUrl, local: str) -> tuple[object, ...]:
    protocol = url.text_option("protocol", "tcp")
    if protocol not in ("tcp", "rdma"):
        raise ConfigError(f"{url}: protocol={protocol!r} is neither tcp nor rdma")
    master = f"{url.host}:{url.port or _PORT}"
    metadata, devices = url.text_option("metadata", _METADATA), url.text_option("devices")
    return local, metadata, 0, _LIBRARY_BUFFER_BYTES, protocol, devices, master


async def _set_up(url: PlaceUrl, library: Any, arguments: tuple[object, ...], workers: Workers, slots: Slots) -> Any:
    def set_up() -> tuple[Any, int]:
        store = library.MooncakeDistributedStore()
        answer = store.setup(*arguments)
        return store, answer or store.register_buffer(slots.memory.ctypes.data, slots.memory.nbytes)

    try:
        async with asyncio.timeout(_SET_UP_S):
            store, answer = await workers.submit(set_up)
    except TimeoutError as error:
        raise UnreachableError(f"{url}: the master took us not in within {_SET_UP_S:.0f} s") from error
    if answer:
        raise ConfigError(f"{url}: the library could not be set up, error {answer}; its log on stderr says why")
    return store
