"""A place whose node runs on this host: what goes through its memory, and who is asked when it is silent."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.peers.call import SilentError
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Medium
from kvservice.sharing.routed import RoutedPlace
from tests.sharing.test_routed import PARCEL, Way

RECORD: Any = SimpleNamespace(record_bytes=100, name=SimpleNamespace(namespace=b""))


def routed(error: KVServiceError | None) -> tuple[RoutedPlace, Way, Way]:
    now_s = [0.0]
    stream, local = Way("stream", now_s), Way("local", now_s, error)
    ways = {Medium.STREAM: stream, Medium.SHARED_MEMORY: local}
    return RoutedPlace(Router(lambda: now_s[0]), ways, lambda: now_s[0]), stream, local


async def test_what_is_given_is_read_here_by_who_can_and_questions_go_the_first_way() -> None:
    place, stream, local = routed(None)
    assert await place.store(PARCEL)
    assert (stream.asked, local.asked) == (0, 1)
    await place.find([])
    assert (stream.asked, local.asked) == (1, 1)


async def test_where_it_cannot_be_read_it_is_sent() -> None:
    place, stream, local = routed(UnavailableError("its socket is gone"))
    assert await place.store(PARCEL)
    await place.fetch(RECORD, np.zeros(100, np.uint8), lambda first, end: None)
    assert (stream.asked, local.asked) == (2, 2)


async def test_no_other_way_to_a_frozen_node_is_waited_for() -> None:
    place, stream, local = routed(SilentError("frozen"))
    with pytest.raises(SilentError):
        await place.fetch(RECORD, np.zeros(100, np.uint8), lambda first, end: None)
    assert (stream.asked, local.asked) == (0, 1)


async def test_a_way_that_went_in_the_meantime_fails_as_one_that_is_closed() -> None:
    """It is taken from the place while a fetch over it runs."""
    place, stream, local = routed(UnavailableError("closed"))
    fetch = local.fetch

    async def removed(*args: Any) -> None:
        place.remove_way(Medium.STREAM)
        await fetch(*args)

    local.fetch = removed  # type: ignore[method-assign,assignment]
    await place.fetch(RECORD, np.zeros(100, np.uint8), lambda first, end: None)
    assert stream.asked == 1
