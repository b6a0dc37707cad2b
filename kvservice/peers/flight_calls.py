"""Blocking calls to another node's Flight port, by a link's threads. Needs pyarrow.

A call that moves a record may be given up at any moment: nothing is written to its caller's memory from then on,
however long gRPC takes to let go of the call.
"""

import logging
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message
from pyarrow import flight

from kvservice import __version__
from kvservice.access.tls import PemFiles
from kvservice.model.errors import (
    ConfigError,
    InvalidInputError,
    KVServiceError,
    UnavailableError,
    UnknownSessionError,
)
from kvservice.model.segment import CacheKey
from kvservice.peers.call import ClientSession, StoppedError
from kvservice.peers.fence import Fence, twin_error
from kvservice.peers.flight_batches import FLIGHT_ERRORS, SCHEMA, batch_of, bytes_of, from_flight, is_answer, whole_of
from kvservice.peers.flight_runner import Moving
from kvservice.peers.flight_words import (
    ANSWER_BYTES_MAX,
    AUTHORIZATION,
    BATCH_BYTES,
    BYE,
    HELLO,
    LEASE,
    PREFIX,
    SESSION,
)
from kvservice.peers.frames import Kind, parse_message
from kvservice.peers.member import Address, Facts
from kvservice.peers.streams_client_calls import Identities, PeerRecord
from kvservice.peers.streams_client_dialler import Caller
from kvservice.peers.streams_messages import decode_facts, encode_facts, encode_key
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import OnPiece, RemoteRecord
from kvservice.store import WriteRequest
from kvservice.wire.v1 import peer_pb2 as wire

RECONNECT_MS_MAX = 500
M = TypeVar("M", bound=Message)
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """Which part of a record is asked for: what goes to ``target`` from ``start`` on, and who is told."""

    target: Bytes
    on_piece: OnPiece
    start: int


class FlightConnection:
    """A channel to one node, greeted when it is first used. Any thread calls; every call ends within its time.

    ``pem``: this node's certificate and the authority of others as they are now, None for plaintext; when they change
    the next call opens another channel. ``caller.tls`` is not used.
    ``on_greeted`` is told what the node says of itself, by the thread that called.
    """

    def __init__(
        self,
        address: Address,
        caller: Caller,
        pem: Callable[[], PemFiles | None],
        deadline_s: float,
        on_greeted: Callable[[Facts], None],
    ) -> None:
        self.where = str(address)
        self._caller = caller
        self._deadline_s = deadline_s
        self._on_greeted = on_greeted
        self._fence = Fence()
        self._lock = threading.Lock()
        self._session: ClientSession | None = None
        self._asked = b""
        self._address = address
        self._pem = pem
        self._shown = pem()
        self._opening = threading.Lock()
        self._problem = ""
        self._client: Any = self._connect(self._shown)

    def _connect(self, pem: PemFiles | None) -> Any:
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        return flight.FlightClient(
            f"{'grpc' if pem is None else 'grpc+tls'}://{host}:{self._address.port}",
            generic_options=[
                ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
                ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
            ],
            **({} if pem is None else _secured(pem, self._caller.server_name)),
        )

    # Questions

    def ask(self, verb: str, message: Message | None, answer: M, timeout_s: float) -> M:
        """The answer to a question. Raises KVServiceError."""
        self._in_session(lambda session: self._ask(verb, message, answer, timeout_s, session), timeout_s)
        return answer

    def ask_with(
        self, verb: str, message: wire.PeerFind | wire.PeerDelete, identities: Identities, answer: M, timeout_s: float
    ) -> tuple[M, ClientSession]:
        """The same for what names namespaces, and the session that it was asked in."""

        def ask(session: ClientSession) -> tuple[M, ClientSession]:
            del message.identities[:]
            message.identities.extend(_new(identities, session))
            self._ask(verb, message, answer, timeout_s, session)
            session.registered.update(identities)
            return answer, session

        return self._in_session(ask, timeout_s)

    # Records

    def fetch(
        self, record: RemoteRecord, piece: Piece, identities: Identities, moving: Moving, timeout_s: float
    ) -> None:
        """Fill a target. Raises StoppedError with what ``on_piece`` raised, GivenUpError, KVServiceError."""
        name, lease = record.name, record.lease if isinstance(record, PeerRecord) else None
        moving.at = piece.start

        def fetch(session: ClientSession) -> None:
            if moving.at == record.record_bytes:
                return
            message = wire.PeerFetch(
                identities=_new(identities, session),
                namespace=name.namespace,
                key=encode_key(CacheKey(name.segment, name.context)),
                generation=record.head.generation,
                lease_id=0 if lease is None else lease.id,
                start=moving.at,
            )
            other = b"" if lease is None or lease.session is session else lease.session.id
            with self._exchange(Kind.FETCH, message, session, moving, timeout_s, other) as (writer, reader):
                writer.done_writing()
                _receive(reader, record.record_bytes, piece, moving)
            session.registered.update(identities)

        self._in_session(fetch, timeout_s)

    def store(
        self,
        request: WriteRequest,
        view: Bytes,
        header_checksum: int,
        identities: Identities,
        moving: Moving,
        timeout_s: float,
    ) -> bool:
        """Give a record away; False if its key is held there. Raises GivenUpError, KVServiceError."""

        def store(session: ClientSession) -> bool:
            asked, master = request, request.master
            message = wire.PeerStore(
                identities=_new(identities, session),
                namespace=asked.namespace,
                key=encode_key(asked.key),
                record_bytes=asked.record_bytes,
                master_context=b"" if master is None else master.context,
                master_generation=0 if master is None else master.generation,
                prefill_s=asked.prefill_s,
            )
            with self._exchange(Kind.STORE, message, session, moving, timeout_s) as (writer, reader):
                if _answer(reader, moving, Kind.GO, Kind.EXISTS) == Kind.EXISTS:
                    return False
                _send(writer, view, wire.PeerCommit(header_checksum=header_checksum), moving)
                _answer(reader, moving, Kind.STORED)
                return True

        return self._in_session(store, timeout_s)

    def close(self, *, says_bye: bool) -> None:
        """Say goodbye, if a session is open. The channel ends with the last call, which still stands on it."""
        session = self._session
        if says_bye and session is not None:
            with suppress(KVServiceError):
                self._ask(BYE, None, None, min(self._deadline_s, 1.0), session)
        with self._opening:
            self._client = None

    # Parts

    def _in_session(self, work: Callable[[ClientSession], T], timeout_s: float) -> T:
        """A session that ran out is opened anew, once."""
        try:
            return work(self._greeted(timeout_s))
        except UnknownSessionError:
            with self._lock:
                self._session = None
            return work(self._greeted(timeout_s))

    def _greeted(self, timeout_s: float) -> ClientSession:
        with self._lock:
            if self._session is None:
                self._session = self._greet(min(timeout_s, self._deadline_s))
            return self._session

    def _greet(self, timeout_s: float) -> ClientSession:
        own, welcome = self._caller.facts(), wire.PeerWelcome()
        hello = wire.PeerHello(facts=encode_facts(own), session=self._asked, version=__version__)
        try:
            self._ask(HELLO, hello, welcome, timeout_s, None)
        except KVServiceError as error:
            if isinstance(error, UnavailableError):
                raise
            raise type(error)(f"{self.where} refuses this node: {error}") from error
        facts = decode_facts(welcome.facts)
        if facts.node == own.node:
            raise ConfigError(f"{self.where} is this very node: leave its address out of those it shares with")
        if facts.node.uuid == own.node.uuid:
            raise twin_error(facts.node, self.where, own.node, "this node")
        self._fence.admit(facts.node, self.where)
        self._asked = welcome.session
        self._on_greeted(facts)
        return ClientSession(welcome.session, set())

    def _options(self, timeout_s: float, session: ClientSession | None, lease_session: bytes = b"") -> Any:
        token = self._caller.shown_token()
        said = {
            AUTHORIZATION: f"Bearer {token}" if token else "",
            SESSION: "" if session is None else session.id.hex(),
            LEASE: lease_session.hex(),
        }
        headers = [(name.encode(), value.encode()) for name, value in said.items() if value]
        return flight.FlightCallOptions(timeout=timeout_s, headers=headers)

    def _ask(
        self,
        verb: str,
        message: Message | None,
        answer: Message | None,
        timeout_s: float,
        session: ClientSession | None,
    ) -> None:
        action = flight.Action(PREFIX + verb, b"" if message is None else message.SerializeToString())
        client = self._open()
        try:
            results = list(client.do_action(action, self._options(timeout_s, session)))
        except FLIGHT_ERRORS as error:
            raise from_flight(error, self.where, self._deadline_s) from error
        if len(results) != 1:
            raise UnavailableError(f"{self.where} sent what cannot be: {len(results)} answers to one question")
        if answer is not None:
            self._parse(results[0].body.to_pybytes(), answer)

    def _open(self) -> Any:
        """The channel; calls that run stand on that which they began with."""
        with self._opening:
            if self._client is None:
                raise UnavailableError(f"the link to {self.where} is closed")
            pem = self._pem_now()
            if pem != self._shown:
                self._client, self._shown = self._connect(pem), pem
            return self._client

    def _pem_now(self) -> PemFiles | None:
        """Files that cannot be read for now change nothing."""
        try:
            pem, self._problem = self._pem(), ""
        except ConfigError as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.warning("%s: what was shown until now is shown still: %s", self.where, error)
            return self._shown
        return pem

    def _parse(self, data: bytes, message: Message) -> None:
        try:
            parse_message(data, message)
        except InvalidInputError as error:
            raise UnavailableError(f"{self.where} sent what cannot be: {error}") from error

    @contextmanager
    def _exchange(
        self,
        kind: Kind,
        message: Message,
        session: ClientSession,
        moving: Moving,
        timeout_s: float,
        lease_session: bytes = b"",
    ) -> Iterator[tuple[Any, Any]]:
        """An exchange for one record: its writer and reader. It is cancelled unless all of it went well."""
        command = flight.FlightDescriptor.for_command(bytes([kind]) + message.SerializeToString())
        client = self._open()
        try:
            writer, reader = client.do_exchange(command, self._options(timeout_s, session, lease_session))
            with _ended(writer, reader), moving.under_way(reader.cancel):
                yield writer, reader
        except FLIGHT_ERRORS as error:
            if isinstance(error, KVServiceError):
                raise UnavailableError(f"{self.where} sent what cannot be: {error}") from error
            moving.has_answered = moving.has_answered or is_answer(error)
            raise from_flight(error, self.where, self._deadline_s) from error


@contextmanager
def _ended(writer: Any, reader: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        reader.cancel()
        with suppress(*FLIGHT_ERRORS):  # what went wrong is raised already
            writer.close()
        raise
    writer.close()


def _receive(reader: Any, total: int, piece: Piece, moving: Moving) -> None:
    at = moving.at
    while at < total:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            raise InvalidInputError(f"a record ends after {at} of {total} bytes") from None
        moving.moved()
        if chunk.data is None:
            continue
        data = bytes_of(chunk.data)
        end = at + len(data)
        if end > total:
            raise InvalidInputError(f"bytes up to {end} of a record of {total}")
        with moving.touching():
            np.copyto(piece.target[at:end], data)
            moving.first_s = moving.first_s or moving.moved_s
            try:
                piece.on_piece(at, end)
            except BaseException as error:
                raise StoppedError(error) from error
        at = moving.at = end
    with suppress(StopIteration):
        reader.read_chunk()
        raise InvalidInputError(f"more than the {total} bytes of a record")


def _send(writer: Any, view: Bytes, commit: wire.PeerCommit, moving: Moving) -> None:
    """Copies of its bytes: gRPC may hold some when the call is given up, and the arena has others there by then."""
    total = len(view)
    writer.begin(SCHEMA)
    for at in range(0, total, BATCH_BYTES):
        end = min(at + BATCH_BYTES, total)
        with moving.touching():
            batch = batch_of(whole_of(view[at:end].copy().data), 0, end - at)
        if end < total:
            writer.write_batch(batch)
        else:
            writer.write_with_metadata(batch, commit.SerializeToString())
        moving.moved()
    writer.done_writing()


def _answer(reader: Any, moving: Moving, *kinds: Kind) -> Kind:
    """What the node says between batches; one of ``kinds``."""
    try:
        chunk = reader.read_chunk()
    except StopIteration:
        raise InvalidInputError("an exchange ended where an answer should be") from None
    moving.moved()
    said = b"" if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
    found = next((kind for kind in kinds if said[:1] == bytes([kind])), None)
    if found is None:
        raise InvalidInputError(f"{said[:1]!r} where {' or '.join(kind.name for kind in kinds)} should be")
    return found


def _new(identities: Identities, session: ClientSession) -> list[str]:
    return [text for namespace, text in identities.items() if namespace not in session.registered]


def _secured(pem: PemFiles, server_name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"tls_root_certs": pem.ca or _system_authorities()}
    if pem.cert:
        options |= {"cert_chain": pem.cert, "private_key": pem.key}
    return options | ({"override_hostname": server_name} if server_name else {})


def _system_authorities() -> bytes:
    found = ssl.create_default_context().get_ca_certs(binary_form=True)
    return "".join(map(ssl.DER_cert_to_PEM_cert, found)).encode()
