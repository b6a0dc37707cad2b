"""What a client shows a node, and whom it believes: a token, the authority of the node's certificate, its own one.

Everything is read when a connection is opened, so that a reconnect takes a renewed token or certificate from its file.
"""

import ipaddress
import ssl
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

    def check(self, address: str) -> None:
        """Raise ConfigError for what can be known to be wrong before ``address`` is called: files that cannot be read
        or hold something else, a key of another certificate, a token that would cross a network in the clear."""
        self.metadata()
        self._require_privacy(address)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.tls_ca:
            _read(self.tls_ca)
            try:
                context.load_verify_locations(self.tls_ca)
            except ssl.SSLError as error:
                raise ConfigError(f"tls_ca {self.tls_ca} holds no certificate in PEM form: {error}") from error
        if self.client_cert:
            _read(self.client_cert)
            _read(self.client_key or self.client_cert)
            try:
                context.load_cert_chain(self.client_cert, self.client_key or None, _no_password)
            except ssl.SSLError as error:
                key = f"the key in {self.client_key}" if self.client_key else "a key in the same file, or client_key"
                raise ConfigError(
                    f"client_cert {self.client_cert} cannot be used: it must be in PEM form, with {key} that belongs "
                    f"to it and has no password: {error}"
                ) from error

    def channel(self, address: str, options: tuple[tuple[str, Any], ...]) -> grpc.Channel:
        """A connection to ``address``. Raises ConfigError for files that cannot be read, and for a token that would
        cross a network in the clear."""
        self._require_privacy(address)
        if self.tls_ca and not address.startswith("unix:"):
            return grpc.secure_channel(address, self._credentials(), options)
        return grpc.insecure_channel(address, options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call. Raises ConfigError for a file of ``token`` that holds none."""
        token = _token_in(self.token.removeprefix(TOKEN_FILE)) if self.token.startswith(TOKEN_FILE) else self.token
        return (("authorization", f"Bearer {token}"),) if token else ()

    def _require_privacy(self, address: str) -> None:
        if self.token and not self.tls_ca and not _is_on_this_machine(address):
            raise ConfigError(f"a token for {address} without tls_ca would cross the network in the clear; give tls_ca")

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


def _token_in(path: str) -> str:
    """The token in a file. What is wrong with it is said without a word of it."""
    raw = _read(path).strip()
    if not raw:
        raise ConfigError(f"the token's file {path} is empty; write the token into it")
    token = raw.decode("ascii", "replace")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"the token's file {path} must hold one line of printable ASCII, the token, and nothing else")
    return token


def _no_password() -> str:
    """Of a key that has one: gRPC cannot be given it, and nobody is to be asked at a terminal."""
    return ""


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
