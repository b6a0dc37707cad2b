"""A session with the service that comes back by itself: opened when first needed, and again after it was lost.

A breaker stands before it. While that is open nothing is tried, so no thread waits for a service that is gone.
Every method may block: never call one on the engine's thread.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvservice.client.connectors.breaker import Breaker, BreakerState
from kvservice.client.session import Session
from kvservice.model.errors import (
    KVServiceError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
    UnknownSessionError,
)

T = TypeVar("T")

PROBE_S = 1.0
"""How often an idle thread asks a breaker that is not closed whether to try; the breaker's pause decides."""

OpenSession = Callable[[], Session]
LOST = (UnavailableError, UnknownSessionError, StaleEpochError, UnauthenticatedError)
"""What a call raises when the session is of no more use: a token that is good no more stays that of its session."""


class Link:
    """One session at a time with one node. Safe from any thread."""

    def __init__(self, open_session: OpenSession, breaker: Breaker) -> None:
        self.breaker = breaker
        self._open_session = open_session
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._is_closed = False

    @contextmanager
    def session(self) -> Iterator[Session]:
        """The open session, for one piece of work. What it raises decides whether the session is kept.

        Raises UnavailableError at once while the breaker is open, or when no session can be opened.
        """
        if not self.breaker.allows():
            raise UnavailableError("the service failed or was slow several times; it is tried again in some seconds")
        try:
            session = self._opened()
        except BaseException as error:
            self.breaker.failed()
            if isinstance(error, KVServiceError) and not isinstance(error, UnavailableError):
                raise UnavailableError(f"the service gives no session: {error}") from error
            raise
        try:
            yield session
        except LOST:
            self.breaker.failed()
            self._drop(session)
            raise

    def run(self, work: Callable[[Session], T], *, is_quick: bool = False) -> T:
        """What ``work`` gives with the session; done again with a new one if the session turns out to be lost.

        ``is_quick``: how long it takes tells the breaker how the service does. Raises as ``session``.
        """
        was_open = self._session is not None
        within = self.call if is_quick else self.session
        try:
            with within() as session:
                return work(session)
        except LOST:  # restarted, perhaps: the first to notice must not pay for it
            if not was_open or self.breaker.state is BreakerState.OPEN:
                raise
        with within() as session:
            return work(session)

    @contextmanager
    def call(self) -> Iterator[Session]:
        """``session`` for one quick call: how long it takes tells the breaker how the service does."""
        with self.session() as session:
            began_s = time.monotonic()
            yield session
            self.breaker.succeeded(time.monotonic() - began_s)

    @property
    def probe_interval_s(self) -> float | None:
        """How long a thread that has nothing to do may wait before it calls ``probe``; None: as long as it likes."""
        return None if self.breaker.state is BreakerState.CLOSED else PROBE_S

    def probe(self) -> None:
        """Find out whether a service that was given up is back, so that nobody has to be slow to find out."""
        try:
            with self.call() as session:
                session.lookup([])
        except KVServiceError:
            return

    def is_current(self, session: Session) -> bool:
        """True while ``session`` has not been given up: what it holds on the node may still be there."""
        return self._session is session

    def close(self) -> None:
        """End the session. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def _opened(self) -> Session:
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the connector is shutting down")
            if self._session is None:
                self._session = self._open_session()
            return self._session

    def _drop(self, session: Session) -> None:
        with self._lock:
            if self._session is not session:
                return
            self._session = None
        session.close()
