"""What a user may set: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``, read once at start.

A wrong option stops the engine's start, with the nearest name that exists: an option that is silently not there costs
an afternoon. Imports no engine and no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches

from kvservice.model.errors import ConfigError


def _why(text: str) -> dict[str, str]:
    return {"why": text}


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The connector's settings. Made by ``of``; ``chunk_tokens`` is a multiple of the engine's block size then."""

    address: str = field(
        metadata=_why("unix:/path of the service on this host, as `kvservice serve` prints it; or 127.0.0.1:port")
    )
    chunk_tokens: int = field(
        default=256,
        metadata=_why("tokens of a record, rounded up to whole blocks: fewer find more of a prompt, more cost less"),
    )
    is_async: bool = field(
        default=True,
        metadata=_why("load between steps; false: in the step, layer by layer, which stalls the step's other requests"),
    )
    is_shared: bool = field(
        default=True,
        metadata=_why("share with other engines, which needs the weights' digest; false: only within this engine"),
    )
    model: str = field(
        default="", metadata=_why("name in the identity; empty: the hub's name, or the architecture of a local folder")
    )
    weights: str = field(
        default="", metadata=_why("revision or digest of the weights; empty: the hub's commit, or a digest of files")
    )
    adapters: Mapping[str, str] = field(
        default_factory=dict,
        metadata=_why("digest or revision of LoRA adapters by name; others are read from their folders"),
    )
    tenant: str = field(default="default", metadata=_why("whose caches these are; tenants never share"))
    lookup_deadline_s: float = field(
        default=0.5, metadata=_why("a lookup not answered by then counts as a miss: the request is computed")
    )
    load_deadline_s: float = field(
        default=10.0, metadata=_why("a load not finished by then has failed: the request is computed")
    )
    saves_bytes_max: int = field(
        default=1 << 30, metadata=_why("memory for rows on their way to the service; what finds no room is not saved")
    )
    breaker_failures_max: int = field(
        default=5,
        metadata=_why("after so many failed or slow calls in a row the engine goes on without cache for a while"),
    )
    breaker_slow_s: float = field(default=1.0, metadata=_why("a call that takes longer counts as failed"))
    breaker_pause_s: float = field(
        default=2.0, metadata=_why("first pause before the service is tried again; doubles up to 30 s")
    )

    @classmethod
    def of(cls, extra: Mapping[str, object], block_size: int) -> "ConnectorOptions":
        """Options as the user gave them. Raises ConfigError for an unknown name, a wrong type or a wrong value."""
        known = {spec.name: spec.type for spec in fields(cls)}
        for name, value in extra.items():
            if name not in known:
                raise ConfigError(f"kv_connector_extra_config: {_unknown(name, list(known))}")
            _check_type(name, value, known[name])
        if not extra.get("address"):
            raise ConfigError(
                'kv_connector_extra_config: "address" is missing; give the service\'s address, such as '
                '"unix:/run/user/1000/kvservice.sock" (`kvservice serve` prints it)'
            )
        values = {name: float(value) if known[name] is float else value for name, value in extra.items()}  # type: ignore[arg-type]
        options = cls(**values)  # type: ignore[arg-type]
        options._check()
        blocks = -(-options.chunk_tokens // block_size)
        return replace(options, chunk_tokens=blocks * block_size)

    def _check(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.type in (int, float) and not 0 < value < float("inf"):
                raise ConfigError(f"kv_connector_extra_config: {spec.name} must be above 0 and finite, it is {value}")
        if not self.tenant:
            raise ConfigError('kv_connector_extra_config: tenant must not be empty; leave it out for "default"')
        host, _, port = self.address.rpartition(":")
        if not self.address.startswith("unix:/") and not (host and port.isdecimal()):
            raise ConfigError(
                f'kv_connector_extra_config: address {self.address!r} is neither "unix:/path" nor "127.0.0.1:port"'
            )


_TYPE_WORDS: dict[object, str] = {
    str: "a text in quotes",
    int: "a whole number without quotes",
    float: "a number without quotes",
    bool: "true or false without quotes",
}
_MAPPING_WORDS = 'an object of texts, such as {"my-adapter": "3f2a"}'


def _check_type(name: str, value: object, kind: object) -> None:
    if kind not in _TYPE_WORDS:
        is_right = isinstance(value, Mapping) and all(type(one) is str and one for one in value.values())
    else:
        is_right = type(value) is kind or (kind is float and type(value) is int)
    if not is_right:
        raise ConfigError(
            f"kv_connector_extra_config: {name} must be {_TYPE_WORDS.get(kind, _MAPPING_WORDS)}, it is {value!r}"
        )


def _unknown(name: str, known: list[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown option {name!r}; {hint}Known are {', '.join(known)}"
