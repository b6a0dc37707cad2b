"""Reading a user's options into a dataclass: whatever is wrong is fatal at start, and named, with the nearest name.

An option that is silently not there costs an afternoon. Imports no engine and no torch.
"""

from collections.abc import Mapping
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Any

from kvservice.model.errors import ConfigError

_TYPE_WORDS: dict[object, str] = {
    str: "a text in quotes",
    int: "a whole number without quotes",
    float: "a number without quotes",
    bool: "true or false without quotes",
}
_MAPPING_WORDS = 'an object of texts, such as {"my-adapter": "3f2a"}'


def why(text: str) -> dict[str, str]:
    """Metadata of an option's field: what it is for."""
    return {"why": text}


def may_be_none(text: str) -> dict[str, Any]:
    """Metadata of a number that may be 0: none of it."""
    return {"why": text, "least": 0}


def secret(text: str) -> dict[str, Any]:
    """Metadata of an option whose value is never repeated, whatever is wrong with it."""
    return {"why": text, "is_secret": True}


def read_options(kind: type, given: Mapping[str, object], where: str) -> dict[str, Any]:
    """The given values for the fields of dataclass ``kind``, whole numbers made floats where it says so.

    ``where``: the setting that holds the options, for messages. Raises ConfigError for an unknown name, a wrong type,
    or a number that is not above 0 and finite.
    """
    known = {spec.name: spec for spec in fields(kind)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{where}: {_unknown(name, list(known))}")
        _check_type(where, known[name], value)
    return {name: float(value) if known[name].type is float else value for name, value in given.items()}  # type: ignore[arg-type]


def check_address(address: str, where: str) -> None:
    """Raise ConfigError unless ``address`` can be a service's."""
    if not address:
        raise ConfigError(
            f'{where}: "address" is missing; give the service\'s address, such as '
            '"unix:/run/user/1000/kvservice.sock" (`kvservice serve` prints it)'
        )
    host, _, port = address.rpartition(":")
    if not address.startswith("unix:/") and not (host and port.isdecimal()):
        raise ConfigError(f'{where}: address {address!r} is neither "unix:/path" nor "127.0.0.1:port"')


def check_tenant(tenant: str, where: str) -> None:
    """Raise ConfigError unless ``tenant`` names one."""
    if not tenant:
        raise ConfigError(f'{where}: tenant must not be empty; leave it out for "default"')


def _check_type(where: str, spec: Field[Any], value: object) -> None:
    name, kind = spec.name, spec.type
    if kind not in _TYPE_WORDS:
        is_right = isinstance(value, Mapping) and all(type(one) is str and one for one in value.values())
    else:
        is_right = type(value) is kind or (kind is float and type(value) is int)
    if not is_right:
        given = f"it is {type(value).__name__}" if "is_secret" in spec.metadata else f"it is {value!r}"
        raise ConfigError(f"{where}: {name} must be {_TYPE_WORDS.get(kind, _MAPPING_WORDS)}, {given}")
    if isinstance(value, int | float) and kind in (int, float):
        is_least = value == spec.metadata.get("least")
        if not (0 < value < float("inf") or is_least):
            least = "0 or more" if "least" in spec.metadata else "above 0 and finite"
            raise ConfigError(f"{where}: {name} must be {least}, it is {value}")


def _unknown(name: str, known: list[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown option {name!r}; {hint}Known are {', '.join(known)}"
