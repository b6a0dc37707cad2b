"""Where etcd is and how to be let in: one URL. Data only.

    http[s]://[USER:PASSWORD@]HOST:PORT[,HOST:PORT]*[/PREFIX][?ca=FILE&cert=FILE&key=FILE]

``ca``: certificates that vouch for the server, instead of the system's. ``cert`` and ``key``: this client's own.
A password needs https, except on loopback. Percent-encode what is no letter or digit in user and password.
"""

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvservice.model.errors import ConfigError
from kvservice.peers.member import Address

PREFIX = "/kvservice"
ENDPOINTS_MAX = 16
_OPTIONS = ("ca", "cert", "key")


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """The endpoints of one etcd cluster, and the prefix of all our keys, without a slash at its end."""

    scheme: str
    endpoints: tuple[Address, ...]
    prefix: str = PREFIX
    user: str = ""
    password: str = field(default="", repr=False)
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{','.join(map(str, self.endpoints))}{self.prefix}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """What TLS connections are made with, None for http. Raises ConfigError for files that cannot be used."""
        if self.scheme == "http":
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"etcd's certificates (ca, cert, key of {self}) cannot be used: {error}") from error
        return context


def parse_etcd_url(text: str) -> EtcdPlace:
    """The place that a URL names. Raises ConfigError; the message never holds a password."""
    shown = _without_password(text)
    try:
        url = urlsplit(text.strip())
    except ValueError as error:
        raise ConfigError(f"the etcd URL {shown!r} cannot be read: {error}") from None
    if url.scheme not in ("http", "https"):
        raise ConfigError(f"the etcd URL {shown!r} must begin with https:// or, on loopback, http://")
    login, _, hosts = url.netloc.rpartition("@")
    endpoints = tuple(Address.parse(part) for part in hosts.split(",") if part)
    if not 0 < len(endpoints) <= ENDPOINTS_MAX:
        raise ConfigError(f"the etcd URL {shown!r} names {len(endpoints)} endpoints; name 1 to {ENDPOINTS_MAX}")
    user, _, password = login.partition(":")
    options = _options(url.query, shown)
    if (url.scheme == "http") and (options or (user and not all(_is_loopback(one.host) for one in endpoints))):
        raise ConfigError(f"the etcd URL {shown!r} has a login or certificates, which need https")
    prefix = url.path.rstrip("/") or PREFIX
    return EtcdPlace(url.scheme, endpoints, prefix, unquote(user), unquote(password), **options)


def _options(query: str, shown: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, strict_parsing=True) if query else []
    except ValueError as error:
        raise ConfigError(f"the etcd URL {shown!r} has options that cannot be read: {error}") from None
    unknown = sorted({name for name, _ in pairs} - set(_OPTIONS))
    if unknown:
        raise ConfigError(f"the etcd URL {shown!r} has unknown options {', '.join(unknown)}; known: ca, cert, key")
    options = dict(pairs)
    if "key" in options and "cert" not in options:
        raise ConfigError(f"the etcd URL {shown!r} has a key without a cert")
    missing = [path for path in options.values() if not Path(path).is_file()]
    if missing:
        raise ConfigError(f"the etcd URL {shown!r} names files that are not there: {', '.join(missing)}")
    return options


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_password(text: str) -> str:
    login, at, rest = text.rpartition("@")
    return f"{login.partition('://')[0]}://...@{rest}" if at else text
