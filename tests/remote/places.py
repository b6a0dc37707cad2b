"""The places that the contract's tests run over, each with the means to damage what it keeps."""

import contextlib
import importlib
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvservice.storage.remote.breaker import Breaker
from kvservice.storage.remote.contract import RemoteName
from kvservice.storage.remote.object_names import ObjectNames
from kvservice.storage.remote.opening import open_remote
from kvservice.storage.remote.tier import Deadline, ObjectTier
from tests.remote.naive import DictObjects
from tests.remote.servers import (
    Server,
    is_installed,
    mooncake_master,
    mooncake_store,
    redis_server,
    running,
    s3_server,
    store_is_ready,
)

DEADLINE_S = 5.0
"""Wide: these tests share few cores with others. Tests of deadlines open tiers with short ones."""


class Place(ABC):
    """A place, and what lies in it, behind the tier's back. ``server``: the process to freeze or to kill, if any."""

    server: Server | None = None

    def __init__(self, url: str) -> None:
        self.url = url
        self._tiers: list[ObjectTier] = []

    async def open(self, deadline_s: float = DEADLINE_S, breaker: Breaker | None = None) -> ObjectTier:
        """One more client of this place."""
        tier = await open_remote(self.url, deadline_s=deadline_s, breaker=breaker)
        self._tiers.append(tier)
        return tier

    async def close(self) -> None:
        for tier in self._tiers:
            await tier.close()

    @abstractmethod
    def read(self, name: RemoteName) -> bytes:
        """The object."""

    @abstractmethod
    def write(self, name: RemoteName, data: bytes) -> None:
        """Put another object there."""

    @property
    def holder(self) -> Server:
        """The process that holds the bytes."""
        assert self.server is not None
        return self.server

    def restart(self) -> None:
        """Kill it and start it again, empty."""
        self.holder.restart()

    def read_payload(self, name: RemoteName) -> bytes:
        """What holds the last layer: the object, or where records are kept in pieces the last one."""
        return self.read(name)

    def write_payload(self, name: RemoteName, data: bytes) -> None:
        self.write(name, data)


class StorePlace(Place):
    """Any obstore store: a local folder, memory, S3."""

    def __init__(self, url: str, store: Any, prefix: str) -> None:
        super().__init__(url)
        self._library = importlib.import_module("obstore")
        self._store = store
        self._names = ObjectNames(prefix)

    def read(self, name: RemoteName) -> bytes:
        return bytes(self._library.get(self._store, self._names.record(name)).bytes())

    def write(self, name: RemoteName, data: bytes) -> None:
        self._library.put(self._store, self._names.record(name), data, use_multipart=False)


class MemoryPlace(StorePlace):
    """One store for all clients: a second one would be another place."""

    def __init__(self, prefix: str) -> None:
        super().__init__(f"memory:///{prefix}", None, prefix)

    async def open(self, deadline_s: float = DEADLINE_S, breaker: Breaker | None = None) -> ObjectTier:
        if self._tiers:
            return self._tiers[0]
        tier = await super().open(deadline_s, breaker)
        objects: Any = tier._objects
        self._store = objects._store
        return tier


class S3Place(StorePlace):
    def __init__(self, url: str, store: Any, prefix: str, server: Server) -> None:
        super().__init__(url, store, prefix)
        self.server = server

    def restart(self) -> None:
        super().restart()
        make_bucket(self.holder)


class DictPlace(Place):
    """The naive engine, one dict for all clients."""

    def __init__(self) -> None:
        super().__init__("dict://here")
        self._objects = DictObjects()

    async def open(self, deadline_s: float = DEADLINE_S, breaker: Breaker | None = None) -> ObjectTier:
        tier = ObjectTier(self._objects, self.url, Deadline(deadline_s, 1e9), breaker)
        self._tiers.append(tier)
        return tier

    def read(self, name: RemoteName) -> bytes:
        return self._objects.kept[name].tobytes()

    def write(self, name: RemoteName, data: bytes) -> None:
        self._objects.kept[name] = np.frombuffer(data, np.uint8).copy()


class RedisPlace(Place):
    def __init__(self, server: Server, prefix: str) -> None:
        super().__init__(f"redis://127.0.0.1:{server.port}/0?prefix={prefix}&object_bytes_max={64 << 20}")
        self.server = server
        self._names = ObjectNames(prefix, ":")

    def client(self) -> Any:
        port = self.server.port if self.server else 0
        return contextlib.closing(importlib.import_module("redis").Redis(port=port))

    def read(self, name: RemoteName) -> bytes:
        with self.client() as client:
            data: bytes = client.get(self._names.record(name))
            return data

    def write(self, name: RemoteName, data: bytes) -> None:
        with self.client() as client:
            client.set(self._names.record(name), data)


class MooncakePlace(Place):
    def __init__(self, master: Server, store: Server, prefix: str, folder: Path) -> None:
        super().__init__(f"mooncake://127.0.0.1:{master.port}/{prefix}")
        self.server, self.store_server = master, store
        self._folder = folder
        self._names = ObjectNames(prefix)
        self._own: Any = None

    @property
    def holder(self) -> Server:
        return self.store_server

    def restart(self) -> None:
        """The store finds the new master by itself, but only after a while; it is started again too."""
        assert self.server is not None
        self.store_server.kill()
        self.server.restart()
        self.store_server.start(store_is_ready(self._folder, 2))

    def own(self) -> Any:
        if self._own is None:
            self._own = importlib.import_module("mooncake.store").MooncakeDistributedStore()
            port = self.server.port if self.server else 0
            assert self._own.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", f"127.0.0.1:{port}") == 0
        return self._own

    async def close(self) -> None:
        await super().close()
        if self._own is not None:
            self._own.remove_all(True)
            self._own.close()

    def read(self, name: RemoteName) -> bytes:
        return bytes(self.own().get(self._names.record(name)))

    def write(self, name: RemoteName, data: bytes) -> None:
        self._put(self._names.record(name), data)

    def read_payload(self, name: RemoteName) -> bytes:
        return bytes(self.own().get(self._payload(name)))

    def write_payload(self, name: RemoteName, data: bytes) -> None:
        self._put(self._payload(name), data)

    def _put(self, key: str, data: bytes) -> None:
        self.own().remove(key, True)
        assert self.own().put(key, data) == 0

    def _payload(self, name: RemoteName) -> str:
        from kvservice.storage.remote.mooncake import _is_small, _parsed, _piece_keys

        parsed = _parsed(np.frombuffer(self.read(name), np.uint8).copy())
        assert parsed is not None
        key = self._names.record(name)
        return key if _is_small(parsed[0].record_bytes) else _piece_keys(key, parsed[1])[-1]


Servers = tuple[Server, ...]


@contextlib.contextmanager
def no_servers(request: pytest.FixtureRequest, folder: Path) -> Iterator[Servers]:
    yield ()


@contextlib.contextmanager
def s3_servers(request: pytest.FixtureRequest, folder: Path) -> Iterator[Servers]:
    with running(s3_server(request, folder)) as server:
        make_bucket(server)
        yield (server,)


def make_bucket(server: Server) -> None:
    """As anybody may on this server."""
    make = urllib.request.Request(f"http://127.0.0.1:{server.port}/bucket", method="PUT")
    with urllib.request.urlopen(make, timeout=30):
        pass


@contextlib.contextmanager
def redis_servers(request: pytest.FixtureRequest, folder: Path, *options: str) -> Iterator[Servers]:
    with running(redis_server(request, folder, *options)) as server:
        yield (server,)


@contextlib.contextmanager
def mooncake_servers(request: pytest.FixtureRequest, folder: Path, pool_bytes: int = 256 << 20) -> Iterator[Servers]:
    with (
        running(mooncake_master(request, folder)) as master,
        running(mooncake_store(master, folder, pool_bytes), store_is_ready(folder)) as store,
    ):
        yield (master, store)


SERVERS = {
    "dict": no_servers,
    "memory": no_servers,
    "file": no_servers,
    "s3": s3_servers,
    "redis": redis_servers,
    "mooncake": mooncake_servers,
}
SERVED = ("s3", "redis", "mooncake")
_NEEDS = {
    "dict": (),
    "memory": ("obstore",),
    "file": ("obstore",),
    "s3": ("obstore", "moto"),
    "redis": ("redis", "redis-server"),
    "mooncake": ("mooncake", "mooncake_master"),
}
AVAILABLE = [kind for kind, needs in _NEEDS.items() if all(is_installed(one) for one in needs)]


def missing(kind: str) -> list[str]:
    """What a place of that kind lacks here."""
    return [one for one in _NEEDS[kind] if not is_installed(one)]


def make_place(kind: str, servers: Servers, folder: Path, prefix: str) -> Place:
    """A place of that kind, empty, on servers that others may use too. ``folder``: for a place that is one."""
    if kind == "dict":
        return DictPlace()
    if kind == "memory":
        return MemoryPlace(prefix)
    if kind == "file":
        (folder / "objects").mkdir()
        store = importlib.import_module("obstore.store").LocalStore(folder / "objects")
        return StorePlace(f"file://{folder}/objects", store, "")
    if kind == "redis":
        return RedisPlace(servers[0], prefix)
    if kind == "mooncake":
        return MooncakePlace(servers[0], servers[1], prefix, folder)
    endpoint = f"http://127.0.0.1:{servers[0].port}"
    store = importlib.import_module("obstore.store").S3Store(
        "bucket", endpoint=endpoint, region="us-east-1", client_options={"allow_http": True}
    )
    return S3Place(f"s3://bucket/{prefix}?endpoint={endpoint}", store, prefix, servers[0])
