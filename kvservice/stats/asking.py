"""Asks a node over HTTP or HTTPS, for command lines: whom they believe, what they show, and errors that say what to do.

A token goes to the node that was named and to nobody else: it is refused before anything is sent in the clear beyond
this machine, and no redirection is followed. For what is on this machine no proxy of the environment is asked.
"""

import argparse
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from kvservice import config
from kvservice.config import Settings, process_environment
from kvservice.model.errors import (
    ForbiddenError,
    InvalidInputError,
    KVServiceError,
    UnauthenticatedError,
    UnavailableError,
)
from kvservice.text import printable

HTTP, HTTPS = "http://", "https://"
FILE, ENVIRONMENT = "file:", "env:"
TOKEN_CHARS_MAX = 4096
ANSWER_BYTES_MAX = 64 << 20
_NO_ANSWER = (OSError, HTTPException, ValueError)
"""What asking raises: no connection, no HTTP, no JSON."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Where the node answers, and what it is shown."""
    parser.add_argument(
        "--http",
        default=f"127.0.0.1:{Settings().http_port}",
        metavar="ADDRESS",
        help="HOST:PORT in plaintext, or https://HOST:PORT",
    )
    add_secret_flags(parser)


def add_secret_flags(parser: argparse.ArgumentParser, sources: str = "file:PATH or env:NAME") -> None:
    """What the node is shown, and whom it must be known by. ``sources``: where a token may be read from."""
    parser.add_argument("--ca", default="", metavar="FILE", help="authority of the node's certificate (the system's)")
    parser.add_argument("--token", default="", metavar="SOURCE", help=f"{sources}, where the token is")
    parser.add_argument(
        "--client-cert", default="", metavar="FILE", help="certificate to show, with its key or without"
    )
    parser.add_argument("--client-key", default="", metavar="FILE", help="the key, if it is in a file of its own")


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and addresses of this machine alone, also as they stand in a URL: ``[::1]``."""
    return config.is_loopback(host.strip("[]"))


@dataclass(frozen=True, slots=True)
class HttpNode:
    """A node's HTTP port. ``address``: ``HOST:PORT``, which is plaintext, or a URL without a path.

    ``token``: ``file:PATH`` or ``env:NAME``, read at every question. The rest are files, as in ``Client.connect``.
    Raises InvalidInputError for what cannot be asked, or must not be.
    """

    address: str
    ca: str = ""
    token: str = field(default="", repr=False)
    client_cert: str = ""
    client_key: str = ""

    def __post_init__(self) -> None:
        parts = self._parts
        is_bare = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_bare:
            shown = printable(self.address.rpartition("@")[2])  # before it may stand a password
            raise InvalidInputError(f"--http {shown}: write HOST:PORT or https://HOST:PORT, and no more")
        if self.client_key and not self.client_cert:
            raise InvalidInputError("--client-key without --client-cert; give the certificate that it belongs to")
        if not self.is_tls and (self.ca or self.client_cert):
            raise InvalidInputError(f"--ca and --client-cert are for TLS: ask {HTTPS}{self.name}")
        if self.token and not self.token.startswith((FILE, ENVIRONMENT)):
            raise InvalidInputError(
                "--token is file:PATH or env:NAME: everybody on this host sees a command's arguments"
            )
        if self.token and not self.is_tls and not is_loopback(self.host):
            raise InvalidInputError(
                f"a token for {self.name} without TLS would cross the network in the clear: ask {HTTPS}{self.name}"
            )

    @classmethod
    def of_flags(cls, parsed: argparse.Namespace) -> "HttpNode":
        """From ``add_flags``."""
        return cls(parsed.http, parsed.ca, parsed.token, parsed.client_cert, parsed.client_key)

    @property
    def _parts(self) -> urllib.parse.SplitResult:
        text = self.address if "://" in self.address else f"{HTTP}{self.address}"
        try:
            parts = urllib.parse.urlsplit(text)
            _ = parts.port
        except ValueError as error:
            raise InvalidInputError(f"--http {printable(self.address)}: {error}; write HOST:PORT") from error
        return parts

    @property
    def is_tls(self) -> bool:
        """Is it asked over TLS?"""
        return self._parts.scheme == "https"

    @property
    def host(self) -> str:
        """Its name or address."""
        return self._parts.hostname or ""

    @property
    def name(self) -> str:
        """``HOST:PORT``, for messages."""
        return printable(self._parts.netloc)

    def check(self) -> None:
        """Raise InvalidInputError now for files that could not be used later."""
        self._read_token()
        self._handlers()

    def open(self, path: str, timeout_s: float) -> Any:
        """The reply, a context manager.

        Raises UnavailableError, UnauthenticatedError, ForbiddenError; InvalidInputError for files that cannot be used,
        and for a question that the node refuses.
        """
        url = f"{HTTPS if self.is_tls else HTTP}{self._parts.netloc}{path}"
        request = urllib.request.Request(url)  # noqa: S310  one of these two
        token = self._read_token()
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        opener = urllib.request.build_opener(*self._handlers())
        try:
            return opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except _NO_ANSWER as error:
            raise self.no_answer(error) from error

    def answer(self, path: str, timeout_s: float) -> Any:
        """The JSON that it answers with. Raises as ``open``."""
        reply = self.open(path, timeout_s)
        try:
            with reply:
                return json.loads(reply.read(ANSWER_BYTES_MAX))
        except _NO_ANSWER as error:
            raise self.no_answer(error) from error

    def no_answer(self, error: Exception) -> UnavailableError:
        """What to do about a connection that did not come about, or broke."""
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return UnavailableError(f"the certificate of {self.name} is not trusted: {_untrusted(reason, self.ca)}")
        if isinstance(reason, ssl.SSLError) and "WRONG_VERSION_NUMBER" in str(reason):
            return UnavailableError(f"{self.name} does not speak TLS: ask it without https://")
        if self.is_tls and (isinstance(reason, ssl.SSLError) or _was_connected(reason)):
            hint = "" if self.client_cert else "; if it has tls_client_ca, show a certificate with --client-cert"
            return UnavailableError(f"no TLS with {self.name}: {reason}{hint}")
        if _was_connected(reason):
            return UnavailableError(f"{self.name} speaks no HTTP: {reason}. With tls_cert it is asked as https://")
        return UnavailableError(f"no node answers at {self.name}: {reason}. Is `kvservice serve` running?")

    def _refusal(self, error: urllib.error.HTTPError) -> KVServiceError:
        """A status that is no answer."""
        message = message_of(error)
        if error.code == 401:
            what = f"does not take the token: {message}" if self.token else "asks who calls: give --token file:PATH"
            return UnauthenticatedError(f"{self.name} {what}")
        if error.code == 403:
            return ForbiddenError(f"{self.name}: {message}")
        if error.code == 400:
            return InvalidInputError(message)
        if error.code == 404:
            return UnavailableError(f"{self.name} has nothing at {urllib.parse.urlsplit(error.url).path}: {message}")
        return UnavailableError(f"{self.name}: {message}")

    def _handlers(self) -> list[urllib.request.BaseHandler]:
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if is_loopback(self.host):
            handlers.append(urllib.request.ProxyHandler({}))
        if self.is_tls:
            handlers.append(urllib.request.HTTPSHandler(context=self._context()))
        return handlers

    def _context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca or None)
        except (OSError, ssl.SSLError) as error:
            raise InvalidInputError(f"--ca {self.ca} cannot be used: {_words(error)}; give a PEM file") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.client_cert:
            try:
                context.load_cert_chain(self.client_cert, self.client_key or None, password=_no_password)
            except (OSError, ssl.SSLError) as error:
                raise InvalidInputError(
                    f"--client-cert {self.client_cert} cannot be used: {_words(error)}; give a certificate and its "
                    "key, in one file or in two, without a password"
                ) from error
        return context

    def _read_token(self) -> str:
        """Never part of a message."""
        kind, _, where = self.token.partition(":")
        if kind == "env":
            token = process_environment().get(where, "")
        elif kind == "file":
            try:
                token = Path(where).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidInputError(f"--token {self.token} cannot be read: {_words(error)}") from error
        else:
            return ""
        token = token.strip()
        if not token or len(token) > TOKEN_CHARS_MAX or not (token.isascii() and token.isprintable()):
            raise InvalidInputError(
                f"--token {self.token} holds no token; one is printed by python -m kvservice.access"
            )
        return token


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A node leads nowhere else, and what is shown to it is for it alone."""

    def redirect_request(self, *_: Any) -> None:
        """None: the status is an error."""


def message_of(error: urllib.error.HTTPError) -> str:
    """What a node said with an error status; the status if it said nothing."""
    try:
        with error:
            return printable(str(json.loads(error.read(1 << 16))["message"]))
    except (*_NO_ANSWER, KeyError, TypeError):
        return f"HTTP status {error.code}"


def _untrusted(error: ssl.SSLCertVerificationError, ca: str) -> str:
    words = error.verify_message or str(error)
    if "ismatch" in words:
        return f"{words}; ask by a name that the certificate has"
    return words if ca else f"{words}; name its authority with --ca FILE"


def _was_connected(reason: object) -> bool:
    """Did somebody take the connection, and then not answer as a node does?"""
    return isinstance(reason, (ConnectionError, HTTPException)) and not isinstance(reason, ConnectionRefusedError)


def _words(error: Exception) -> str:
    return str((error.strerror if isinstance(error, OSError) else None) or error)


def _no_password() -> str:
    """OpenSSL would ask the terminal for the password of an encrypted key."""
    return ""
