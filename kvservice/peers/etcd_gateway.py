"""etcd v3 by its JSON gateway, over aiohttp: no more of it than membership needs. Knows bytes, not members.

Every call has one deadline, whatever the number of endpoints: one that fails is left for the next at once. Keys, values
and 64-bit numbers are base64 and decimal texts in etcd's JSON. What it answers is bounded and checked.
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import aiohttp

from kvservice.model.errors import KVServiceError, NotOwnedError, UnavailableError
from kvservice.peers.etcd_place import EtcdPlace

DEADLINE_S = 3.0
QUIET_S = 30.0
"""A watch that says nothing for so long may be a dead connection: the keys are listed anew."""
ANSWER_BYTES_MAX = 8 << 20
KEYS_MAX = 1024
# gRPC status codes, which the gateway tells in its JSON
_INVALID, _NOT_FOUND, _DENIED, _NO_AUTH, _OUT_OF_RANGE, _UNAUTHENTICATED = 3, 5, 7, 9, 11, 16
_FINAL = (_INVALID, _NOT_FOUND, _DENIED, _NO_AUTH, _OUT_OF_RANGE, _UNAUTHENTICATED)
"""No other endpoint would say anything else."""

log = logging.getLogger(__name__)


class KeyValue(NamedTuple):
    """A key, and its value at a revision."""

    key: bytes
    value: bytes
    mod_revision: int


class KeyEvent(NamedTuple):
    """A key has a new value, or None: it is gone."""

    key: bytes
    value: bytes | None


class CompactedError(KVServiceError):
    """The revisions that a watch should begin with are forgotten; list anew."""


class _RefusedError(KVServiceError):
    """etcd answered with an error of this gRPC status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class EtcdGateway:
    """One etcd cluster. Lives on the loop of its first call. Raises UnavailableError when nobody answers in time,
    NotOwnedError when the login is refused or may not do this, ConfigError for certificates."""

    def __init__(self, place: EtcdPlace, *, deadline_s: float = DEADLINE_S, quiet_s: float = QUIET_S) -> None:
        self.place = place
        self._deadline_s, self._quiet_s = deadline_s, quiet_s
        self._ssl = place.ssl_context()
        self._session: aiohttp.ClientSession | None = None
        self._first = 0
        self._token = ""

    async def close(self) -> None:
        """Close the connections. Safe to call twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Keys

    async def list_keys(self, prefix: bytes) -> tuple[int, list[KeyValue]]:
        """The revision of now, and all keys with the prefix; at most KEYS_MAX."""
        request = {"key": _text(prefix), "range_end": _text(prefix_end(prefix)), "limit": str(KEYS_MAX)}
        answer = await self.call("kv/range", request)
        return _revision(answer), _key_values(answer)

    async def get(self, keys: Sequence[bytes]) -> list[KeyValue | None]:
        """Some keys, all at one revision."""
        answer = await self.call("kv/txn", {"success": [{"request_range": {"key": _text(key)}} for key in keys]})
        found = [_key_values(one.get("response_range", {})) for one in _items(answer, "responses")]
        return [one[0] if one else None for one in found]

    async def put_if(self, expected: Mapping[bytes, int], values: Mapping[bytes, tuple[bytes, int]]) -> bool:
        """Put all ``values`` (bytes, lease or 0) if every key of ``expected`` is at its revision, 0: not there. Was it?

        An answer that got lost is asked for again, so who put them may hear False; look again then. Whoever gets
        UnavailableError does not know either.
        """
        compare = [
            {"key": _text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in expected.items()
        ]
        puts = [
            {"request_put": {"key": _text(key), "value": _text(value), "lease": str(lease)}}
            for key, (value, lease) in values.items()
        ]
        return bool((await self.call("kv/txn", {"compare": compare, "success": puts})).get("succeeded", False))

    # Leases

    async def grant(self, ttl_s: int) -> int:
        """A new lease."""
        return _number((await self.call("lease/grant", {"TTL": str(ttl_s)})), "ID")

    async def keep_alive(self, lease: int) -> bool:
        """Is the lease there, for another time to live?"""
        answer = await self.call("lease/keepalive", {"ID": str(lease)})
        return _number(_mapping(answer, "result"), "TTL") > 0

    async def revoke(self, lease: int) -> None:
        """End a lease and all its keys. Fine if it is gone."""
        try:
            await self.call("lease/revoke", {"ID": str(lease)})
        except _RefusedError as error:
            if error.status != _NOT_FOUND:
                raise

    # Calls

    async def call(self, path: str, request: Mapping[str, object]) -> dict[str, Any]:
        """One call, by any endpoint that answers, within the deadline."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._call(path, request)
        except TimeoutError as error:
            self._turn()
            raise UnavailableError(f"etcd at {self.place} did not answer within {self._deadline_s:g} s") from error

    async def _call(self, path: str, request: Mapping[str, object]) -> dict[str, Any]:
        if self.place.user and not self._token:
            await self._log_in()
        try:
            return await self._ask_any(path, request)
        except _RefusedError as error:
            if error.status != _UNAUTHENTICATED or not self.place.user:
                raise self._translated(error) from error
        await self._log_in()  # tokens end after some minutes, and with the server
        try:
            return await self._ask_any(path, request)
        except _RefusedError as error:
            raise self._translated(error) from error

    async def _log_in(self) -> None:
        self._token = ""
        login = {"name": self.place.user, "password": self.place.password}
        try:
            self._token = str((await self._ask_any("auth/authenticate", login)).get("token", ""))
        except _RefusedError as error:
            raise NotOwnedError(
                f"etcd at {self.place} refuses user {self.place.user!r}: {error}; see user and password in its URL"
            ) from error

    def _translated(self, error: _RefusedError) -> KVServiceError:
        if error.status in (_DENIED, _UNAUTHENTICATED) or (error.status == _INVALID and "user name" in str(error)):
            who = f"user {self.place.user!r}" if self.place.user else "a client without a user"
            return NotOwnedError(
                f"etcd at {self.place} refuses {who}: {error}; it must read and write below {self.place.prefix}/"
            )
        return error

    async def _ask_any(self, path: str, request: Mapping[str, object]) -> dict[str, Any]:
        reason = ""
        for _ in range(len(self.place.endpoints) + 1):  # one more: a connection kept from before may be dead
            try:
                async with await self._post(path, request) as response:
                    return _checked(response.status, await _read(response))
            except (aiohttp.ClientError, OSError, ValueError) as error:
                reason = f"{self._endpoint()}: {error!r}"
            except _RefusedError as error:
                if error.status in _FINAL:
                    raise
                reason = f"{self._endpoint()}: {error}"  # no leader, stopping, ...: another may do
            self._turn()
        raise UnavailableError(f"etcd at {self.place} cannot be reached: {reason}")

    def _turn(self) -> None:
        self._first = (self._first + 1) % len(self.place.endpoints)

    async def _post(self, path: str, request: Mapping[str, object]) -> aiohttp.ClientResponse:
        if self._session is None:
            # no timeout of aiohttp's own: a watch has no end, and every call has asyncio.timeout around it
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None))
        headers = {"Authorization": self._token} if self._token else {}
        return await self._session.post(
            f"{self.place.scheme}://{self._endpoint()}/v3/{path}",
            data=json.dumps(request),
            headers=headers,
            ssl=self._ssl if self._ssl is not None else True,
            allow_redirects=False,
        )

    def _endpoint(self) -> str:
        return str(self.place.endpoints[self._first])

    # Watching

    async def watch(self, prefix: bytes, revision: int) -> AsyncGenerator[list[KeyEvent]]:
        """What happens to keys with the prefix from ``revision`` on; ends when nothing was heard for ``quiet_s``.

        Raises CompactedError when ``revision`` is forgotten.
        """
        if self.place.user and not self._token:
            await self.list_keys(prefix)
        create = {"key": _text(prefix), "range_end": _text(prefix_end(prefix)), "start_revision": str(revision)}
        try:
            async with asyncio.timeout(self._deadline_s):  # its head comes with the first line, that it was created
                response = await self._post("watch", {"create_request": create})
            async with response:
                if response.status != 200:
                    _checked(response.status, await _read(response))
                async with aclosing(self._lines(response)) as lines:
                    async for line in lines:
                        events = self._events(line)
                        if events:
                            yield events
        except _RefusedError as error:
            if error.status == _UNAUTHENTICATED:
                self._token = ""  # the next try logs in anew
            raise self._translated(error) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._turn()
            raise UnavailableError(f"etcd at {self.place}: the watch broke off: {error!r}") from error

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        rest = b""
        while True:
            try:
                async with asyncio.timeout(self._quiet_s):
                    piece = await response.content.readany()
            except TimeoutError:
                return
            if not piece:
                raise aiohttp.ClientPayloadError("the server ended it")
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > ANSWER_BYTES_MAX:
                raise ValueError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
            for line in filter(None, lines):
                yield line

    def _events(self, line: bytes) -> list[KeyEvent]:
        answer = _mapping(_checked(200, line), "result")
        if answer.get("compact_revision", "0") != "0":
            raise CompactedError(f"etcd forgot what was before revision {answer['compact_revision']}")
        if answer.get("canceled"):
            raise _RefusedError(_UNAUTHENTICATED, str(answer.get("cancel_reason", "the watch was canceled")))
        return [
            KeyEvent(one.key, None if event.get("type") == "DELETE" else one.value)
            for event in _items(answer, "events")
            for one in _key_values({"kvs": [event.get("kv", {})]})
        ]


def prefix_end(prefix: bytes) -> bytes:
    """The first key behind all that begin with ``prefix``, which does not end with 255."""
    assert prefix[-1] < 255, prefix
    return prefix[:-1] + bytes((prefix[-1] + 1,))


async def _read(response: aiohttp.ClientResponse) -> bytes:
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) > ANSWER_BYTES_MAX:
            raise ValueError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
    return bytes(found)


def _checked(http_status: int, data: bytes) -> dict[str, Any]:
    """The JSON of an answer. Raises _RefusedError for an error that etcd tells, ValueError for what is not etcd's."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON (HTTP status {http_status}); does etcd answer there?") from error
    if not isinstance(answer, dict):
        raise ValueError(f"{type(answer).__name__} instead of an object; does etcd answer there?")  # noqa: TRY004
    told = answer.get("error")
    if http_status == 200 and told is None:
        return answer
    in_stream = told if isinstance(told, dict) else {}
    code = in_stream.get("grpc_code", answer.get("code"))
    message = in_stream.get("message", told or answer)
    raise _RefusedError(code if isinstance(code, int) else 0, str(message)[:200])


def _revision(answer: Mapping[str, Any]) -> int:
    return _number(_mapping(answer, "header"), "revision")


def _mapping(answer: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = answer.get(name, {})
    if not isinstance(found, dict):
        raise UnavailableError(f"etcd answered {name} = {type(found).__name__}; does etcd answer there?")
    return found


def _items(answer: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = answer.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UnavailableError(f"etcd answered {name} that is no list of objects; does etcd answer there?")
    return found


def _number(answer: Mapping[str, Any], name: str) -> int:
    """A 64-bit number; those that are 0 are left out by etcd."""
    try:
        return int(answer.get(name, 0))
    except (ValueError, TypeError) as error:
        raise UnavailableError(f"etcd answered {name} that is no number; does etcd answer there?") from error


def _key_values(answer: Mapping[str, Any]) -> list[KeyValue]:
    try:
        return [
            KeyValue(base64.b64decode(one["key"]), base64.b64decode(one.get("value", "")), _number(one, "mod_revision"))
            for one in _items(answer, "kvs")
        ]
    except (KeyError, ValueError, TypeError) as error:
        raise UnavailableError(f"etcd answered keys that cannot be read ({error!r})") from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
