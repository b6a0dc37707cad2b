"""The Flight port's edge to pyarrow: calls in, answers out; what they mean is flight_server.py's. Needs pyarrow.

A record leaves as batches over the arena itself. gRPC may read them after a call has ended, and even after its caller
is gone: so the record is let go of when the last of them is, and not before.
"""

import ipaddress
import logging
import weakref
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from pyarrow import flight

from kvservice.access.authorization import token_of
from kvservice.access.principal import Credentials
from kvservice.access.tls import PemFiles
from kvservice.model.errors import ConfigError, InvalidInputError, KVServiceError, LimitError
from kvservice.peers.flight_batches import FLIGHT_ERRORS, SCHEMA, batch_of, bytes_of, to_flight, whole_of
from kvservice.peers.flight_server import FlightCaller, FlightServer
from kvservice.peers.flight_words import AUTHORIZATION, BATCH_BYTES, LEASE, PREFIX, SESSION
from kvservice.peers.frames import MESSAGE_BYTES_MAX, Kind, parse_message
from kvservice.peers.host import Held
from kvservice.wire.v1 import peer_pb2 as wire

HEADERS = "kvservice-headers"
HEADER_CHARS_MAX = 8192

log = logging.getLogger(__name__)


def open_endpoint(
    service: FlightServer, address: tuple[str, int], tls: PemFiles | None
) -> tuple[int, Callable[[], None]]:
    """Serve; the port, and what closes it: it takes no more calls at once, and returns when the last one has ended.

    Raises ConfigError.
    """
    host, port = address
    secured: dict[str, Any] = {}
    if tls is not None:
        secured["tls_certificates"] = [flight.CertKeyPair(tls.cert, tls.key)]
        secured |= {} if tls.ca is None else {"verify_client": True, "root_certificates": tls.ca}
    location = f"{'grpc' if tls is None else 'grpc+tls'}://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        endpoint = _Endpoint(location, service, **secured)
    except FLIGHT_ERRORS as error:
        raise ConfigError(f"cannot listen for Arrow Flight at {host}:{port}: {error}; set another port") from error
    return int(endpoint.port), endpoint.shutdown


class _Headers(flight.ServerMiddleware):  # type: ignore[misc]
    """A call's headers."""

    def __init__(self, headers: dict[str, list[str | bytes]]) -> None:
        super().__init__()
        self._headers = headers

    def text(self, name: str) -> str:
        values = self._headers.get(name, [""])
        return values[0][:HEADER_CHARS_MAX] if isinstance(values[0], str) else ""

    def digits(self, name: str) -> bytes:
        try:
            return bytes.fromhex(self.text(name))
        except ValueError:
            return b""


class _HeadersFactory(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Keeps them for the call."""

    def start_call(self, _: Any, headers: dict[str, list[str | bytes]]) -> _Headers:
        return _Headers(headers)


class _Endpoint(flight.FlightServerBase):  # type: ignore[misc]
    """See the module. Methods of Flight that are not here are answered as not implemented."""

    def __init__(self, location: str, service: FlightServer, **secured: Any) -> None:
        self._service = service
        super().__init__(location, middleware={HEADERS: _HeadersFactory()}, **secured)

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """A question."""
        try:
            return [self._act(action, _caller(context))]
        except KVServiceError as error:
            raise to_flight(error) from error
        except Exception:
            log.exception("Flight port: a question failed; this is a fault of the service, please report it")
            raise

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """A record, from here or to here."""
        caller = _caller(context)
        try:
            self._exchange(descriptor.command or b"", caller, reader, writer)
        except KVServiceError as error:
            raise to_flight(error) from error
        except FLIGHT_ERRORS as error:
            log.info("Flight port: a record with %s broke off: %s", caller.where, error)
            raise
        except Exception:
            log.exception("Flight port: a record failed; this is a fault of the service, please report it")
            raise

    def _act(self, action: Any, caller: FlightCaller) -> bytes:
        body = b"" if action.body is None else action.body
        if len(body) > MESSAGE_BYTES_MAX:
            raise LimitError(f"a question of {len(body)} bytes, the limit is {MESSAGE_BYTES_MAX}; split it")
        verb = action.type.removeprefix(PREFIX) if action.type.startswith(PREFIX) else ""
        return self._service.act(verb, bytes(body), caller)

    def _exchange(self, command: bytes, caller: FlightCaller, reader: Any, writer: Any) -> None:
        if len(command) > MESSAGE_BYTES_MAX:
            raise LimitError(f"a request of {len(command)} bytes, the limit is {MESSAGE_BYTES_MAX}")
        kind = command[0] if command else 0
        if kind == Kind.FETCH:
            self._fetch(command[1:], caller, writer)
        elif kind == Kind.STORE:
            self._store(command[1:], caller, reader, writer)
        else:
            raise InvalidInputError("an exchange that begins with neither fetch nor store")

    def _fetch(self, body: bytes, caller: FlightCaller, writer: Any) -> None:
        with self._service.sending(body, caller) as (held, start):
            whole, total, at = _lent(held), held.record_bytes, start
            writer.begin(SCHEMA)
            while at < total:
                arrived = held.wait(at)
                while at < arrived:
                    self._service.check_running()
                    end = min(at + BATCH_BYTES, arrived)
                    writer.write_batch(batch_of(whole, at, end))
                    self._service.count(sent_bytes=end - at)
                    at = end
        self._service.count(sent=1)

    def _store(self, body: bytes, caller: FlightCaller, reader: Any, writer: Any) -> None:
        with self._service.taking(body, caller) as intake:
            if intake is None:
                writer.write_metadata(bytes([Kind.EXISTS]))
                return
            writer.write_metadata(bytes([Kind.GO]))
            commit: wire.PeerCommit | None = None
            while commit is None:
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    raise InvalidInputError(f"a record ends after {intake.at} of {intake.bytes} bytes") from None
                self._service.check_running()
                if chunk.data is not None:
                    intake.fill(bytes_of(chunk.data))
                if chunk.app_metadata is not None:
                    commit = wire.PeerCommit()
                    parse_message(chunk.app_metadata.to_pybytes(), commit)
            generation = intake.commit(commit.header_checksum)
            self._service.count(taken=1, taken_bytes=intake.bytes)
            writer.write_metadata(bytes([Kind.STORED]) + wire.PeerStored(generation=generation).SerializeToString())


def _lent(held: Held) -> Any:
    """The record as a buffer; it is released when nobody has any part of it any more."""
    own = memoryview(held.source.view)
    weakref.finalize(own, held.release).atexit = False
    return whole_of(own)


def _caller(context: Any) -> FlightCaller:
    headers: _Headers = context.get_middleware(HEADERS)
    identity = context.peer_identity()
    names = (identity.decode(errors="replace"),) if identity else ()
    where = unquote(context.peer())
    shown = Credentials(token_of(headers.text(AUTHORIZATION)), names, _is_local(where))
    return FlightCaller(shown, where, headers.digits(SESSION), headers.digits(LEASE))


def _is_local(where: str) -> bool:
    """``ipv4:127.0.0.1:5000``, ``ipv6:[::1]:5000``: of this machine?"""
    host = where.partition(":")[2].rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
