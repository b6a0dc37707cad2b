"""Alarms ring in order, at their time, whatever one of them does."""

import threading
import time

import pytest

from kvservice.client.connectors.lmcache.alarms import Alarms


def test_alarms_ring_in_order_of_their_time() -> None:
    alarms, rung, last = Alarms(time.monotonic), list[str](), threading.Event()
    now_s = time.monotonic()
    alarms.set(now_s + 0.06, last.set)
    alarms.set(now_s + 0.04, lambda: rung.append("second"))
    alarms.set(now_s + 0.02, lambda: rung.append("first"))
    assert last.wait(10)
    assert rung == ["first", "second"]
    alarms.close()


def test_one_that_fails_does_not_keep_the_next_from_ringing(caplog: pytest.LogCaptureFixture) -> None:
    alarms, rung = Alarms(time.monotonic), threading.Event()
    alarms.set(0, lambda: 1 / 0)  # type: ignore[arg-type]
    alarms.set(0, rung.set)
    assert rung.wait(10)
    assert "nobody expected" in caplog.text
    alarms.close()


def test_after_close_nothing_rings() -> None:
    alarms, rung = Alarms(time.monotonic), threading.Event()
    alarms.set(time.monotonic() + 0.05, rung.set)
    alarms.close()
    alarms.set(0, rung.set)
    assert not rung.wait(0.1)
