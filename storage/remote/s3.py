"""Object storage through obstore: S3 and what speaks like it, Google, Azure, a local folder, and memory for tests.

    s3://bucket/prefix ? endpoint= region= ca= virtual_hosted= anonymous= insecure_plaintext=
    gs://bucket/prefix ? ca=          az://container/prefix ? ca=
    file:///folder                    a folder that exists: a mount that is missing must not be filled underneath
    memory:///prefix                  this process only

Credentials are what the library finds: AWS_ACCESS_KEY_ID and its like, web identity, the machine's own role. They are
never in the URL. An object is one PUT that fails if the name is taken, so what is there was written whole.
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from kvservice.model.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    NotOwnedError,
    StaleEpochError,
    UnavailableError,
)
from kvservice.model.identity import Namespace
from kvservice.model.segment import ContextId, SegmentId
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import RemoteFeatures, RemoteName, RemoteRecord
from kvservice.storage.remote.label import LABEL_BYTES, Label, boxed
from kvservice.storage.remote.library import require_library
from kvservice.storage.remote.object_names import ObjectNames, context_of
from kvservice.storage.remote.objects import FirstBytes
from kvservice.storage.remote.pieces import Landing, cut, move_in_order, together
from kvservice.storage.remote.place_url import PLAINTEXT, PlaceUrl, parse_place_url
from kvservice.storage.remote.unreachable import UnreachableError
from kvservice.storage.remote.workers import Workers

SCHEMES = ("s3", "gs", "az", "file", "memory")
_OPTIONS = {
    "s3": ("endpoint", "region", "ca", "virtual_hosted", "anonymous", PLAINTEXT),
    "gs": ("ca",),
    "az": ("ca",),
    "file": (),
    "memory": (),
}
_PUT_BYTES_MAX = 5 << 30
"""S3's limit for one PUT; only one PUT can be conditional."""
_PART_BYTES, _PARTS_AT_ONCE = 8 << 20, 4
"""One connection to S3 gives 50 to 100 MB/s; several give their sum."""
_CHUNK_BYTES = 1 << 20
_HEADS_AT_ONCE = 64
_LISTED_MAX = 1000
_LET_GO_S, _LET_GO_TURNS = 0.05, 20
_ETAG = "etag:"


class ObjectStorage:
    """Implements objects.Objects over an obstore store."""

    def __init__(self, library: Any, store: Any, scheme: str, names: ObjectNames) -> None:
        self._library = library
        self._store = store
        self._scheme = scheme
        self._names = names
        self._is_local = scheme in ("file", "memory")
        self._turns = asyncio.Semaphore(_HEADS_AT_ONCE)
        self._workers = Workers(f"kvservice-{scheme}-box", 1)
        self._sent: list[weakref.ref[Bytes]] = []

    @property
    def name(self) -> str:
        """The URL's scheme."""
        return self._scheme

    @property
    def features(self) -> RemoteFeatures:
        """What object storage can do."""
        return RemoteFeatures(
            reads_ranges=True,
            creates_once=True,
            lists_segments=True,
            is_durable=self._scheme != "memory",
            record_bytes_max=_PUT_BYTES_MAX - LABEL_BYTES,
        )

    async def check(self) -> None:
        """Ask for one name. Raises what any call may raise."""
        with self._translated():
            await anext(aiter(self._library.list(self._store, self._names.start, chunk_size=1)), None)

    async def first_bytes(self, names: Sequence[RemoteName], most: int) -> list[FirstBytes | None]:
        """See objects.Objects. One GET of a range each; they run side by side."""
        return await together(self._first_bytes(name, most) for name in names)

    async def contexts(self, namespace: Namespace, segment: SegmentId, most: int) -> list[ContextId]:
        """See objects.Objects. Looks at the first thousand names at most."""
        found: list[tuple[datetime, str]] = []
        with self._translated():
            listing = self._library.list(self._store, self._names.segment(namespace, segment), chunk_size=_LISTED_MAX)
            async for several in listing:
                found.extend((one["last_modified"], one["path"]) for one in several)
                if len(found) >= _LISTED_MAX:
                    break
        newest_first = sorted(found, reverse=True)
        contexts = [context_of(path.rpartition("/")[2]) for _, path in newest_first]
        return [context for context in contexts if context is not None][:most]

    async def read(self, record: RemoteRecord, landing: Landing, start: int) -> None:
        """See objects.Objects. Ranges side by side, each streamed; only of the object that was found."""
        name = self._names.record(record.name)
        match = record.version.removeprefix(_ETAG) if record.version.startswith(_ETAG) else None

        async def part(begin: int, end: int) -> None:
            options = {"range": (LABEL_BYTES + begin, LABEL_BYTES + end), "if_match": match}
            with self._translated():
                answer = await self._library.get_async(self._store, name, options=options)
            async with contextlib.aclosing(self._chunks(answer)) as chunks:
                async for chunk in chunks:
                    data = memoryview(chunk)[: end - begin]
                    await landing.put(begin, data)
                    begin += len(data)
            if begin != end:
                raise CorruptError(f"{name}: it ends {end - begin} bytes early")

        step = _CHUNK_BYTES if self._is_local else _PART_BYTES
        await move_in_order(cut(start, record.record_bytes, step), _PARTS_AT_ONCE, part)

    async def _chunks(self, answer: Any) -> AsyncGenerator[Any, None]:
        """What a GET brings, as it comes. A local file is read in one go: its stream has pieces of 8 KB."""
        if self._is_local:
            with self._translated():
                whole = await answer.bytes_async()
            yield whole
            return
        chunks = aiter(answer.stream(min_chunk_size=_CHUNK_BYTES))
        while True:
            with self._translated():
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk

    async def create(self, name: RemoteName, label: Label, record: Bytes) -> bool:
        """See objects.Objects. The library keeps what it sends for a while, cancelled or not: it gets a copy."""
        box = await self._workers.run_to_end(lambda: boxed(label, record))
        self._sent = [one for one in self._sent if one() is not None] + [weakref.ref(box)]
        try:
            with self._translated():
                await self._library.put_async(self._store, self._names.record(name), box, mode="create")
        except _TakenError:
            return False
        return True

    async def delete(self, name: RemoteName) -> bool:
        """See objects.Objects."""
        path = self._names.record(name)
        try:
            with self._translated():
                await self._library.head_async(self._store, path)
                await self._library.delete_async(self._store, path)
        except StaleEpochError:
            return False
        return True

    async def delete_all(self, namespace: Namespace) -> AsyncGenerator[int]:
        """See objects.Objects. A thousand names at a time, which S3 deletes with one request."""
        with self._translated():
            listing = aiter(self._library.list(self._store, self._names.namespace(namespace), chunk_size=_LISTED_MAX))
        while True:
            with self._translated():
                several = await anext(listing, None)
            if several is None:
                return
            paths = [one["path"] for one in several if self._names.is_record(one["path"], namespace)]
            try:
                with self._translated():
                    await self._library.delete_async(self._store, paths)
            except StaleEpochError:  # somebody else deletes here too, and took one of them
                await together(self._delete_if_there(path) for path in paths)
            yield len(paths)

    async def _delete_if_there(self, path: str) -> None:
        async with self._turns:
            with contextlib.suppress(StaleEpochError), self._translated():
                await self._library.delete_async(self._store, path)

    async def close(self) -> None:
        """Give the library's threads time to let go of our objects: they abort a process that ends before they did."""
        self._workers.close()
        for _ in range(_LET_GO_TURNS):
            await asyncio.sleep(_LET_GO_S)
            if all(one() is None for one in self._sent):
                break

    async def _first_bytes(self, name: RemoteName, most: int) -> FirstBytes | None:
        async with self._turns:
            try:
                with self._translated():
                    options = {"range": (0, most)}
                    answer = await self._library.get_async(self._store, self._names.record(name), options=options)
                    meta = answer.meta
                    data = await answer.bytes_async()
            except StaleEpochError:
                return None
            except _EmptyError:
                return FirstBytes(np.empty(0, np.uint8), 0)
        version = f"{_ETAG}{meta['e_tag']}" if meta["e_tag"] else ""
        return FirstBytes(np.frombuffer(data, np.uint8).copy(), meta["size"], version)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """The library's errors as ours, once, here."""
        kinds = self._library.exceptions
        try:
            yield
        except FileNotFoundError as error:
            raise _gone(error) from error
        except kinds.AlreadyExistsError as error:
            raise _TakenError(_brief(error)) from error
        except kinds.PreconditionError as error:
            raise CorruptError(f"another object lies there by now: {_brief(error)}") from error
        except (kinds.PermissionDeniedError, kinds.UnauthenticatedError) as error:
            raise NotOwnedError(f"the storage refuses our credentials: {_brief(error)}") from error
        except kinds.BaseError as error:
            raise _by_text(error) from error


class _TakenError(CapacityError):
    """The name is taken; never leaves this file."""


class _EmptyError(CorruptError):
    """The object has no such bytes at all; leaves this file only if it shrank since it was found."""


def _gone(error: Exception) -> Exception:
    if "NoSuchBucket" in str(error):
        return UnavailableError(f"the bucket is not there any more: {_brief(error)}")
    return StaleEpochError(f"the object is gone; look up again: {_brief(error)}")


def _by_text(error: Exception) -> Exception:
    """What the library has no kind for; its texts hold the server's own code."""
    text = str(error)
    if any(sign in text for sign in ("InvalidRange", "416 ", "range was invalid", "Invalid range")):
        return _EmptyError(f"the object is shorter than it was: {_brief(error)}")
    if any(sign in text for sign in ("StorageFull", "os error 28", "os error 122", "QuotaExceeded", "507 ")):
        return CapacityError(f"the storage is full: {_brief(error)}")
    if any(sign in text for sign in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "401 ", "403 ")):
        return NotOwnedError(f"the storage refuses our credentials: {_brief(error)}")
    return UnavailableError(f"the storage does not answer as it should: {_brief(error)}")


def _brief(error: Exception) -> str:
    """The first lines: behind them the library prints its own structures."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split())[:400]


async def open_object_storage(url: PlaceUrl, deadline_s: float) -> ObjectStorage:
    """Open and ask once. Raises ConfigError for what a person has to mend."""
    url.check_options(_OPTIONS[url.scheme])
    library = require_library("obstore", "s3")
    require_library("obstore.store", "s3")
    if url.user or url.password:
        raise ConfigError(f"{url}: credentials are not taken from the URL; set AWS_ACCESS_KEY_ID and the like")
    try:
        store = _make_store(library, url, deadline_s)
    except (library.exceptions.BaseError, ValueError, TypeError) as error:
        raise ConfigError(f"{url}: {_brief(error)}") from error
    names = ObjectNames("" if url.scheme == "file" else url.path.strip("/"))
    storage = ObjectStorage(library, store, url.scheme, names)
    try:
        async with asyncio.timeout(deadline_s):
            await storage.check()
    except (TimeoutError, StaleEpochError, CorruptError, CapacityError, NotOwnedError, UnavailableError) as error:
        await storage.close()
        raise _refusal(url, error, deadline_s) from error
    return storage


def _make_store(library: Any, url: PlaceUrl, deadline_s: float) -> Any:
    if url.scheme == "memory":
        return library.store.MemoryStore()
    if url.scheme == "file":
        if url.host or not Path(url.path).is_dir():
            raise ConfigError(f"{url}: name a folder that exists, as file:///srv/kv; it is not made for you")
        return library.store.LocalStore(url.path)
    if not url.host:
        raise ConfigError(f"{url}: no bucket in the URL; write {url.scheme}://bucket/prefix")
    client: dict[str, object] = {
        "connect_timeout": f"{deadline_s * 1000:.0f}ms",
        "timeout": "1h",
    }  # the tier's deadlines are ours
    if url.text_option("ca"):
        client["root_certificate"] = _certificate(url)
    retry = {
        "max_retries": 1,
        "backoff": {"init_backoff": timedelta(seconds=0.05)},
        "retry_timeout": timedelta(seconds=deadline_s),
    }
    config = _s3_config(url, client) if url.scheme == "s3" else {}
    return library.store.from_url(
        f"{url.scheme}://{url.host}", client_options=client, retry_config=retry, config=config or None
    )


def _s3_config(url: PlaceUrl, client: dict[str, object]) -> dict[str, object]:
    endpoint = url.text_option("endpoint")
    config: dict[str, object] = {}
    is_plain = endpoint.startswith("http://")
    if endpoint:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"{url}: endpoint={endpoint!r} must start with https:// or http://")
        url.require_private(parse_place_url(endpoint).host, not is_plain, "use an https endpoint")
        config["endpoint"] = endpoint
        client["allow_http"] = is_plain
    config["unsigned_payload"] = not is_plain  # under TLS a second digest of the payload proves nothing new
    if endpoint or url.text_option("region"):
        config["region"] = url.text_option("region", "us-east-1")
    if url.flag("virtual_hosted"):
        config["virtual_hosted_style_request"] = True
    if url.flag("anonymous"):
        config["skip_signature"] = True
    return config


def _certificate(url: PlaceUrl) -> bytes:
    path = Path(url.text_option("ca"))
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{url}: the CA certificate {path} cannot be read: {error}") from error


def _refusal(url: PlaceUrl, error: Exception, deadline_s: float) -> ConfigError:
    text = str(error)
    if "NoSuchBucket" in text or "ContainerNotFound" in text or "bucket does not exist" in text:
        return ConfigError(f"{url}: the bucket {url.host!r} does not exist; make it, it is not made for you")
    if any(sign in text for sign in ("169.254.169.254", "/latest/api/token", "/computeMetadata/")):
        return ConfigError(
            f"{url}: credentials are missing: none in the environment, and this machine has no role; "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or anonymous=yes"
        )
    if isinstance(error, NotOwnedError):
        return ConfigError(f"{url}: credentials are refused, or may not list the bucket: {text}")
    if isinstance(error, TimeoutError):
        text = f"no answer within {deadline_s:.1f} s; is the address right, and are there credentials?"
    return UnreachableError(f"{url}: {text}")
