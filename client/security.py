"""What a client shows a node, and whom it believes: a token, the authority of the node's certificate, its own one.

Everything is read when a connection is opened, so that a reconnect takes a renewed token or certificate from its file.
"""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvservice.model.errors import ConfigError

TOKEN_FILE = "file:"  # noqa: S105  a prefix, no secret


@dataclass(frozen=True, slots=True)
class Security:
    """``token``: sent with every call; ``file:PATH`` is read from a file. ``tls_ca``: PEM file of the authority that
    the node's certificate is of; empty: no TLS. ``client_cert``: PEM file of the client's own certificate and key.
    ``client_key``: of the key, if it is in a file of its own.
    """

    token: str = field(default="", repr=False)
    tls_ca: str = ""
    client_cert: str = ""
    client_key: str = ""

    def __post_init__(self) -> None:
        if self.client_cert and not self.tls_ca:
            raise ConfigError("client_cert is shown over TLS only: give tls_ca too, the node's authority")
        if self.client_key and not self.client_cert:
            raise ConfigError("client_key without client_cert; give the certificate that it belongs to")

    def channel(self, address: str, options: tuple[tuple[str, Any], ...]) -> grpc.Channel:
        """A connection to ``address``. Raises ConfigError for files that cannot be read, and for a token that would
        cross a network in the clear."""
        if self.tls_ca and not address.startswith("unix:"):
            return grpc.secure_channel(address, self._credentials(), options)
        if self.token and not _is_on_this_machine(address):
            raise ConfigError(f"a token for {address} without tls_ca would cross the network in the clear; give tls_ca")
        return grpc.insecure_channel(address, options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        token = self.token
        if token.startswith(TOKEN_FILE):
            token = _read(token.removeprefix(TOKEN_FILE)).decode().strip()
        return (("authorization", f"Bearer {token}"),) if token else ()

    def _credentials(self) -> grpc.ChannelCredentials:
        cert = _read(self.client_cert) if self.client_cert else None
        key = _read(self.client_key or self.client_cert) if self.client_cert else None
        return grpc.ssl_channel_credentials(_read(self.tls_ca), key, cert)


NO_SECURITY = Security()


def _is_on_this_machine(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return address.startswith("unix:") or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
