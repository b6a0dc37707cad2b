"""Every setting of the service, and the only reader of flags, TOML and environment.

Order of precedence: command line, environment (``KVSERVICE_<NAME>``), file, default. An unknown key stops the boot.
"""

import argparse
import dataclasses
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvservice.model.errors import ConfigError

ENVIRONMENT_PREFIX = "KVSERVICE_"
MIB, GIB = 1 << 20, 1 << 30
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}
_PORT_MAX = 65535
_SHOWN_CHARS_MAX = 40
SIZE_BYTES_LIMIT = 1 << 63
"""Offsets into files are signed 64-bit numbers."""
PAGE_BYTES = 4096
_SHARED = re.compile(r"(dns:|flight://)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}|srv:[A-Za-z0-9._-]+")
_NAME = re.compile(r"[A-Za-z0-9._-]{0,64}")


def _why(text: str) -> dict[str, str]:
    return {"why": text}


def _runtime_folder() -> Path:
    """A folder only this user can enter: the session's own if there is one."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/kvservice-{os.getuid()}")  # noqa: S108  mode 0700 below


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one node. Sizes are bytes, times are seconds."""

    socket: str = field(
        default="",
        metadata=_why("unix socket of the control plane; empty: kvservice.sock in the user's runtime folder"),
    )
    host: str = field(
        default="127.0.0.1",
        metadata=_why("address of gRPC and HTTP; another than loopback needs tls_cert, tls_key and access_file"),
    )
    grpc_port: int = field(
        default=50151, metadata=_why("TCP port of the control plane; 0 takes any free one, -1 opens none")
    )
    http_port: int = field(
        default=50152,
        metadata=_why("TCP port of the page, /metrics, /stats, /plan and others; 0 takes any free one, -1 opens none"),
    )
    tls_cert: str = field(
        default="", metadata=_why("PEM file of the certificate of gRPC, HTTP and peer ports; empty: they are plaintext")
    )
    tls_key: str = field(default="", metadata=_why("PEM file of its private key, readable by this user only"))
    tls_client_ca: str = field(
        default="",
        metadata=_why("PEM file of the authority that callers' certificates are of; set: callers must have one"),
    )
    access_file: str = field(
        default="",
        metadata=_why("TOML file of who may call, for which tenants, and of tenants' quotas; read again when changed"),
    )
    insecure_plaintext: bool = field(
        default=False,
        metadata=_why(
            "listen beyond loopback without TLS: everyone on the way reads and changes tokens, prompts' digests and "
            "cached bytes, and without access_file everyone who reaches the port may read and delete all"
        ),
    )
    node_name: str = field(
        default="", metadata=_why("what this node is called in messages and metrics; empty: the host's name")
    )
    state_folder: str = field(
        default="",
        metadata=_why("folder of the node's uuid, one node a folder; empty: ssd_folder, or made anew at every start"),
    )
    peer_port: int = field(
        default=-1, metadata=_why("TCP port on which other nodes fetch and store records; 0 takes any, -1 opens none")
    )
    flight_port: int = field(
        default=-1,
        metadata=_why(
            "TCP port of the same over Arrow Flight, where only gRPC gets through; 0 takes any, -1 opens none"
        ),
    )
    peer_host: str = field(
        default="",
        metadata=_why(
            "address of the peer and Flight ports, and what others are told to call; empty: that of setting host"
        ),
    )
    peer_token_file: str = field(
        default="", metadata=_why("file with the token that this node shows other nodes; empty: it shows none")
    )
    peer_ca: str = field(
        default="",
        metadata=_why("PEM file of the authority of other nodes' certificates; set, or with tls_cert: TLS to them"),
    )
    shared: str = field(
        default="",
        metadata=_why(
            "shared nodes, asked for what is not here: host:port,..., flight://host:port, dns:name:port or srv:name"
        ),
    )
    etcd: str = field(
        default="",
        metadata=_why("URL of the etcd that keeps the members, instead of shared; a node with a peer port registers"),
    )
    member_grace_s: float = field(
        default=60.0, metadata=_why("how long a shared node that is away keeps its segments before others own them")
    )
    member_warm_s: float = field(
        default=120.0, metadata=_why("over how long a shared node that comes empty takes its share of the segments")
    )
    replicas: int = field(default=1, metadata=_why("shared nodes that keep a copy of each cache: its owners"))
    push: str = field(
        default="back",
        metadata=_why("what is stored goes to its owner: back (soon after), through (before a commit returns) or off"),
    )
    peer_deadline_s: float = field(
        default=1.0, metadata=_why("how long a shared node may take to answer before what it has counts as missing")
    )
    shares_memory: bool = field(
        default=True,
        metadata=_why("nodes of this host and user read each other's memory; false: it lends none and reads none"),
    )
    is_load_gated: bool = field(
        default=True,
        metadata=_why("leave where it is what an engine computes sooner, by measured speeds, than it would come"),
    )
    cold: str = field(
        default="",
        metadata=_why("URL of cold storage behind all nodes: s3://, file://, redis://, mooncake://; empty: none"),
    )
    cold_deadline_s: float = field(
        default=3.0, metadata=_why("how long cold storage may take to answer before what it has counts as missing")
    )
    host_bytes: int = field(default=GIB, metadata=_why("size of the host arena, taken from shared memory at boot"))
    is_prefaulted: bool = field(
        default=False, metadata=_why("touch every page of the arena at boot, so that the first writes do not pay")
    )
    eviction: str = field(
        default="value",
        metadata=_why("which caches go first: value (seconds saved x uses / bytes, suffixes first) or lru (oldest)"),
    )
    staging_bytes: int = field(
        default=0,
        metadata=_why("part of the arena that only loads use; 0: an eighth of it with an SSD or another place"),
    )
    ssd_folder: str = field(default="", metadata=_why("folder of the SSD tier, one service a folder; empty: no tier"))
    ssd_bytes: int = field(
        default=16 * GIB, metadata=_why("size of the slab, taken from the file system at the first start; may grow")
    )
    ssd_free_floor_bytes: int = field(
        default=GIB, metadata=_why("below this much room on the file system nothing more is written to SSD")
    )
    ssd_write: str = field(
        default="through",
        metadata=_why("through: every cache soon after its commit; back: before it is evicted from memory"),
    )
    ssd_write_budget_bytes: int = field(
        default=0,
        metadata=_why("bytes written a day at most, and then only of caches that were found once; 0: no limit"),
    )
    is_ssd_durable: bool = field(
        default=False, metadata=_why("sync data before its index entry, so that a power failure loses neither")
    )
    ssd_threads: int = field(default=2, metadata=_why("threads that read from SSD, and as many that write"))
    scrub_bytes_per_s: int = field(
        default=16 * MIB, metadata=_why("how fast records are read again and verified in the background; 0: never")
    )
    flush_s: float = field(default=30.0, metadata=_why("how long a stop may take to bring memory's caches to SSD"))
    kill_point: str = field(default="", metadata=_why("for crash tests: end this process at name:count"))
    curve_records: int = field(
        default=8192,
        metadata=_why(
            "caches that are watched for /curves and /plan, 125 bytes each and a part of it a tenant; 0: none"
        ),
    )
    log_segments: int = field(
        default=0,
        metadata=_why("segments of lookups that are kept for `kvservice log export`, 72 bytes each; 0: none"),
    )
    lease_ttl_s: float = field(default=30.0, metadata=_why("how long a lookup's promise lasts unless renewed"))
    sessions_max: int = field(default=1024, metadata=_why("sessions open at a time; each costs a stream"))
    worker_threads: int = field(
        default=2, metadata=_why("threads that verify checksums and fold caches; both release the GIL")
    )
    log_level: str = field(default="INFO", metadata=_why("DEBUG, INFO, WARNING or ERROR"))

    def __post_init__(self) -> None:
        self._check_addresses()
        self._check_security()
        self._check_peers()
        _check(self.host_bytes >= MIB, "host_bytes", self.host_bytes, "at least 1MiB")
        self._check_ssd()
        _check(0 < self.lease_ttl_s <= 600, "lease_ttl_s", self.lease_ttl_s, "above 0 and at most 600 seconds")
        _check(0 <= self.curve_records <= 1 << 20, "curve_records", self.curve_records, "0 to 1048576")
        _check(0 <= self.log_segments <= 1 << 22, "log_segments", self.log_segments, "0 to 4194304")
        _check(self.sessions_max >= 1, "sessions_max", self.sessions_max, "at least 1")
        _check(1 <= self.worker_threads <= 64, "worker_threads", self.worker_threads, "1 to 64")
        levels = ("DEBUG", "INFO", "WARNING", "ERROR")
        _check(self.log_level in levels, "log_level", self.log_level, f"one of {', '.join(levels)}")

    def _check_ssd(self) -> None:
        _check(self.eviction in ("value", "lru"), "eviction", self.eviction, "value or lru")
        _check(self.ssd_write in ("through", "back"), "ssd_write", self.ssd_write, "through or back")
        _check(self.ssd_bytes >= MIB, "ssd_bytes", self.ssd_bytes, "at least 1MiB")
        half = self.host_bytes // 2
        is_right = self.staging_bytes == 0 or PAGE_BYTES <= self.staging_bytes <= half
        _check(is_right, "staging_bytes", self.staging_bytes, f"0, or {PAGE_BYTES} to {half}, half of host_bytes")
        for name in ("ssd_free_floor_bytes", "ssd_write_budget_bytes", "scrub_bytes_per_s"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _check(1 <= self.ssd_threads <= 64, "ssd_threads", self.ssd_threads, "1 to 64")
        _check(0 <= self.flush_s <= 3600, "flush_s", self.flush_s, "0 to 3600 seconds")

    def _check_addresses(self) -> None:
        for name in ("grpc_port", "http_port", "peer_port", "flight_port"):
            port = getattr(self, name)
            _check(-1 <= port <= _PORT_MAX, name, port, f"-1 to {_PORT_MAX}")
        for name in ("host", "peer_host"):
            host = getattr(self, name)
            is_address = is_loopback(host) or _is_address(host) or (name == "peer_host" and not host)
            _check(is_address, name, host, "an address of this machine, such as 127.0.0.1 or 0.0.0.0")

    def _check_security(self) -> None:
        """Who is not on this machine must prove who he is, and nobody may listen on the way."""
        has_both = bool(self.tls_cert) == bool(self.tls_key)
        _check(has_both, "tls_key", self.tls_key, "given together with tls_cert")
        needs = "given together with tls_cert and tls_key: without TLS no certificate is shown"
        _check(self.is_tls or not self.tls_client_ca, "tls_client_ca", self.tls_client_ca, needs)
        is_guarded = self.insecure_plaintext or (self.is_tls and bool(self.access_file))
        hosts = [("host", self.host)] if self.grpc_port >= 0 or self.http_port >= 0 else []
        hosts += [("peer_host", self.peer_address)] if self.peer_port >= 0 or self.flight_port >= 0 else []
        rule = (
            "a loopback address, or else set tls_cert, tls_key and access_file (or insecure_plaintext, whose help says "
            "what that gives up)"
        )
        for name, host in hosts:
            _check(is_guarded or is_loopback(host), name, host, rule)
        is_open = self.flight_port >= 0 and not is_loopback(self.peer_address)
        rule = "-1 beyond loopback without tls_client_ca: gRPC takes a stranger's message of any length before it asks"
        _check(
            not is_open or bool(self.tls_client_ca) or self.insecure_plaintext, "flight_port", self.flight_port, rule
        )

    def _check_peers(self) -> None:
        _check(1 <= self.replicas <= 8, "replicas", self.replicas, "1 to 8")
        _check(self.push in ("back", "through", "off"), "push", self.push, "back, through or off")
        for name in ("peer_deadline_s", "cold_deadline_s"):
            _check(0 < getattr(self, name) <= 60, name, getattr(self, name), "above 0 and at most 60 s")
        is_url = not self.etcd or re.fullmatch(r"https?://\S+", self.etcd)
        _check(bool(is_url), "etcd", self.etcd, "a URL such as https://etcd.example:2379")
        is_cold = not self.cold or re.match(r"[a-z][a-z0-9+.-]*:", self.cold)
        _check(bool(is_cold), "cold", self.cold, "a URL such as s3://bucket/prefix")
        _check(
            not (self.shared and self.etcd), "shared", self.shared, "left out with setting etcd, which lists the nodes"
        )
        for one in self.shared.split(",") if self.shared else ():
            rule = "host:port,flight://host:port, or dns:name:port, or srv:name"
            _check(bool(_SHARED.fullmatch(one.strip())), "shared", self.shared, rule)
        for name in ("member_grace_s", "member_warm_s"):
            _check(0 < getattr(self, name) <= 86400, name, getattr(self, name), "above 0 and at most 86400 seconds")
        _check(_NAME.fullmatch(self.node_name) is not None, "node_name", self.node_name, "letters, digits, . _ and -")

    @property
    def is_tls(self) -> bool:
        """Do the network's ports speak TLS?"""
        return bool(self.tls_cert)

    @property
    def peer_address(self) -> str:
        """The address that the peer port is opened at."""
        return self.peer_host or self.host

    @property
    def staged_bytes(self) -> int:
        """Bytes of the arena that only loads from SSD use."""
        share = self.host_bytes // 8 // PAGE_BYTES * PAGE_BYTES
        brings = self.ssd_folder or self.shared or self.etcd or self.cold
        return self.staging_bytes or (share if brings else 0)

    @property
    def socket_path(self) -> Path:
        """Where the control plane's unix socket lies."""
        return Path(self.socket) if self.socket else _runtime_folder() / "kvservice.sock"

    @property
    def admin_socket_path(self) -> Path:
        """Where the socket of the admin verbs lies: beside the control plane's."""
        return self.socket_path.with_name(self.socket_path.name + ".admin")

    @property
    def peers_socket_path(self) -> Path:
        """Where the socket for other nodes of this host lies, if there is a peer port."""
        return self.socket_path.with_name(self.socket_path.name + ".peers")

    @property
    def data_socket_path(self) -> Path:
        """Where the socket that hands over the arena lies: beside the control plane's."""
        return self.socket_path.with_name(self.socket_path.name + ".data")


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and addresses of this machine alone."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigError(f"setting {name} = {value!r}: it must be {rule}")


def parse_bytes(text: str) -> int:
    """Bytes from ``"512MiB"``, ``"4GiB"`` or a plain number. Raises ConfigError for others, and from 8 EiB on."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|B|)\s*", text)
    if not found:
        raise ConfigError(f"{text!r} is not a size; write a number with B, KiB, MiB, GiB or TiB, such as 4GiB")
    size = float(found[1]) * _UNITS[found[2]]
    if size >= SIZE_BYTES_LIMIT:
        shown = text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."
        raise ConfigError(f"{shown!r} is too large: a size is below 8388608TiB")
    return int(size)


def load_settings(
    arguments: Mapping[str, str], *, file: Path | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """Settings from the three sources. ``environment`` defaults to the process's own."""
    values: dict[str, object] = {}
    if file is not None:
        values |= _read_file(file)
    values |= _read_environment(os.environ if environment is None else environment)
    values |= arguments
    known = {spec.name: spec for spec in dataclasses.fields(Settings)}
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise ConfigError(f"unknown settings {', '.join(unknown)}; known are {', '.join(known)}")
    return Settings(**{name: _convert(known[name], value) for name, value in values.items()})  # type: ignore[arg-type]


def _read_file(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the settings in {file}: {error}") from error


def _read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    names = {name: name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in environment}
    return {short: environment[name] for name, short in names.items() if name.startswith(ENVIRONMENT_PREFIX)}


def _convert(spec: "dataclasses.Field[object]", value: object) -> object:
    if isinstance(value, str) and spec.type is not str:
        return _parse(spec, value)
    if spec.type is float and type(value) is int:
        return float(value)
    _check(type(value) is spec.type, spec.name, value, f"a {getattr(spec.type, '__name__', spec.type)}")
    return value


def _parse(spec: "dataclasses.Field[object]", text: str) -> object:
    if spec.name.endswith(("_bytes", "_bytes_per_s")):
        return parse_bytes(text)
    if spec.type is bool:
        _check(text.lower() in ("true", "false"), spec.name, text, "true or false")
        return text.lower() == "true"
    assert spec.type in (int, float), spec
    try:
        return spec.type(text)
    except ValueError as error:
        raise ConfigError(f"setting {spec.name} = {text!r}: it must be a number") from error


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag a setting, ``--host-bytes 4GiB``, and ``--config FILE``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    for spec in dataclasses.fields(Settings):
        flag = "--" + spec.name.replace("_", "-")
        default = spec.default if spec.default != "" else "see text"
        parser.add_argument(flag, metavar="VALUE", help=f"{spec.metadata['why']} (default: {default})")


def settings_from_flags(parsed: argparse.Namespace) -> Settings:
    """Settings from parsed flags, the file they name, and the environment."""
    names = [spec.name for spec in dataclasses.fields(Settings)]
    given = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    return load_settings(given, file=parsed.config)


def user_cache_folder() -> Path:
    """Where converted models and other things that can be made again are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvservice"


def process_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child process: this one's, with ``changes``."""
    return dict(os.environ) | dict(changes or {})
