"""Opens connections to one peer and greets it. Blocking, each step within the deadline."""

import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvservice import __version__
from kvservice.model.errors import ConfigError, InvalidInputError, KVServiceError, UnavailableError, error_from_code
from kvservice.peers.call import ClientSession, SilentError
from kvservice.peers.fence import Fence, twin_error
from kvservice.peers.frames import FrameError, Kind
from kvservice.peers.member import Address, Facts, LocalAddress
from kvservice.peers.streams_channel import Channel
from kvservice.peers.streams_limits import LinkLimits
from kvservice.peers.streams_messages import decode_facts, encode_facts
from kvservice.storage.remote.breaker import Breaker
from kvservice.wire.v1 import peer_pb2 as wire


@dataclass(frozen=True, slots=True)
class Caller:
    """Who dials: what it says of itself and what proves it, all asked anew for every connection, by its thread.

    ``tls``: the context for connections to other nodes, None for plain TCP; ``server_name``: whom certificates must
    name, if not the host that is dialled. ``token`` and ``tls`` raise ConfigError for files that cannot be read now.
    """

    facts: Callable[[], Facts]
    token: Callable[[], str] = lambda: ""
    tls: Callable[[], ssl.SSLContext | None] = lambda: None
    server_name: str = ""

    def shown_token(self) -> str:
        """What it shows now. Raises UnavailableError where the file is away: it may come back."""
        try:
            return self.token()
        except ConfigError as error:
            raise UnavailableError(f"there is no token to show: {error}") from error

    def context(self) -> ssl.SSLContext | None:
        """What it trusts now. Raises UnavailableError where files are away."""
        try:
            return self.tls()
        except ConfigError as error:
            raise UnavailableError(f"no TLS can be spoken: {error}") from error


class PeerDialler:
    """``on_greeted``: told what the peer says of itself, from the thread that dialled."""

    def __init__(
        self, address: Address | LocalAddress, caller: Caller, limits: LinkLimits, on_greeted: Callable[[Facts], None]
    ) -> None:
        self.record_bytes_max = 0
        self.find_queries_max = limits.find_queries_max
        self._address = address
        self._caller = caller
        self._deadline_s = limits.deadline_s
        self._sends_files = limits.sends_files
        self._on_greeted = on_greeted
        self._first, self._lock = threading.Lock(), threading.Lock()
        self._session = ClientSession()
        self._fence = Fence()

    def dial(self) -> tuple[Channel, ClientSession]:
        """A greeted channel and the session that it belongs to. Raises KVServiceError.

        The first one alone, so that all connections belong to its session; then several at the same time.
        """
        with self._first:
            if not self._session.id:
                return self._dial()
        return self._dial()

    def _dial(self) -> tuple[Channel, ClientSession]:
        try:
            channel = self._connect()
        except TimeoutError as error:
            raise SilentError(f"{self._address} did not answer within {self._deadline_s:g} s") from error
        except OSError as error:
            raise UnavailableError(f"{self._address} cannot be reached: {error}") from error
        try:
            session = self._greet(channel)
            channel.set_timeout(None)
        except TimeoutError as error:
            channel.close()
            text = f"{self._address} takes connections and does not greet within {self._deadline_s:g} s"
            raise SilentError(text) from error
        except OSError as error:
            channel.close()
            raise UnavailableError(f"{self._address} ended the greeting: {error}") from error
        except BaseException:
            channel.close()
            raise
        return channel, session

    def _connect(self) -> Channel:
        assert isinstance(self._address, Address), "others have diallers of their own"
        (host, port), tls = self._address, self._caller.context()
        sock = socket.create_connection((host, port), self._deadline_s)
        try:
            if tls is not None:
                sock = tls.wrap_socket(sock, server_hostname=self._caller.server_name or host)
            return Channel(sock, sends_files=self._sends_files)
        except BaseException:
            sock.close()
            raise

    def _greet(self, channel: Channel) -> ClientSession:
        own = self._caller.facts()
        self._open(channel, own)
        header = channel.receive_header()
        if header.kind is Kind.ERROR:
            said = channel.receive_message(header, wire.PeerError())
            raise self._refusal(error_from_code(said.code, said.message))
        if header.kind is not Kind.WELCOME:
            raise FrameError(f"a {header.kind.name} frame where a welcome should be")
        welcome = channel.receive_message(header, wire.PeerWelcome())
        try:
            facts = decode_facts(welcome.facts)
        except InvalidInputError as error:
            raise FrameError(str(error)) from error
        limits = welcome.limits
        with self._lock:
            self._admit(own, facts)
            session = self._session
            if welcome.session != session.id:
                fetches_max = max(1, limits.fetches_max // 2)  # the word that one is here comes behind the next request
                session = ClientSession(welcome.session, set(), fetches_max, limits.fetch_bytes_max)
                self._session = session
        self.record_bytes_max = limits.record_bytes_max
        self.find_queries_max = max(1, limits.find_queries_max)
        self._exchange(channel)
        self._on_greeted(facts)
        return session

    def _open(self, channel: Channel, own: Facts) -> None:
        """Say who calls, and hear what is spoken there."""
        channel.send_opening()
        self._say_hello(channel, own)
        channel.receive_opening()

    def _say_hello(self, channel: Channel, own: Facts) -> None:
        hello = wire.PeerHello(
            facts=encode_facts(own), token=self._caller.shown_token(), session=self._session.id, version=__version__
        )
        channel.send(Kind.HELLO, 1, hello)

    def _exchange(self, channel: Channel) -> None:
        """What both sides give each other behind the welcome."""

    def _admit(self, own: Facts, facts: Facts) -> None:
        where = str(self._address)
        if facts.node == own.node:
            raise ConfigError(f"{where} is this very node: leave its address out of those it shares with")
        if facts.node.uuid == own.node.uuid:
            raise twin_error(facts.node, where, own.node, "this node")
        self._fence.admit(facts.node, where)

    def _refusal(self, error: KVServiceError) -> KVServiceError:
        """The same error, and who said so."""
        return type(error)(f"{self._address} refuses this node: {error}")


class WatchedDialler:
    """See ``kvservice.peers.pool.Dialler``. What lanes report, from their threads, the breaker hears at once."""

    def __init__(self, dialler: PeerDialler, breaker: Breaker, on_broken: Callable[[BaseException], None]) -> None:
        self.dial = dialler.dial
        self._breaker = breaker
        self._on_broken = on_broken

    def note_broken(self, error: BaseException) -> None:
        """See Dialler."""
        if isinstance(error, SilentError):
            self._breaker.timed_out()
        else:
            self._breaker.failed()
        self._on_broken(error)

    def note_answered(self) -> None:
        """See Dialler."""
        self._breaker.succeeded()
