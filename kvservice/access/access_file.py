"""The access file: principals, what proves them, their tenants and limits, and quotas. Reads text, decides nothing.

    [local]                              # who comes over the unix socket; left out: an admin for all tenants
    role = "admin"
    tenants = ["*"]

    [[principal]]
    name = "engine-a"
    role = "engine"                      # engine, node, viewer or admin
    tenants = ["acme"]                   # "*": all
    tokens = [{ blake3 = "<64 hex>", expires = 2027-01-01T00:00:00Z }, { sha256 = "<64 hex>" }]
    certificates = ["engine-a.example"]  # names in client certificates, see setting tls_client_ca
    calls_per_s = 2000
    bytes_per_s = "64MiB"
    sessions_max = 16

    [tenant.acme]                        # quotas; [any_tenant]: of every tenant that has no section
    host_bytes = "4GiB"
    ssd_bytes = "100GiB"
    remote_bytes = "1TiB"

It holds digests of tokens, never a token: who reads it can prove nothing with it.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path

from kvservice.access.principal import INTERNAL, LOCAL, CallLimits, Principal, Role
from kvservice.access.quotas import NO_QUOTA, Quota, QuotaTable
from kvservice.config import parse_bytes
from kvservice.model.errors import ConfigError

FILE_BYTES_MAX = 4 << 20
PRINCIPALS_MAX = 1024
TOKENS_MAX = 16
"""Of one principal: the old and the new one while they are exchanged, and some more."""
ALL_TENANTS = "*"
HASHES = ("blake3", "sha256")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SECTIONS = ("local", "principal", "tenant", "any_tenant")
_PRINCIPAL_KEYS = ("name", "role", "tenants", "tokens", "certificates", "calls_per_s", "bytes_per_s", "sessions_max")


@dataclass(frozen=True, slots=True)
class TokenProof:
    """A token that proves ``principal``, by its digest; ``hash``: blake3 or sha256."""

    hash: str
    digest: bytes
    principal: Principal


@dataclass(frozen=True, slots=True)
class AccessTable:
    """All of an access file. ``certificates``: principals by a name in their certificate."""

    local: Principal = LOCAL
    tokens: tuple[TokenProof, ...] = ()
    certificates: Mapping[str, Principal] = field(default_factory=dict)
    quotas: QuotaTable = field(default_factory=QuotaTable)


def read_access_file(path: Path) -> AccessTable:
    """The table of a file. Raises ConfigError that names the file and what is wrong in it."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the access file {path}: {error.strerror or error}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"access file {path}: {len(raw)} bytes, the limit is {FILE_BYTES_MAX}")
    try:
        return parse_access(tomllib.loads(raw.decode()))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"access file {path} is no TOML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"access file {path}: {error}") from error


def parse_access(raw: Mapping[str, object]) -> AccessTable:
    """The table of a parsed file. Raises ConfigError."""
    _check_keys(raw, _SECTIONS, "it")
    principals = raw.get("principal", [])
    _require(isinstance(principals, list), "principal", "tables: write [[principal]]")
    assert isinstance(principals, list)
    _require(len(principals) <= PRINCIPALS_MAX, "principal", f"at most {PRINCIPALS_MAX} tables")
    tokens, certificates, names = list[TokenProof](), dict[str, Principal](), set[str]()
    for one in principals:
        principal, section = _principal(one)
        where = f"principal {principal.name}"
        _require(principal.name not in {*names, LOCAL.name, INTERNAL.name}, where, "a name that is not taken")
        names.add(principal.name)
        tokens += _tokens(section, principal, where)
        for name in _texts(section, "certificates", where):
            _require(name not in certificates, where, f"alone in having the certificate name {name}")
            certificates[name] = Principal(
                principal.name, principal.role, principal.tenants, principal.limits, f"certificate {name}"
            )
    _require_distinct(tokens)
    quotas = QuotaTable(_tenants(raw.get("tenant", {})), _quota(raw.get("any_tenant", {}), "any_tenant"))
    return AccessTable(_local(raw.get("local", {})), tuple(tokens), certificates, quotas)


def _principal(raw: object) -> tuple[Principal, Mapping[str, object]]:
    section = _table(raw, "principal")
    name = section.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"a principal's name is 1 to 64 letters, digits, . _ @ and -, not {name!r}")
    where = f"principal {name}"
    _check_keys(section, _PRINCIPAL_KEYS, where)
    _require("tenants" in section or section.get("role") == Role.VIEWER, where, "given tenants")
    _require("tokens" in section or "certificates" in section, where, "given tokens or certificates")
    limits = CallLimits(
        _number(section, "calls_per_s", where), _size(section, "bytes_per_s", where) or 0,
        int(_number(section, "sessions_max", where)),
    )  # fmt: skip
    return Principal(name, _role(section, where), _tenant_names(section, where), limits), section


def _local(raw: object) -> Principal:
    section = _table(raw, "local")
    _check_keys(section, ("role", "tenants"), "local")
    if not section:
        return LOCAL
    tenants = _tenant_names(section, "local") if "tenants" in section else None
    return Principal(LOCAL.name, _role({"role": LOCAL.role, **section}, "local"), tenants)


def _role(section: Mapping[str, object], where: str) -> Role:
    role = section.get("role")
    if role not in list(Role):
        raise ConfigError(f"{where}: its role is one of {', '.join(Role)}, not {role!r}")
    return Role(str(role))


def _tenant_names(section: Mapping[str, object], where: str) -> frozenset[str] | None:
    names = _texts(section, "tenants", where)
    _require(ALL_TENANTS not in names or len(names) == 1, where, 'given tenants by name, or ["*"] alone')
    return None if ALL_TENANTS in names else frozenset(names)


def _tokens(section: Mapping[str, object], principal: Principal, where: str) -> list[TokenProof]:
    raw = section.get("tokens", [])
    is_list = isinstance(raw, list) and len(raw) <= TOKENS_MAX
    _require(is_list, where, f"given tokens as a list of at most {TOKENS_MAX} tables")
    assert isinstance(raw, list)
    return [_token(one, principal, where) for one in raw]


def _token(raw: object, principal: Principal, where: str) -> TokenProof:
    table = _table(raw, f"{where}: a token")
    _check_keys(table, (*HASHES, "expires"), f"{where}: a token")
    given = [name for name in HASHES if name in table]
    _require(len(given) == 1, f"{where}: a token", f"given by one digest, {' or '.join(HASHES)}")
    digest = table[given[0]]
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: a token's {given[0]} is 64 small hexadecimal digits; never write the token itself")
    proof = f"{given[0]} {digest[:12]}"
    expires_s = _expiry(table.get("expires"), where)
    named = Principal(principal.name, principal.role, principal.tenants, principal.limits, proof, expires_s)
    return TokenProof(given[0], bytes.fromhex(digest), named)


def _expiry(raw: object, where: str) -> float:
    if raw is None:
        return math.inf
    if not isinstance(raw, datetime) or raw.tzinfo is None:
        raise ConfigError(f"{where}: expires is a time with its zone, such as 2027-01-01T00:00:00Z, not {raw!s}")
    return raw.timestamp()


def _require_distinct(tokens: Sequence[TokenProof]) -> None:
    seen = dict[bytes, str]()
    for one in tokens:
        other = seen.setdefault(one.digest, one.principal.name)
        _require(other == one.principal.name, f"principal {one.principal.name}", f"given another token than {other}")


def _tenants(raw: object) -> dict[str, Quota]:
    return {name: _quota(one, f"tenant {name}") for name, one in _table(raw, "tenant").items()}


def _quota(raw: object, where: str) -> Quota:
    section = _table(raw, where)
    names = [spec.name for spec in fields(Quota)]
    _check_keys(section, names, where)
    sizes = {name: _size(section, name, where) for name in names}
    return Quota(**sizes) if section else NO_QUOTA


# Values


def _table(raw: object, where: str) -> Mapping[str, object]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must be a table")
    return raw


def _texts(section: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
    raw = section.get(key, [])
    if not isinstance(raw, list) or not all(isinstance(one, str) and one for one in raw):
        raise ConfigError(f"{where}: {key} must be a list of texts")
    return tuple(raw)


def _number(section: Mapping[str, object], key: str, where: str) -> float:
    raw = section.get(key, 0)
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 <= raw < math.inf:
        raise ConfigError(f"{where}: {key} must be a number, 0 for no limit, not {raw!r}")
    return float(raw)


def _size(section: Mapping[str, object], key: str, where: str) -> int | None:
    raw = section.get(key)
    if raw is None:
        return None
    if isinstance(raw, str):
        try:
            return parse_bytes(raw)
        except ConfigError as error:
            raise ConfigError(f"{where}: {key}: {error}") from error
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 0:
        raise ConfigError(f'{where}: {key} must be a size such as "4GiB", not {raw!r}')
    return raw


def _check_keys(section: Mapping[str, object], known: Iterable[str], where: str) -> None:
    unknown = sorted(section.keys() - set(known))
    if unknown:
        raise ConfigError(f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(known)}")


def _require(holds: bool, where: str, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{where} must be {rule}")
