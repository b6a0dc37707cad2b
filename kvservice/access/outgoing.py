"""What a node's connections to other nodes are made with: whom it believes, and what it shows them."""

import ssl
from dataclasses import replace
from pathlib import Path

from kvservice.access.tls import Certificates, PemFiles, stamp_of
from kvservice.config import Settings
from kvservice.model.errors import ConfigError

_Seen = tuple[PemFiles | None, tuple[int, int, int] | None]


class Outgoing:
    """TLS with a certificate of our own, or with the authority of others (``peer_ca``), or both; else plaintext."""

    def __init__(self, settings: Settings, certificates: Certificates | None) -> None:
        self._certificates = certificates
        self._ca = Path(settings.peer_ca) if settings.peer_ca else None
        self._pem: tuple[_Seen, PemFiles] | None = None
        self._token = Path(settings.peer_token_file) if settings.peer_token_file else None

    def check(self) -> None:
        """Raise ConfigError now for files that could not be used later."""
        self.context()
        self.token()

    def context(self) -> ssl.SSLContext | None:
        """None for plaintext. Raises ConfigError for files that cannot be used."""
        if self._certificates is None:
            return None if self._ca is None else _believing(self._ca)
        context = self._certificates.client_context()
        if self._ca is not None:
            try:
                context.load_verify_locations(self._ca)
            except (OSError, ssl.SSLError) as error:
                raise _refusal(self._ca, error) from error
        return context

    def pem(self) -> PemFiles | None:
        """The same for Arrow Flight, as it is now; any thread asks, before every call. Reads only what has changed."""
        own = None if self._certificates is None else self._certificates.pem_files()
        if self._ca is None:
            return own
        seen = own, stamp_of(self._ca)
        known = self._pem
        if known is None or known[0] != seen:
            ca = _read(self._ca).encode()
            pem = PemFiles(b"", b"", ca) if own is None else replace(own, ca=ca + (own.ca or b""))
            known = self._pem = seen, pem
        return known[1]

    def token(self) -> str:
        """The token that this node shows; empty without one. Read anew each time, so that it can be exchanged."""
        return "" if self._token is None else _read(self._token).strip()


def _believing(ca: Path) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise _refusal(ca, error) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; see settings peer_ca and peer_token_file") from error


def _refusal(ca: Path, error: OSError) -> ConfigError:
    return ConfigError(f"peer_ca {ca} cannot be used: {error.strerror or error}; give a PEM file of an authority")
