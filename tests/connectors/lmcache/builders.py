"""Builders of the tests next to LMCache: options, owners, kinds, and an exchange with a service."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvservice.app import Service
from kvservice.client.connectors.lmcache.exchange import Exchange
from kvservice.client.connectors.lmcache.identity import ObjectKind, Owner
from kvservice.client.connectors.lmcache.options import LMCacheOptions
from kvservice.client.connectors.lmcache.vault import Named, Vault

ANSWER_TIMEOUT_S = 20.0
WHERE = "these tests"


def make_options(address: str = "unix:/tmp/nobody.sock", **changes: Any) -> LMCacheOptions:
    given: dict[str, Any] = {"address": address, "weights": "r1", "config": "c1", "kv_format": "tests", **changes}
    return LMCacheOptions.of(given, WHERE)


def make_kind(row_bytes: int = 256, **changes: Any) -> ObjectKind:
    values: dict[str, Any] = {
        "model": "org/model",
        "world_size": 1,
        "rank": 0,
        "layout": (("bfloat16", (row_bytes // 2,)),),
        "row_bytes": row_bytes,
        "form": "tests",
    }
    return ObjectKind(**(values | changes))


@contextmanager
def connected(service: Service, **options: Any) -> Iterator[Exchange]:
    exchange = make_exchange(f"unix:{service.addresses.socket}", **options)
    try:
        yield exchange
    finally:
        exchange.close()


def make_exchange(address: str, **options: Any) -> Exchange:
    chosen = make_options(address, **{"lookup_deadline_s": ANSWER_TIMEOUT_S} | options)
    return Exchange(Vault.connect(chosen, Owner.of(chosen, WHERE), "tests"), chosen)


def named(*keys: bytes, kind: ObjectKind | None = None) -> Callable[[], Sequence[Named]]:
    return lambda: [Named(kind or make_kind(), key) for key in keys]


def answer_of(begin: Callable[[Callable[[Any], None]], None]) -> Any:
    """What a task is answered; fails when it is answered twice or not at all."""
    answered, results = threading.Event(), list[Any]()

    def done(result: Any) -> None:
        results.append(result)
        answered.set()

    begin(done)
    assert answered.wait(ANSWER_TIMEOUT_S)
    assert len(results) == 1
    return results[0]
