"""Both doors to LMCache against its own interfaces: what fails here is a hook that LMCache changed."""

import asyncio
import importlib.util
import inspect
import os
import select
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.app import Service
from kvservice.model.errors import ConfigError
from tests.client.builders import make_settings

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not in this environment; `make vllm-env` puts it there", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig, _create_plugin_adapter
    from lmcache.v1.exceptions import IrrecoverableException
    from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, CreateConnector
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

    from kvservice.client.connectors.lmcache import (
        KVServiceConnectorAdapter,
        KVServiceL2Adapter,
        KVServiceL2AdapterConfig,
        KVServiceRemoteConnector,
    )

MODULE = "kvservice.client.connectors.lmcache"
SHAPE = torch.Size([2, 4, 16, 8])
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
ROW_BYTES = SHAPE.numel() * 2
WAIT_MS = 20_000
PREFIX = "remote_storage_plugin.kvservice."

PAIRS = [
    (L2AdapterInterface, KVServiceL2Adapter),
    (RemoteConnector, KVServiceRemoteConnector),
    (ConnectorAdapter, KVServiceConnectorAdapter),
]


class MemoryObject:
    """What both doors use of LMCache's MemoryObj, on plain memory; keeps count of its references."""

    def __init__(self, seed: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed or 0)
        random = torch.randint(0, 256, (ROW_BYTES,), dtype=torch.uint8, generator=generator)
        self.bytes = torch.zeros(ROW_BYTES, dtype=torch.uint8) if seed is None else random
        self.references = 1

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.bytes.numpy())  # type: ignore[arg-type]

    def get_dtypes(self) -> list[torch.dtype]:
        return LAYOUT.dtypes  # type: ignore[no-any-return]

    def get_shapes(self) -> list[torch.Size]:
        return LAYOUT.shapes  # type: ignore[no-any-return]

    def ref_count_up(self) -> None:
        self.references += 1

    def ref_count_down(self) -> None:
        self.references -= 1


def object_key(number: int, **changes: Any) -> ObjectKey:
    values: dict[str, Any] = {
        "chunk_hash": number.to_bytes(32, "big"),
        "model_name": "org/model",
        "kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1),
    }
    return ObjectKey(**(values | changes))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(make_settings(tmp_path)) as service:
        yield service


def params(service: Service, **more: object) -> dict[str, object]:
    address = f"unix:{service.addresses.socket}"
    return {"address": address, "weights": "r1", "config": "c", "kv_format": "tests", "lookup_deadline_s": 10.0, **more}


def open_adapter(given: dict[str, object]) -> KVServiceL2Adapter:
    """As LMCache's server does."""
    adapter: KVServiceL2Adapter = _create_plugin_adapter(PluginL2AdapterConfig(MODULE, "KVServiceL2Adapter", given))
    return adapter


@pytest.fixture
def adapter(service: Service) -> Iterator[KVServiceL2Adapter]:
    adapter = open_adapter(params(service))
    yield adapter
    adapter.close()


def hooks(own: type) -> list[str]:
    return [name for name, value in vars(own).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize(
    ("theirs", "own", "name"), [(theirs, own, name) for theirs, own in PAIRS for name in hooks(own)]
)
def test_hooks_take_what_lmcache_gives(theirs: type, own: type, name: str) -> None:
    wanted, given = inspect.signature(getattr(theirs, name)), inspect.signature(getattr(own, name))
    assert list(given.parameters) == list(wanted.parameters)
    assert inspect.iscoroutinefunction(getattr(own, name)) == inspect.iscoroutinefunction(getattr(theirs, name))


@pytest.mark.parametrize(("theirs", "own"), PAIRS)
def test_no_hook_is_left_out(theirs: type, own: type) -> None:
    assert not inspect.isabstract(own)
    assert set(hooks(theirs)) - set(hooks(own)) <= {
        "register_listener", "set_backend_identity", "list_l2_keys", "reshape_partial_chunk", "post_init",
        "support_batched_async_contains", "support_batched_get_non_blocking",
    }, "a hook that LMCache added: decide what we do about it"  # fmt: skip


def test_lmcache_takes_the_class_with_its_configuration(adapter: KVServiceL2Adapter) -> None:
    assert isinstance(adapter, KVServiceL2Adapter)
    assert not adapter.supports_global_eviction
    assert "kv_format" in KVServiceL2AdapterConfig.help()


def test_a_misspelt_parameter_stops_the_server() -> None:
    with pytest.raises(ConfigError, match="did you mean 'address'"):
        open_adapter({"adress": "unix:/tmp/x.sock"})


def wait_for(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(WAIT_MS)
    os.eventfd_read(descriptor)


def stored(adapter: KVServiceL2Adapter, keys: list[ObjectKey], objects: list[MemoryObject]) -> Any:
    task = adapter.submit_store_task(keys, objects)
    wait_for(adapter.get_store_event_fd())
    results = adapter.pop_completed_store_tasks()
    assert adapter.pop_completed_store_tasks() == {}
    return results[task]


def looked_up(adapter: KVServiceL2Adapter, keys: list[ObjectKey]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {0: LAYOUT})
    wait_for(adapter.get_lookup_and_lock_event_fd())
    bitmap = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    return [bitmap.test(index) for index in range(len(keys))]


def loaded(adapter: KVServiceL2Adapter, keys: list[ObjectKey], objects: list[MemoryObject]) -> list[bool]:
    task = adapter.submit_load_task(keys, objects)
    wait_for(adapter.get_load_event_fd())
    bitmap = adapter.query_load_result(task)
    assert adapter.query_load_result(task) is None
    return [bitmap.test(index) for index in range(len(keys))]


def test_the_three_descriptors_differ(adapter: KVServiceL2Adapter) -> None:
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3


def test_objects_go_in_and_come_out(adapter: KVServiceL2Adapter) -> None:
    keys, objects = [object_key(1), object_key(2)], [MemoryObject(1), MemoryObject(2)]
    result = stored(adapter, keys, objects)
    assert (result.is_successful(), result.bytes_transferred()) == (True, 2 * ROW_BYTES)
    asked = [object_key(9), *keys]
    assert looked_up(adapter, asked) == [False, True, True]
    targets = [MemoryObject(), MemoryObject()]
    assert loaded(adapter, keys, targets) == [True, True]
    assert all(torch.equal(one.bytes, two.bytes) for one, two in zip(objects, targets, strict=True))
    adapter.submit_unlock(keys)
    assert loaded(adapter, keys, [MemoryObject(), MemoryObject()]) == [False, False]
    assert adapter.report_status()["locks"] == 0
    assert adapter.report_status()["is_healthy"] is True


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "org/other"},
        {"kv_rank": ObjectKey.ComputeKVRank(2, 0, 2, 0)},
        {"cache_salt": "user"},
        {"chunk_hash": b"\0" * 31 + b"\7"},
    ],
)
def test_what_differs_in_its_key_is_another_object(adapter: KVServiceL2Adapter, other: dict[str, Any]) -> None:
    stored(adapter, [object_key(1)], [MemoryObject(1)])
    assert looked_up(adapter, [object_key(1, **other), object_key(1)]) == [False, True]


def test_what_differs_in_its_layout_is_another_object(adapter: KVServiceL2Adapter) -> None:
    stored(adapter, [object_key(1)], [MemoryObject(1)])
    half = MemoryLayoutDesc([SHAPE], [torch.float16])
    task = adapter.submit_lookup_and_lock_task([object_key(1)], {0: half})
    wait_for(adapter.get_lookup_and_lock_event_fd())
    assert not adapter.query_lookup_and_lock_result(task).test(0)


def test_listeners_hear_of_it_and_deleting_works(adapter: KVServiceL2Adapter) -> None:
    heard: list[tuple[str, Any]] = []
    listener = SimpleNamespace(
        on_l2_keys_stored=lambda keys, sizes: heard.append(("stored", list(sizes))),
        on_l2_keys_accessed=lambda keys: heard.append(("accessed", list(keys))),
        on_l2_keys_deleted=lambda keys: heard.append(("deleted", list(keys))),
    )
    adapter.register_listener(listener)
    salted = object_key(1, cache_salt="user")
    stored(adapter, [salted], [MemoryObject(1)])
    assert looked_up(adapter, [salted]) == [True]
    adapter.submit_unlock([salted])
    adapter.delete([salted, object_key(5, model_name="never seen")])
    stored(adapter, [object_key(2)], [MemoryObject(2)])  # the same thread's next task: the delete is done
    assert looked_up(adapter, [salted]) == [False]
    assert all(one in heard for one in (("stored", [ROW_BYTES]), ("accessed", [salted]), ("deleted", [salted])))
    assert "user" not in dict(adapter.get_usage().bytes_by_cache_salt)


def test_what_is_stored_twice_counts_once(adapter: KVServiceL2Adapter) -> None:
    for _ in range(2):
        assert stored(adapter, [object_key(1)], [MemoryObject(1)]).is_successful()
    assert looked_up(adapter, [object_key(1)]) == [True]
    assert adapter.report_status()["objects_existed"] == 1
    assert dict(adapter.get_usage().bytes_by_cache_salt) == {"": ROW_BYTES}


def test_usage_is_the_services(adapter: KVServiceL2Adapter) -> None:
    stored(adapter, [object_key(1)], [MemoryObject(1)])
    assert adapter.get_usage().usage_fraction == -1.0
    looked_up(adapter, [object_key(1)])  # behind the question on its thread
    assert 0 < adapter.get_usage().usage_fraction < 1


# ---------------------------------------------------------------------- the remote connector


class CpuMemory:
    """LMCache's LocalCPUBackend, as far as a connector needs it."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.given: list[MemoryObject] = []

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any, eviction: bool = True, busy_loop: bool = True) -> Any:
        assert not busy_loop, "waiting would stop LMCache's event loop"
        if len(self.given) >= self.room:
            return None
        self.given.append(MemoryObject())
        return self.given[-1]


def config(given: dict[str, object], **changes: object) -> SimpleNamespace:
    extra = {PREFIX + name: value for name, value in given.items()}
    extra |= {PREFIX + "module_path": MODULE, PREFIX + "class_name": "KVServiceConnectorAdapter"}
    values: dict[str, object] = {
        "extra_config": extra,
        "use_layerwise": False,
        "remote_serde": "naive",
        "pre_caching_hash_algorithm": "sha256_cbor",
        "remote_storage_plugins": ["kvservice"],
    }
    return SimpleNamespace(**(values | changes))


METADATA = SimpleNamespace(
    get_shapes=lambda: [SHAPE],
    get_dtypes=lambda: [torch.bfloat16],
    get_num_groups=lambda: 1,
    use_mla=False,
    chunk_size=16,
)


def cache_key(number: int, **changes: Any) -> CacheEngineKey:
    values: dict[str, Any] = {
        "model_name": "org/model",
        "world_size": 1,
        "worker_id": 0,
        "chunk_hash": number,
        "dtype": torch.bfloat16,
    }
    return CacheEngineKey(**(values | changes))


def context(
    given: SimpleNamespace, memory: CpuMemory, url: str = "plugin://kvservice", loop: Any = None
) -> ConnectorContext:
    return ConnectorContext(url, loop or asyncio.get_running_loop(), memory, given, METADATA, "kvservice")


async def until(is_so: Callable[[], bool]) -> None:
    """Let the loop run until it is so."""
    async with asyncio.timeout(WAIT_MS / 1000):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("scheme", ["plugin", "url"])
async def test_lmcache_makes_a_connector_from_both_schemes(service: Service, scheme: str) -> None:
    memory, loop = CpuMemory(), asyncio.get_running_loop()
    if scheme == "plugin":
        made = CreateConnector("plugin://kvservice", loop, memory, config(params(service)), METADATA, "kvservice")
    else:
        url = f"kvservice://{service.addresses.socket}?weights=r1&config=c&kv_format=tests"
        made = CreateConnector(url, loop, memory, config({}), METADATA)
    connector = made.getWrappedConnector()
    assert isinstance(connector, KVServiceRemoteConnector)
    assert connector.support_ping()
    assert await connector.ping() == 0
    await connector.close()


async def test_chunks_go_in_and_come_out(service: Service) -> None:
    memory = CpuMemory()
    connector = KVServiceRemoteConnector(context(config(params(service)), memory))
    keys, objects = [cache_key(1), cache_key(2)], [MemoryObject(1), MemoryObject(2)]
    await connector.batched_put(keys, objects)
    assert [one.references for one in objects] == [1, 1]
    asked = [*keys, cache_key(3)]
    assert await connector.batched_async_contains("lookup", asked, True) == 2
    assert await asyncio.to_thread(connector.batched_contains, asked) == 2
    assert await connector.exists(keys[1])
    assert not await asyncio.to_thread(connector.exists_sync, asked[2])
    chunks = await connector.batched_get([asked[2], *keys])
    assert chunks[0] is None
    assert all(torch.equal(one.bytes, two.bytes) for one, two in zip(objects, chunks[1:], strict=True))
    assert torch.equal((await connector.get(keys[0])).bytes, objects[0].bytes)
    assert len(await connector.batched_get_non_blocking("lookup", [keys[0], asked[2], keys[1]])) == 1
    assert sum(one.references for one in memory.given) == len(memory.given) - 1, "what stood behind a gap went back"
    assert await asyncio.to_thread(connector.remove_sync, keys[0])
    assert not await connector.exists(keys[0])
    assert await connector.list() == []
    await connector.close()


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "org/other"},
        {"world_size": 2},
        {"world_size": 2, "worker_id": 1},
        {"dtype": torch.float16},
        {"request_configs": {"lmcache.tag.user": "a"}},
        {"chunk_hash": 2},
    ],
)
async def test_what_differs_in_its_key_is_another_chunk(service: Service, other: dict[str, Any]) -> None:
    connector = KVServiceRemoteConnector(context(config(params(service)), CpuMemory()))
    await connector.put(cache_key(1), MemoryObject(1))
    assert await connector.exists(cache_key(1))
    assert not await connector.exists(cache_key(1, **other))
    await connector.close()


async def test_without_memory_there_is_nothing_to_load_to(service: Service) -> None:
    connector = KVServiceRemoteConnector(context(config(params(service)), CpuMemory(room=1)))
    await connector.batched_put([cache_key(1), cache_key(2)], [MemoryObject(1), MemoryObject(2)])
    chunks = await connector.batched_get([cache_key(1), cache_key(2)])
    assert [chunk is None for chunk in chunks] == [False, True]
    await connector.close()


async def test_a_call_that_is_cancelled_gives_its_memory_back_when_the_copy_is_done(service: Service) -> None:
    memory = CpuMemory()
    connector = KVServiceRemoteConnector(context(config(params(service)), memory))
    await connector.put(cache_key(1), MemoryObject(1))
    task = asyncio.create_task(connector.get(cache_key(1)))
    await until(lambda: bool(memory.given))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: memory.given[0].references == 0)
    assert connector.status["locks"] == 0
    await connector.close()


async def test_a_service_that_is_away_is_a_miss_and_never_an_error() -> None:
    given = config({"address": "unix:/tmp/kvs-nobody.sock", "is_shared": False})
    connector = KVServiceRemoteConnector(context(given, CpuMemory()))
    await connector.put(cache_key(1), MemoryObject(1))
    assert await connector.batched_get([cache_key(1)]) == [None]
    assert await connector.batched_async_contains("lookup", [cache_key(1)]) == 0
    assert await connector.ping() == 1
    await connector.close()


@contextmanager
def loop_of_its_own() -> Iterator[asyncio.AbstractEventLoop]:
    """As LMCache's storage has one: in a thread that keeps the process alive until the loop is stopped."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
        thread.join(WAIT_MS / 1000)
        assert not thread.is_alive(), "the process would not end"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ({"adress": "unix:/x"}, {}, "did you mean 'address'"),
        ({"address": "unix:/x"}, {}, "kv_format"),
        ({}, {"pre_caching_hash_algorithm": "builtin"}, "sha256_cbor"),
        ({}, {"remote_serde": "cachegen"}, "remote_serde"),
        ({}, {"use_layerwise": True}, "use_layerwise"),
    ],
)
def test_what_is_set_wrongly_ends_the_start(
    service: Service, given: dict[str, object], changes: dict[str, object], message: str
) -> None:
    """LMCache keeps every Exception to itself; this is none."""
    wrong = config(given or params(service), **changes)
    with loop_of_its_own() as loop, pytest.raises(SystemExit, match=message):
        KVServiceConnectorAdapter().create_connector(context(wrong, CpuMemory(), loop=loop))


async def test_what_is_set_wrongly_later_never_ends_an_engine(service: Service) -> None:
    """LMCache can be told to make its backends anew, in a thread of its own."""
    wrong = context(config({"adress": "unix:/x"}), CpuMemory())
    with pytest.raises(IrrecoverableException, match="did you mean 'address'"):
        await asyncio.to_thread(KVServiceConnectorAdapter().create_connector, wrong)


def test_urls_of_others_are_left_to_them() -> None:
    own = KVServiceConnectorAdapter()
    assert own.can_parse("plugin://kvservice.second")
    assert not own.can_parse("plugin://kvserviceful")
    assert not own.can_parse("redis://localhost:1")
