"""A real service behind TLS and an access file, and callers of it."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvservice.access.guard import Guard
from kvservice.app import Service
from kvservice.client.security import Security
from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.config import Settings
from kvservice.model.identity import Identity
from kvservice.node import Node
from tests.access.certificates import Authority, Pair
from tests.access.files import EVERYBODY, TOKENS, write
from tests.server.builders import make_identity

ACME, RIVAL = make_identity(tenant="acme"), make_identity(tenant="rival")


@dataclass(frozen=True, slots=True)
class Guarded:
    """One service. Callers believe ``authority``."""

    service: Service
    authority: Authority
    folder: Path

    @property
    def grpc(self) -> str:
        return f"localhost:{self.service.addresses.grpc_port}"

    @property
    def guard(self) -> Guard:
        return self.service._servers.guard

    @property
    def node(self) -> Node:
        return self.service._servers._node

    def on_loop(self, work: Any) -> Any:
        """Run something on the node's loop."""

        async def run() -> Any:
            return work()

        return self.service._thread.run(run())

    def allow(self, text: str) -> None:
        """Replace the access file and have it read, as the watch would."""
        write(self.folder / "access.toml", text)
        self.on_loop(self.guard.look)

    def security(self, name: str = "acme", **changes: str) -> Security:
        values = {"token": TOKENS.get(name, name), "tls_ca": str(self.authority.cert)} | changes
        return Security(**values)

    def session(self, security: Security | None = None, *identities: Identity, address: str = "") -> Session:
        transport = SharedMemoryTransport(address or self.grpc, self.security() if security is None else security)
        return Session(transport, identities or (ACME,), client_name="test")

    def get(
        self, path: str, *, token: str = "", pair: Pair | None = None, body: bytes | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of an HTTPS answer. Raises OSError when no connection comes about."""
        context = ssl.create_default_context(cafile=str(self.authority.cert))
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        request = urllib.request.Request(f"https://localhost:{self.service.addresses.http_port}{path}", body)
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, context=context, timeout=10) as reply:
                return reply.status, _json(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _json(error.read())


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw


@contextmanager
def guarded(folder: Path, *, access: str = EVERYBODY, own: Pair | None = None, **changes: Any) -> Iterator[Guarded]:
    """A service on loopback that speaks TLS only and asks everybody."""
    authority = Authority(folder / "ca")
    own = own or authority.issue("node")
    values: dict[str, Any] = {
        "socket": str(folder / "kv.sock"),
        "grpc_port": 0,
        "http_port": 0,
        "host_bytes": 8 << 20,
        "worker_threads": 1,
        "tls_cert": str(own.cert),
        "tls_key": str(own.key),
        "access_file": str(write(folder / "access.toml", access)),
    }
    with Service(Settings(**(values | changes))) as service:
        yield Guarded(service, authority, folder)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("node", timeout=10)
        self._path = path

    def connect(self) -> None:
        import socket

        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def ask_admin(path: Path, verb: str, method: str = "POST") -> tuple[int, Any]:
    """What the admin's socket answers."""
    connection = UnixConnection(path)
    try:
        connection.request(method, f"/{verb}")
        reply = connection.getresponse()
        return reply.status, _json(reply.read())
    finally:
        connection.close()
