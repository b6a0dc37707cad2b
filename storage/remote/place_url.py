"""The address of a remote place: a URL whose options are checked by name, and whose messages never show a password."""

import difflib
import ipaddress
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from kvservice.model.errors import ConfigError

URL_CHARACTERS_MAX = 4096
_TRUE, _FALSE = {"1", "yes", "true"}, {"0", "no", "false", ""}
PLAINTEXT = "insecure_plaintext"
"""Option of every engine: allows a connection without TLS to another host, where anybody on the way may read it."""


@dataclass(frozen=True, slots=True)
class PlaceUrl:
    """``scheme://host:port/path?options``. ``options`` holds what ``options_of`` has checked."""

    text: str = field(repr=False)
    scheme: str
    host: str
    port: int | None
    path: str
    user: str
    password: str = field(repr=False)
    options: dict[str, str]

    def __str__(self) -> str:
        """The place without credentials and options."""
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.path}"

    def check_options(self, known: tuple[str, ...]) -> None:
        """Raise ConfigError for an option that is not ``known``, naming the nearest."""
        for name in self.options:
            if name not in known:
                raise ConfigError(f"{self}: unknown option {name!r}{nearest(name, known)}")

    def text_option(self, name: str, default: str = "") -> str:
        """An option's text."""
        return self.options.get(name, default)

    def flag(self, name: str) -> bool:
        """A yes or no. Raises ConfigError for another word."""
        said = self.options.get(name, "").lower()
        if said not in _TRUE | _FALSE:
            raise ConfigError(f"{self}: {name}={said!r} is neither yes nor no")
        return said in _TRUE

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """A whole number in [least, most]. Raises ConfigError for anything else."""
        said = self.options.get(name)
        if said is None:
            return default
        if not (said.isascii() and said.isdigit() and least <= int(said) <= most):
            raise ConfigError(f"{self}: {name}={said!r} is no whole number of {least} to {most}")
        return int(said)

    def require_private(self, host: str, is_encrypted: bool, remedy: str) -> None:
        """Raise ConfigError if bytes would cross a network without TLS and nobody said that this is wanted."""
        if not is_encrypted and not is_loopback(host) and not self.flag(PLAINTEXT):
            raise ConfigError(
                f"{self}: records would go to {host} without encryption; {remedy}, or add {PLAINTEXT}=yes "
                "where everybody on that network may read and change them"
            )


def parse_place_url(text: str) -> PlaceUrl:
    """Take a URL apart. Raises ConfigError for one that is none; the message does not repeat a password."""
    if len(text) > URL_CHARACTERS_MAX:
        raise ConfigError(f"a URL of {len(text)} characters, the limit is {URL_CHARACTERS_MAX}")
    try:
        parts = urlsplit(text)
        port = parts.port
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise ConfigError(f"the URL of the cold storage cannot be read: {error}") from error
    if not parts.scheme or parts.fragment:
        raise ConfigError("the URL of the cold storage is written scheme://place/prefix?option=value")
    options = dict(pairs)
    if len(options) != len(pairs):
        raise ConfigError(f"{parts.scheme}: an option is given twice in the URL")
    return PlaceUrl(
        text=text,
        scheme=parts.scheme.lower(),
        host=parts.hostname or "",
        port=port,
        path=parts.path.rstrip("/"),
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        options=options,
    )


def nearest(name: str, known: tuple[str, ...]) -> str:
    """The end of a message about a name that is not known."""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def is_loopback(host: str) -> bool:
    """Does this host name mean this host?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
