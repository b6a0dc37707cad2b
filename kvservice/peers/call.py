"""A call to a peer: sent and answered by a lane's thread, given up by whoever waits for it. See pool.py."""

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.peers.frames import Header
from kvservice.peers.packed_counters import PackedCounters
from kvservice.peers.streams_channel import Channel

if TYPE_CHECKING:
    from kvservice.peers.pool import Lane


class CallState(enum.Enum):
    """See the module."""

    WAITING = 0
    RUNNING = 1
    DONE = 2


class SilentError(UnavailableError):
    """The peer said nothing for a whole deadline."""


class UnsettledError(UnavailableError):
    """It was begun, and nobody here knows how it ended: it may be done, or about to be undone."""


class StoppedError(Exception):
    """What the caller's own code raised while bytes were told to it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Call:
    """One request. ``on_done`` is called once, from any thread. ``expected_bytes``: of its answer, or of its record.

    ``is_record``: it moves a record. ``is_alone``: nothing may be sent behind it before it is done. ``asked_bytes``: of
    a question, about. ``unseen_bytes``: of what was given, which the peer may still read unseen. ``packed``: what of a
    record came or went as 8 bits.
    """

    is_record = False
    is_alone = False
    asked_bytes = 0
    unseen_bytes = 0

    def __init__(self, expected_bytes: int = 0) -> None:
        self.expected_bytes = expected_bytes
        self.error: BaseException | None = None
        self.resumes = 0
        self.packed = PackedCounters()
        self.is_probe = False
        self.on_done: Callable[[], None] = lambda: None
        self.lane: Lane | None = None
        self._state = CallState.WAITING
        self._lock = threading.Lock()

    # By a lane's thread

    def send(self, channel: Channel, request: int, session: "ClientSession") -> None:
        """Send the request, whole."""
        raise NotImplementedError

    def receive(self, channel: Channel, header: Header, moved: Callable[[], None]) -> KVServiceError | None:
        """Take the answer that begins with this frame; the error that the peer answered with in the middle of it."""
        raise NotImplementedError

    def may_go_on(self) -> bool:
        """May it be sent again on another connection?"""
        return True

    def must_lead(self, session: "ClientSession") -> bool:
        """Is it so long that who sends it behind others could wait for room while the other side waits for a reader?"""
        return False

    # By anybody

    @property
    def bytes_on_lane(self) -> int:
        """What counts against the limit of a connection: bytes that come or go for a record; of a question its own."""
        return self.expected_bytes if self.is_record else self.asked_bytes

    @property
    def is_done(self) -> bool:
        """Is it over?"""
        return self._state is CallState.DONE

    @property
    def is_running(self) -> bool:
        """Is it sent, or about to be?"""
        return self._state is CallState.RUNNING

    def begin(self, lane: "Lane") -> bool:
        """False if it was given up."""
        with self._lock:
            if self._state is not CallState.WAITING:
                return False
            self._state, self.lane = CallState.RUNNING, lane
            return True

    def wait_again(self) -> bool:
        """Back to waiting; False if it is given up, and was ended."""
        with self._lock:
            if self.error is None:
                self._state, self.lane = CallState.WAITING, None
                return True
        self.finish(self.error)
        return False

    def finish(self, error: BaseException | None = None) -> None:
        """It is over. Only the first end counts."""
        with self._lock:
            if self._state is CallState.DONE:
                return
            self._state, self.error = CallState.DONE, error
        self.on_done()

    def give_up(self, error: BaseException) -> None:
        """End it with this error, now or as soon as its lane has let go of the caller's memory."""
        with self._lock:
            if self._state is CallState.DONE:
                return
            self.error = self.error or error
            lane = self.lane if self._state is CallState.RUNNING else None
        if lane is None:
            self.finish(self.error)
        else:
            lane.shut()


@dataclass(slots=True, eq=False)
class ClientSession:
    """What the peer knows of us: its name for the session, the namespaces registered there, and what it lets us ask for
    on one connection before it has answered."""

    id: bytes = b""
    registered: set[bytes] = field(default_factory=set)
    fetches_max: int = 1
    fetch_bytes_max: int = 0
