"""The remote connector of LMCache's in-process form: chunks of one engine process, kept by a service.

Thin, as the L2 adapter is: LMCache's event loop waits for answers of ``exchange.py`` and is never blocked. LMCache
makes one for each process of an engine, from ``remote_storage_plugins`` or from a URL:

    plugin://kvservice                       options in extra_config: remote_storage_plugin.kvservice.address, ...
    kvservice:///run/user/1000/kvservice.sock?model_path=/models/llama&kv_format=...
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvservice.client.connectors.lmcache.exchange import Exchange
from kvservice.client.connectors.lmcache.identity import ObjectKind, Owner, object_key
from kvservice.client.connectors.lmcache.options import SCHEME, LMCacheOptions, options_of_url, without_query
from kvservice.client.connectors.lmcache.vault import Named, Stored, Vault
from kvservice.model.errors import ConfigError

FOUND_LOCK_S = 10.0
"""What LMCache was told to be there stays for so long: it comes for it after the next steps of the engine."""
PLUGIN_SCHEME = f"plugin://{SCHEME}"

log = logging.getLogger("kvservice.lmcache")
T = TypeVar("T")
Present = list[bool]
Chunks = list[Any]
Done = Callable[[T], None]


class KVServiceConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes connectors for URLs of both schemes. See ``ConnectorAdapter`` of LMCache 0.5.6."""

    def __init__(self) -> None:
        super().__init__(f"{SCHEME}://")

    def can_parse(self, url: str) -> bool:
        """True for ``kvservice://...``, ``plugin://kvservice`` and ``plugin://kvservice.<instance>``."""
        return url == PLUGIN_SCHEME or url.startswith((f"{SCHEME}://", f"{PLUGIN_SCHEME}."))

    def create_connector(self, context: ConnectorContext) -> "KVServiceRemoteConnector":
        """Ends the engine's start for options that are wrong or missing."""
        try:
            return KVServiceRemoteConnector(context)
        except ConfigError as error:
            _refuse(context, error)


class KVServiceRemoteConnector(RemoteConnector):  # type: ignore[misc]
    """See ``RemoteConnector`` of LMCache 0.5.6."""

    def __init__(self, context: ConnectorContext) -> None:
        options, where = read_context(context)
        check_config(context.config, options, where)
        super().__init__(context.config, context.metadata)
        self._loop = context.loop
        self._memory = context.local_cpu_backend
        self._timeout_s = options.lookup_deadline_s
        self._layout = tuple(
            (str(dtype).removeprefix("torch."), tuple(map(int, shape)))
            for dtype, shape in zip(self.meta_dtypes, self.meta_shapes, strict=True)
        )
        self._is_told = False
        owner = Owner.of(options, where)
        self._exchange = Exchange(Vault.connect(options, owner, f"lmcache, pid {os.getpid()}"), options)

    # ------------------------------------------------------------------ what is there

    async def exists(self, key: Any) -> bool:
        """True if the chunk is there, and stays for some seconds."""
        return (await self._find([key]))[0]

    def exists_sync(self, key: Any) -> bool:
        """As ``exists``, for a thread that may wait: until the lookup's deadline."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """Yes: one call for all keys."""
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """How many chunks are there from the first on, for a thread that may wait."""
        answered, found = threading.Event(), [False] * len(keys)

        def done(present: Present) -> None:
            found[:] = present
            answered.set()

        self._exchange.lookup(list(keys), lambda: self._named(keys), done, lock_s=FOUND_LOCK_S)
        answered.wait(2 * self._timeout_s)
        return _prefix(found)

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        """How many chunks are there from the first on, pinned or not: they stay for some seconds."""
        return _prefix(await self._find(keys))

    # ------------------------------------------------------------------ bytes

    async def get(self, key: Any) -> Any:
        """The chunk in memory of LMCache's, or None."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Yes: one lookup for all keys."""
        return True

    async def batched_get(self, keys: Sequence[Any]) -> Chunks:
        """Chunks in memory of LMCache's, None for those that are not there or could not be read."""
        names: Chunks = [object() for _ in keys]  # locks of this call alone

        def ask(done: Done[Present]) -> None:
            self._exchange.lookup(names, lambda: self._named(keys), done)

        def unlock(found: Present) -> None:
            self._exchange.unlock(name for name, is_there in zip(names, found, strict=True) if is_there)

        present = await self._answer(ask, unlock)
        try:
            return await self._read(names, present)
        finally:
            unlock(present)

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> Chunks:
        """Chunks from the first on, up to the first that is not there."""
        chunks = await self.batched_get(keys)
        end = chunks.index(None) if None in chunks else len(chunks)
        _give_back(chunks[end:])
        return chunks[:end]

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store one chunk. One that could not be stored is counted and logged, not raised."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Yes: one reservation and one commit for all."""
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Store chunks. Those of fewer tokens than a whole one are left out: LMCache asks for whole ones only."""
        pairs = [(key, _buffer(one)) for key, one in zip(keys, memory_objs, strict=True)]
        whole = [(key, buffer) for key, buffer in pairs if buffer.nbytes == self.full_chunk_size_bytes]
        if len(whole) < len(pairs) and not self._is_told:
            self._is_told = True
            log.warning("kvservice: chunks that are not whole are not stored; leave save_unfull_chunk at false")
        if not whole:
            return
        for one in memory_objs:
            one.ref_count_up()  # a cancelled call must not free what is being copied

        def ask(done: Done[list[Stored]]) -> None:
            self._exchange.store(lambda: self._named([key for key, _ in whole]), [one for _, one in whole], done)

        await self._answer(ask, _ignore, lambda _: _give_back(memory_objs))

    # ------------------------------------------------------------------ upkeep

    def remove_sync(self, key: Any) -> bool:
        """Delete a chunk; True if the service did, for a thread that may wait."""
        answered, results = threading.Event(), list[bool]()

        def done(is_done: bool) -> None:
            results.append(is_done)
            answered.set()

        self._exchange.delete(lambda: self._named([key]), done)
        answered.wait(2 * self._timeout_s)
        return results == [True]

    def support_ping(self) -> bool:
        """Yes."""
        return True

    async def ping(self) -> int:
        """0 if the service answers, 1 if not."""
        return 0 if await self._answer(self._exchange.ping, _ignore) else 1

    async def list(self) -> Sequence[str]:
        """Nothing: the service's keys cannot be turned back into LMCache's."""
        return []

    async def close(self) -> None:
        """End the session; every lease goes with it."""
        await self._loop.run_in_executor(None, self._exchange.close)

    @property
    def status(self) -> dict[str, object]:
        """Counts, and where the breaker stands."""
        return self._exchange.status()

    async def _find(self, keys: Sequence[Any]) -> Present:
        def ask(done: Done[Present]) -> None:
            self._exchange.lookup(list(keys), lambda: self._named(keys), done, lock_s=FOUND_LOCK_S)

        return await self._answer(ask, _ignore)

    async def _read(self, names: Chunks, present: Present) -> Chunks:
        chunks = [self._allocate() if is_there else None for is_there in present]
        given = [(index, chunk) for index, chunk in enumerate(chunks) if chunk is not None]

        def ask(done: Done[Present]) -> None:
            self._exchange.load([(names[index], _buffer(chunk)) for index, chunk in given], done)

        loaded = await self._answer(ask, lambda _: _give_back(chunks))
        for (index, chunk), is_there in zip(given, loaded, strict=True):
            if not is_there:
                _give_back([chunk])
                chunks[index] = None
        return chunks

    def _allocate(self) -> Any:
        """Memory for a chunk, or None: waiting for some would stop LMCache's event loop."""
        return self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False)

    async def _answer(
        self,
        begin: Callable[[Done[T]], None],
        undo: Done[T],
        after: Done[T] | None = None,
    ) -> T:
        """What a task of the exchange is answered. If the caller is cancelled first, ``undo`` gets the answer later.

        ``after`` gets it in any case.
        """
        answer: asyncio.Future[T] = self._loop.create_future()

        def settle(result: T) -> None:
            if after is not None:
                after(result)
            if answer.cancelled():
                undo(result)
            else:
                answer.set_result(result)

        def done(result: T) -> None:
            self._loop.call_soon_threadsafe(settle, result)

        begin(done)
        return await answer

    def _named(self, keys: Sequence[Any]) -> Sequence[Named]:
        return [Named(self._kind(key), _name(key)) for key in keys]

    def _kind(self, key: Any) -> ObjectKind:
        dtype = str(key.dtype).removeprefix("torch.")
        form = f"in-process, {dtype}, {self.meta_fmt.name}"
        return ObjectKind(
            key.model_name, int(key.world_size), int(key.worker_id), self._layout, self.full_chunk_size_bytes, form
        )


def _refuse(context: ConnectorContext, error: ConfigError) -> NoReturn:
    """End an engine's start, and say why on standard error.

    LMCache turns every Exception into a line of its log and goes on without the cache, so it is none. An engine starts
    in the main thread; in another one this is a later call of LMCache's own, and must not reach the engine.
    """
    if threading.current_thread() is not threading.main_thread():
        raise IrrecoverableException(str(error)) from error
    context.loop.call_soon_threadsafe(context.loop.stop)  # its thread would keep the process from ending
    raise SystemExit(f"kvservice: {error}") from error


def read_context(context: ConnectorContext) -> tuple[LMCacheOptions, str]:
    """The options of a connector, and what holds them: its URL, its entries in ``extra_config``, or both.

    Raises ConfigError.
    """
    prefix = f"remote_storage_plugin.{context.plugin_name or SCHEME}."
    extra: Mapping[str, object] = context.config.extra_config or {}
    given = {name.removeprefix(prefix): value for name, value in extra.items() if name.startswith(prefix)}
    for name in ("module_path", "class_name"):
        given.pop(name, None)
    where = f"extra_config, {prefix}*"
    if context.url.startswith(f"{SCHEME}://"):
        given |= options_of_url(context.url)
        where = f"{without_query(context.url)} and {where}"
    return LMCacheOptions.of(given, where), where


def check_config(config: Any, options: LMCacheOptions, where: str) -> None:
    """Raise ConfigError for settings of LMCache under which chunks could not be told apart, or not be found again."""
    for is_so, reason in (
        (config.use_layerwise, "use_layerwise is not supported; set it to false"),
        (config.remote_serde != "naive", "chunks are kept as they are; set remote_serde to naive"),
        (
            options.is_shared and config.pre_caching_hash_algorithm == "builtin",
            "LMCache's builtin hash is short and unlike in every process; set pre_caching_hash_algorithm: sha256_cbor",
        ),
    ):
        if is_so:
            raise ConfigError(f"{where}: {reason}")


def _name(key: Any) -> bytes:
    tags = [text.encode() for tag in sorted(key.tags or ()) for text in map(str, tag)]
    return object_key(key.chunk_hash_hex.encode(), *tags)


def _buffer(obj: Any) -> memoryview:
    return memoryview(obj.byte_array).cast("B")


def _prefix(present: Present) -> int:
    return present.index(False) if False in present else len(present)


def _give_back(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        if chunk is not None:
            chunk.ref_count_down()


def _ignore(_: object) -> None:
    """Nothing was taken."""
