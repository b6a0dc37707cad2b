"""Records are written into pages that were made ready: what a client or a node writes in bulk takes few faults."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvservice.app import Service
from kvservice.client import Client
from kvservice.model.errors import CapacityError
from kvservice.storage import mapping
from tests.client.builders import Engine, make_identity, make_prompt, make_settings
from tests.client.test_opaque import MIB, content, opened, read
from tests.storage.page_faults import PAGE, CountingTables, RefusingTables, counted, needs_advice

SIZE = 16 * MIB


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> CountingTables:
    return counted(monkeypatch)


@pytest.fixture
def service(tables: CountingTables, tmp_path: Path) -> Iterator[Service]:
    with Service(make_settings(tmp_path, host_bytes=64 * MIB)) as service:
        yield service


@needs_advice
def test_storing_takes_a_twentieth_of_the_faults(service: Service, tables: CountingTables) -> None:
    first, second = np.frombuffer(content(SIZE), np.uint8), np.frombuffer(content(SIZE, 1), np.uint8)
    with opened(service) as store:
        tables._is_refused = True
        before = tables.faults_of(lambda: store.put([(b"a", first)]))
        tables._is_refused = False
        after = tables.faults_of(lambda: store.put([(b"b", second)]))
        assert before >= SIZE // PAGE
        assert after <= before // 20
        with store.find([(b"a", SIZE), (b"b", SIZE)]) as found:
            assert [read(found, index, SIZE) for index in (0, 1)] == [first.tobytes(), second.tobytes()]


@needs_advice
def test_an_arena_that_is_not_prefaulted_takes_only_what_was_stored(service: Service) -> None:
    arena = service._servers._arena
    with opened(service) as store:
        assert store.put([(b"a", content(SIZE)), (b"b", content(5))]) == [None, None]
    assert arena.bytes == 64 * MIB
    taken = os.fstat(arena.descriptor()).st_blocks * 512
    assert SIZE <= taken <= SIZE + 16 * PAGE


def test_storing_works_where_the_kernel_does_not_know_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = RefusingTables(errno.EINVAL)
    monkeypatch.setattr(mapping, "_PAGE_TABLES", tables)
    with Service(make_settings(tmp_path, host_bytes=8 * MIB)) as service, opened(service) as store:
        assert store.put([(b"a", content(MIB)), (b"b", content(MIB, 1))]) == [None, None]
        with store.find([(b"a", MIB), (b"b", MIB)]) as found:
            assert [read(found, index, MIB) for index in (0, 1)] == [content(MIB), content(MIB, 1)]
    assert tables.calls == 1


def test_memory_that_is_not_granted_fails_the_store_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, identity = RefusingTables(errno.ENOMEM), make_identity()
    monkeypatch.setattr(mapping, "_PAGE_TABLES", tables)
    engine, prompt = Engine(identity.geometry), make_prompt(identity)
    slots = engine.allocate(prompt.token_count)
    with (
        Service(make_settings(tmp_path)) as service,
        Client.connect(f"unix:{service.addresses.socket}", identity) as it,
    ):
        with pytest.raises(CapacityError, match="no memory"):
            it.store(prompt, engine.planes, slots)
        assert not service._servers._node.allocation.unpublished
        assert not it.lookup([prompt]).hit_tokens
        tables.code = 0
        assert it.store(prompt, engine.planes, slots).stored_bytes
