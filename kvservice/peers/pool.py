"""Calls to one peer, spread over a few connections ("lanes"), each with a thread that sends and receives.

    WAITING --a lane takes it--> RUNNING --answered--> DONE
    WAITING <--the connection broke, and it may go on on another one-- RUNNING
    any     --given up--> DONE                  at once if it waits; else its lane is shut and ends it, so that nothing
                                                writes to the caller's memory once it is done

A lane that has sent one call takes more while their bytes stay under a limit and nobody else is idle: answers come in
the order of the calls. Deadlines are not looked at here: who waits for a call gives it up.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvservice.model.errors import KVServiceError, LimitError, UnavailableError, error_from_code
from kvservice.peers.call import Call, ClientSession, StoppedError, UnsettledError
from kvservice.peers.frames import REQUEST_MAX, FrameError, Kind
from kvservice.peers.streams_channel import Channel
from kvservice.peers.streams_limits import LinkLimits
from kvservice.wire.v1 import peer_pb2 as wire

log = logging.getLogger(__name__)


class Dialler(Protocol):
    """Opens connections. Any lane's thread may call."""

    def dial(self) -> tuple[Channel, ClientSession]:
        """A greeted channel. Raises KVServiceError."""

    def note_broken(self, error: BaseException) -> None:
        """A connection broke, or could not be opened."""

    def note_answered(self) -> None:
        """The peer answered."""


ASKED_BYTES_MAX = 32 << 10
"""Of questions that were sent on one connection and not answered: what the kernel takes in any case. With more, each
side could wait for the other to read: who answers sends first layers along, and reads no question meanwhile."""


class Pool:
    """The lanes to one peer. ``moved_s``: when a byte last came from it, or was taken by it, by ``clock``."""

    def __init__(self, name: str, dialler: Dialler, limits: LinkLimits, clock: Callable[[], float]) -> None:
        assert limits.connections >= 2, "one connection for questions, one or more for records"
        self.name = name
        self.limits = limits
        self.clock = clock
        self.dialler = dialler
        self.moved_s = float("-inf")
        self.outstanding_bytes = 0
        self._lanes: dict[bool, list[Lane]] = {False: [], True: []}
        self._idle = {False: 0, True: 0}
        self._queues: dict[bool, deque[Call]] = {False: deque(), True: deque()}
        self._lock = threading.Lock()
        self._waiting = {kind: threading.Condition(self._lock) for kind in (False, True)}  # one lane a call is woken
        self._is_closed = False

    def submit(self, call: Call) -> None:
        """Have it sent. Raises LimitError if too many wait, UnavailableError once closed."""
        with self._lock:
            if self._is_closed:
                raise UnavailableError(f"the link to {self.name} is closed")
            queue = self._queues[call.is_record]
            if len(queue) >= self.limits.waiting_max:
                raise LimitError(f"{len(queue)} calls wait for {self.name}, that is the limit")
            queue.append(call)
            self._staff(call.is_record, len(queue))
            self._waiting[call.is_record].notify()

    def put_back(self, calls: "list[Call]") -> None:
        """Calls of a connection that broke: they go first."""
        with self._lock:
            again = [call for call in calls if call.wait_again()]
            if self._is_closed:
                for call in again:
                    call.finish(UnavailableError(f"the link to {self.name} is closed"))
                return
            for call in reversed(again):
                self._queues[call.is_record].appendleft(call)
                self._waiting[call.is_record].notify()

    def _staff(self, is_record: bool, waiting: int) -> None:
        lanes = self._lanes[is_record]
        most = self.limits.connections - 1 if is_record else 1
        if waiting > self._idle[is_record] and len(lanes) < most:
            lane = Lane(self, is_record, len(lanes))
            lanes.append(lane)
            lane.start()

    def take(self, is_record: bool, behind: "ClientSession | None" = None, room: int = 0) -> Call | None:
        """The next call. ``behind``: others of that session are on the lane already; then only one that fits behind
        them, without waiting. None for a lane that has waited too long, which is struck off.
        """
        with self._lock:
            queue, until_s = self._queues[is_record], self.clock() + self.limits.idle_s
            while not self._is_closed:
                while queue and queue[0].is_done:
                    queue.popleft()
                if queue and (behind is None or self._fits_behind(queue[0], behind, room)):
                    return queue.popleft()
                if behind is not None:
                    return None
                left_s = until_s - self.clock()
                if left_s <= 0:  # also while others are kept busy
                    return None
                self._idle[is_record] += 1
                self._waiting[is_record].wait(left_s)
                self._idle[is_record] -= 1
            return None

    def _fits_behind(self, call: Call, session: "ClientSession", room: int) -> bool:
        is_short = not call.is_alone and not call.must_lead(session)
        return is_short and call.bytes_on_lane <= room and not self._idle[call.is_record]

    def retire(self, lane: "Lane") -> bool:
        """A lane without calls ends; False if one came meanwhile."""
        with self._lock:
            if self._queues[lane.is_record] and not self._is_closed:
                return False
            self._lanes[lane.is_record].remove(lane)
            return True

    def fail_waiting(self, error: KVServiceError) -> None:
        """End all that wait; but for a probe."""
        with self._lock:
            waiting = [call for queue in self._queues.values() for call in queue]
        for call in waiting:
            if not call.is_probe:
                call.give_up(error)

    def give_up_silent(self, since_s: float, error: KVServiceError) -> None:
        """End the calls of all lanes on which nothing moved since."""
        with self._lock:
            lanes = [lane for lanes in self._lanes.values() for lane in lanes]
        for lane in lanes:
            if lane.moved_s <= since_s:
                lane.give_up_all(error)

    def close(self) -> list[threading.Thread]:
        """End every call and lane; their threads, which end soon."""
        error = UnavailableError(f"the link to {self.name} is closed")
        with self._lock:
            self._is_closed = True
            lanes = [lane for lanes in self._lanes.values() for lane in lanes]
            for waiting in self._waiting.values():
                waiting.notify_all()
        self.fail_waiting(error)
        for lane in lanes:
            lane.give_up_all(error)
            lane.shut()
        return [lane.thread for lane in lanes]


class Lane:
    """A connection and its thread. ``moved_s``: when something last moved on it."""

    def __init__(self, pool: Pool, is_record: bool, number: int) -> None:
        self.is_record = is_record
        self.moved_s = pool.clock()
        kind = "records" if is_record else "questions"
        self.thread = threading.Thread(target=self._run, name=f"{pool.name} {kind} {number}", daemon=True)
        self._pool = pool
        self._channel: Channel | None = None
        self._session = ClientSession()
        self._sent: deque[tuple[int, Call]] = deque()
        self._request = 0

    def start(self) -> None:
        """Begin to take calls."""
        self.thread.start()

    def shut(self) -> None:
        """Have what waits for the network raise. From any thread."""
        channel = self._channel
        if channel is not None:
            channel.shut()

    def give_up_all(self, error: KVServiceError) -> None:
        """End all calls that were sent. From any thread."""
        for _, call in list(self._sent):
            call.give_up(error)

    # The thread

    def _run(self) -> None:
        while True:
            call = self._take()
            if call is not None:
                self._guarded(partial(self._start, call), call)
            elif self._sent:
                self._guarded(self._finish_first, None)
            elif self._pool.retire(self):
                self._drop()
                return

    def _take(self) -> Call | None:
        sent, limits, session = self._sent, self._pool.limits, self._session
        if sent and (len(sent) >= min(limits.fetches_max, session.fetches_max) or sent[-1][1].is_alone):
            return None
        if sent and not self.is_record and self._channel is not None and self._channel.is_narrow:
            return None
        bytes_max = min(limits.fetch_bytes_max, session.fetch_bytes_max) if self.is_record else ASKED_BYTES_MAX
        room = bytes_max - sum(call.bytes_on_lane for _, call in sent)
        return self._pool.take(self.is_record, session if sent else None, room)

    def _guarded(self, step: Callable[[], None], begun: Call | None) -> None:
        """Whatever a step raises ends this connection, not the thread."""
        try:
            step()
        except StoppedError as stopped:
            _, first = self._sent.popleft()
            first.finish(stopped.error)
            self._break_off(None, [])
        except OSError as error:
            self._break_off(error, [] if begun is None else [begun])
        except KVServiceError as error:
            self._fail(error, begun)
        except Exception as error:
            log.exception("a call to %s failed; this is a fault of the service, please report it", self._pool.name)
            self._fail(UnavailableError(f"a call to {self._pool.name} failed inside this node: {error}"), begun)

    def _start(self, call: Call) -> None:
        channel = self._connected()
        if not call.begin(self):
            return
        if not self._sent:
            self.moved_s = self._pool.clock()
        self._request = self._request % REQUEST_MAX + 1
        self._sent.append((self._request, call))
        call.send(channel, self._request, self._session)

    def _connected(self) -> Channel:
        channel = self._channel
        if channel is not None and not self._sent and channel.is_stale:
            self._drop()
            channel = None
        if channel is None:
            channel, self._session = self._pool.dialler.dial()
            self._channel = channel
            self._request = 0
        return channel

    def _finish_first(self) -> None:
        request, call = self._sent[0]
        assert self._channel is not None, "a call was sent"
        header = self._channel.receive_header()
        self._moved()
        if header.request not in (request, 0):
            raise FrameError(f"an answer to request {header.request}, before that to {request}")
        if header.kind is Kind.ERROR:
            said = self._channel.receive_message(header, wire.PeerError())
            if header.request == 0:  # it ends the connection
                raise FrameError(said.message)
            error: KVServiceError | None = error_from_code(said.code, said.message)
        else:
            error = call.receive(self._channel, header, self._moved)
        self._sent.popleft()
        self._pool.dialler.note_answered()
        call.finish(error)

    def _moved(self) -> None:
        self.moved_s = self._pool.moved_s = self._pool.clock()

    def _break_off(self, error: OSError | None, begun: list[Call]) -> None:
        """The connection is of no use any more. Calls that may go on elsewhere do."""
        calls = list(dict.fromkeys([*(call for _, call in self._sent), *begun]))
        self._sent.clear()
        self._drop()
        again, is_ours = [], any(call.error is not None for call in calls)
        for call in calls:
            call.resumes += error is not None
            if call.may_go_on() and call.resumes <= self._pool.limits.resumes_max:
                again.append(call)
            else:
                broken = UnavailableError(f"the connection to {self._pool.name} broke: {error}")
                call.finish(call.error or _as_known(call, broken))
        if error is not None and not is_ours:
            self._pool.dialler.note_broken(error)
        self._pool.put_back(again)

    def _fail(self, error: KVServiceError, begun: Call | None) -> None:
        """What cannot be mended by trying again: nobody to greet, a refusal, or frames that mean nothing."""
        calls = list(dict.fromkeys([*(call for _, call in self._sent), *([] if begun is None else [begun])]))
        self._sent.clear()
        self._drop()
        if isinstance(error, FrameError):
            error = UnavailableError(f"{self._pool.name} sent what cannot be: {error}")
        self._pool.dialler.note_broken(error)
        for call in calls:
            call.finish(call.error or _as_known(call, error))

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close(at_once=True)


def _as_known(call: Call, error: KVServiceError) -> KVServiceError:
    """The error of a call that was ended, or of one of which nobody knows whether it was done."""
    return UnsettledError(str(error)) if isinstance(error, UnavailableError) and not call.may_go_on() else error
