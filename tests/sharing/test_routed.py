"""A place with two ways: who is asked when the first one is lost."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvservice.caches import Space
from kvservice.model.errors import CapacityError, KVServiceError, UnavailableError
from kvservice.model.segment import CacheKey
from kvservice.peers.call import UnsettledError
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Medium
from kvservice.sharing.place import Offer, Parcel, Question
from kvservice.sharing.routed import AT_ONCE_S, RoutedPlace
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import OnPiece, RemoteRecord

PARCEL = cast("Parcel", SimpleNamespace(view=np.zeros(10, np.uint8)))


class Way:
    """Counts what it is asked, or fails after so many seconds of ``now_s``."""

    def __init__(
        self, name: str, clock: list[float], error: KVServiceError | None = None, seconds: float = 0.0
    ) -> None:
        self.name, self.asked = name, 0
        self._clock, self._error, self._seconds = clock, error, seconds

    def _ask(self) -> None:
        self.asked += 1
        self._clock[0] += self._seconds
        if self._error is not None:
            raise self._error

    async def find(self, questions: Sequence[Question], ahead_bytes: int = 0) -> list[Offer | None]:
        self._ask()
        return [None for _ in questions]

    async def fetch(self, record: RemoteRecord, target: Bytes, on_piece: OnPiece, start: int = 0) -> None:
        self._ask()

    def let_go(self, records: Iterable[RemoteRecord]) -> None:
        self._ask()

    async def store(self, parcel: Parcel) -> bool:
        self._ask()
        return True

    async def delete(self, space: Space, keys: Sequence[CacheKey] | None) -> int:
        self._ask()
        return 1

    async def close(self) -> None:
        self._ask()


def routed(error: KVServiceError | None, seconds: float) -> tuple[RoutedPlace, Way, Way]:
    now_s = [0.0]
    first, second = Way("stream", now_s, error, seconds), Way("flight", now_s)
    router = Router(lambda: now_s[0])
    return RoutedPlace(router, {Medium.STREAM: first, Medium.FLIGHT: second}, lambda: now_s[0]), first, second


async def test_the_first_way_is_asked_as_long_as_it_answers() -> None:
    place, first, second = routed(None, 0.0)
    await place.find([])
    assert (first.asked, second.asked) == (1, 0)


async def test_a_way_that_is_known_to_be_lost_is_followed_by_another() -> None:
    place, first, second = routed(UnavailableError("left alone"), 0.0)
    await place.find([])
    assert await place.delete(None, None) == 1  # type: ignore[arg-type]
    assert await place.store(PARCEL)
    assert (first.asked, second.asked) == (3, 3)


async def test_after_a_whole_deadline_nobody_else_is_asked() -> None:
    """Else a lost node costs a deadline for each of its ways."""
    place, _, second = routed(UnavailableError("silent"), 2 * AT_ONCE_S)
    with pytest.raises(UnavailableError):
        await place.find([])
    assert second.asked == 0


async def test_what_may_have_been_done_is_not_asked_of_another_way() -> None:
    """It would find its own record there, half written and about to be given up, and take it for stored."""
    place, _, second = routed(UnsettledError("broke behind GO"), 0.0)
    with pytest.raises(UnsettledError):
        await place.store(PARCEL)
    assert second.asked == 0


async def test_what_the_place_says_is_said_once() -> None:
    place, _, second = routed(CapacityError("full"), 0.0)
    with pytest.raises(CapacityError):
        await place.store(PARCEL)
    assert second.asked == 0
