"""Redis or Valkey for small objects: a key for each record, and for each segment a list of its contexts by age.

    redis://[user[:password]@]host[:port][/database] ? prefix= object_bytes_max= password_file= insecure_plaintext=
    rediss://...                                       ca= cert= key= as well

The list is made anew by every store, so that losing it costs finds by segment only, until then. A server that holds
large values answers nobody else meanwhile, hence the limit. Set maxmemory-policy to allkeys-lfu or allkeys-lru: with
noeviction a full server keeps the oldest for good.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvservice.model.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    KVServiceError,
    NotOwnedError,
    StaleEpochError,
    UnavailableError,
)
from kvservice.model.identity import Namespace
from kvservice.model.segment import ContextId, SegmentId
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import RemoteFeatures, RemoteName, RemoteRecord
from kvservice.storage.remote.label import LABEL_BYTES, Label, boxed, read_label
from kvservice.storage.remote.library import require_library
from kvservice.storage.remote.object_names import ObjectNames, context_of
from kvservice.storage.remote.objects import FirstBytes
from kvservice.storage.remote.pieces import Landing, cut, move_in_order
from kvservice.storage.remote.place_url import PLAINTEXT, PlaceUrl
from kvservice.storage.remote.unreachable import UnreachableError
from kvservice.storage.remote.workers import Workers

SCHEMES = ("redis", "rediss")
_OPTIONS = ("prefix", "object_bytes_max", "password_file", PLAINTEXT)
_TLS_OPTIONS = ("ca", "cert", "key")
_PORT = 6379
_OBJECT_BYTES_MAX = 8 << 20
_VALUE_BYTES_MAX = 64 << 20
"""Sending a value keeps the loop busy for a copy of it or two, and the server too."""
_PIECE_BYTES, _PIECES_AT_ONCE = 1 << 20, 2
_CONNECTIONS_MAX = 32
"""Twice what all fetches at once take, so that finds do not wait for them."""
_CONTEXTS_MAX = 256
"""The oldest leave a segment's list behind so many; they are still found by name."""
_SCANNED = 1000
_KEYS_A_TURN = 64
"""Heads are 8 KB: a turn of the server is half a MB."""


class RedisObjects:
    """Implements objects.Objects over one server."""

    def __init__(self, library: Any, client: Any, names: ObjectNames, object_bytes_max: int) -> None:
        self._errors = library.exceptions
        self._client = client
        self._names = names
        self._object_bytes_max = object_bytes_max
        self._workers = Workers("kvservice-redis-box", 1)

    @property
    def name(self) -> str:
        """Redis, whichever server speaks it."""
        return "redis"

    @property
    def features(self) -> RemoteFeatures:
        """What Redis can do. Whether it writes to disk is its own business, so nothing is promised."""
        return RemoteFeatures(
            reads_ranges=True,
            creates_once=True,
            lists_segments=True,
            is_durable=False,
            record_bytes_max=self._object_bytes_max - LABEL_BYTES,
        )

    async def check(self) -> None:
        """Ask for a key of ours. Raises what any call may raise."""
        with self._translated():
            await self._client.getrange(f"{self._names.start}:", 0, 0)

    async def first_bytes(self, names: Sequence[RemoteName], most: int) -> list[FirstBytes | None]:
        """See objects.Objects. One round trip for every 64 names."""
        found: list[FirstBytes | None] = []
        for at in range(0, len(names), _KEYS_A_TURN):
            turn = [self._names.record(name) for name in names[at : at + _KEYS_A_TURN]]
            async with self._pipeline() as pipeline:
                for key in turn:
                    pipeline.strlen(key)
                    pipeline.getrange(key, 0, most - 1)
                answers = await pipeline.execute(raise_on_error=False)
            pairs = zip(answers[::2], answers[1::2], strict=True)
            found.extend(self._first(length, data) for length, data in pairs)
        return found

    async def contexts(self, namespace: Namespace, segment: SegmentId, most: int) -> list[ContextId]:
        """See objects.Objects."""
        with self._translated():
            listed = await self._client.zrevrange(self._names.segment(namespace, segment), 0, most - 1)
        contexts = [context_of(member.decode("ascii", "replace")) for member in listed]
        return [context for context in contexts if context is not None]

    async def read(self, record: RemoteRecord, landing: Landing, start: int) -> None:
        """See objects.Objects. The label is read with every piece: two objects never become one."""
        key = self._names.record(record.name)

        async def piece(begin: int, end: int) -> None:
            async with self._pipeline() as pipeline:
                pipeline.getrange(key, 0, LABEL_BYTES - 1)
                pipeline.getrange(key, LABEL_BYTES + begin, LABEL_BYTES + end - 1)
                label, data = await pipeline.execute()
            if not label:
                raise StaleEpochError(f"{key} is gone; look up again")
            if read_label(label).version != record.version:
                raise CorruptError(f"{key}: another object lies there by now")
            if len(data) != end - begin:
                raise CorruptError(f"{key}: it ends before byte {end}")
            await landing.put(begin, data)

        await move_in_order(cut(start, record.record_bytes, _PIECE_BYTES), _PIECES_AT_ONCE, piece)

    async def create(self, name: RemoteName, label: Label, record: Bytes) -> bool:
        """See objects.Objects. The library may hold on to what it sends after it was cancelled: it gets a copy."""
        box = await self._workers.run_to_end(lambda: boxed(label, record))
        listing = self._names.segment(name.namespace, name.segment)
        async with self._pipeline() as pipeline:
            pipeline.set(self._names.record(name), box.data, nx=True)
            pipeline.zadd(listing, {name.context.hex(): time.time()})
            pipeline.zremrangebyrank(listing, 0, -_CONTEXTS_MAX - 1)
            was_set, *_ = await pipeline.execute()
        return bool(was_set)

    async def delete(self, name: RemoteName) -> bool:
        """See objects.Objects."""
        async with self._pipeline() as pipeline:
            pipeline.delete(self._names.record(name))
            pipeline.zrem(self._names.segment(name.namespace, name.segment), name.context.hex())
            deleted, _ = await pipeline.execute()
        return bool(deleted)

    async def delete_all(self, namespace: Namespace) -> AsyncGenerator[int]:
        """See objects.Objects. Walks all keys of the server, a thousand at a time, and the segments' lists go too."""
        cursor, match = 0, f"{self._names.namespace(namespace)}:*"
        while True:
            with self._translated():
                cursor, found = await self._client.scan(cursor, match=match, count=_SCANNED)
            keys = [key.decode("ascii", "replace") for key in found]
            records = [key for key in keys if self._names.is_record(key, namespace)]
            lists = [key for key in keys if context_of(key.rpartition(":")[2]) and key.count(":") == match.count(":")]
            deleted = 0
            for at in range(0, len(records), _KEYS_A_TURN):
                with self._translated():
                    deleted += await self._client.delete(*records[at : at + _KEYS_A_TURN])
            if lists:
                with self._translated():
                    await self._client.delete(*lists)
            yield deleted
            if not cursor:
                return

    async def close(self) -> None:
        """Close all connections."""
        self._workers.close()
        with self._translated():
            await self._client.aclose()

    def _first(self, length: object, data: object) -> FirstBytes | None:
        if isinstance(length, self._errors.ResponseError) and str(length).startswith("WRONGTYPE"):
            return FirstBytes(np.empty(0, np.uint8), 0)  # the key is something else: a lie, as an empty object is
        with self._translated():
            for answer in (length, data):
                if isinstance(answer, Exception):
                    raise answer
        assert isinstance(length, int), length
        assert isinstance(data, bytes), type(data)
        return FirstBytes(np.frombuffer(data, np.uint8).copy(), length) if length or data else None

    @contextlib.asynccontextmanager
    async def _pipeline(self) -> AsyncIterator[Any]:
        """Commands that are sent together; others' may come in between, which none of ours minds."""
        with self._translated():
            async with self._client.pipeline(transaction=False) as pipeline:
                yield pipeline

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """The library's errors as ours, once, here."""
        kinds = self._errors
        try:
            yield
        except (kinds.AuthenticationError, kinds.NoPermissionError) as error:
            raise NotOwnedError(f"the server refuses our credentials: {error}") from error
        except kinds.RedisError as error:
            raise _by_text(error) from error
        except OSError as error:
            raise UnavailableError(f"the server cannot be reached: {error}") from error


def _by_text(error: Exception) -> KVServiceError:
    text = str(error)
    if "OOM" in text or "maxmemory" in text:
        return CapacityError(f"the server is full: {text}")
    if any(sign in text for sign in ("NOAUTH", "WRONGPASS", "NOPERM", "invalid username-password")):
        return NotOwnedError(f"the server refuses our credentials: {text}")
    if "WRONGTYPE" in text:
        return CorruptError(f"the key is something else: {text}")
    return UnavailableError(f"the server does not answer as it should: {text}")


async def open_redis(url: PlaceUrl, deadline_s: float) -> RedisObjects:
    """Open and ask once. Raises ConfigError for what a person has to mend."""
    is_encrypted = url.scheme == "rediss"
    url.check_options((*_OPTIONS, *_TLS_OPTIONS) if is_encrypted else _OPTIONS)
    library = require_library("redis.asyncio", "redis")
    errors = require_library("redis", "redis")
    if not url.host:
        raise ConfigError(f"{url}: no server in the URL; write {url.scheme}://host:6379/0")
    url.require_private(url.host, is_encrypted, "use rediss://")
    object_bytes_max = url.number("object_bytes_max", _OBJECT_BYTES_MAX, 1 << 16, _VALUE_BYTES_MAX)
    objects = RedisObjects(
        errors,
        _make_client(library, url, deadline_s),
        ObjectNames(url.text_option("prefix", "kvservice"), ":"),
        object_bytes_max,
    )
    try:
        async with asyncio.timeout(deadline_s):
            await objects.check()
    except (TimeoutError, KVServiceError) as error:
        await objects.close()
        raise _refusal(url, error, deadline_s) from error
    return objects


def _make_client(library: Any, url: PlaceUrl, deadline_s: float) -> Any:
    backoff, retry = require_library("redis.backoff", "redis"), require_library("redis.asyncio.retry", "redis")
    arguments: dict[str, object] = {
        "host": url.host,
        "port": url.port or _PORT,
        "db": _database(url),
        "username": url.user or None,
        "password": _password(url) or None,
        "max_connections": _CONNECTIONS_MAX,
        "timeout": deadline_s,  # for a free connection
        "socket_connect_timeout": deadline_s,
        "socket_timeout": None,  # the tier's deadline is ours, and it counts from the call's start
        "retry": retry.Retry(backoff.NoBackoff(), 1),  # a connection of the pool may be from before a restart
    }
    if url.scheme == "rediss":
        arguments["connection_class"] = library.SSLConnection
        files = {"ssl_ca_certs": "ca", "ssl_certfile": "cert", "ssl_keyfile": "key"}
        arguments |= {name: url.text_option(option) for name, option in files.items() if url.text_option(option)}
        _require_files(url)
    return library.Redis.from_pool(library.BlockingConnectionPool(**arguments))


def _database(url: PlaceUrl) -> int:
    said = url.path.strip("/") or "0"
    if not (said.isascii() and said.isdigit()):
        raise ConfigError(f"{url}: the database {said!r} is no number; a prefix is given as ?prefix=")
    return int(said)


def _password(url: PlaceUrl) -> str:
    path = url.text_option("password_file")
    if not path:
        return url.password
    if url.password:
        raise ConfigError(f"{url}: a password and a password_file; give one")
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{url}: the password file {path} cannot be read: {error}") from error


def _require_files(url: PlaceUrl) -> None:
    for option in _TLS_OPTIONS:
        path = url.text_option(option)
        if path and not Path(path).is_file():
            raise ConfigError(f"{url}: {option}={path!r} is no file")


def _refusal(url: PlaceUrl, error: Exception, deadline_s: float) -> ConfigError:
    if isinstance(error, NotOwnedError):
        text = str(error)
        is_missing = "NOAUTH" in text or "without any password" in text or not (url.user or url.password)
        return ConfigError(f"{url}: credentials are {'missing or ' if is_missing else ''}refused: {text}")
    if isinstance(error, TimeoutError):
        return UnreachableError(f"{url}: no answer within {deadline_s:.1f} s; is it running, and is this its port?")
    if isinstance(error, UnavailableError):
        return UnreachableError(f"{url}: {error}")
    return ConfigError(f"{url}: {error}")
