"""What a user may set: ``adapter_params`` of the L2 adapter, or the options of the remote connector, read at start.

A wrong option stops the start, with the nearest name that exists. Imports no LMCache and no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from kvservice.client.connectors.option_checks import check_tenant, read_options, why
from kvservice.client.connectors.service_options import ServiceOptions
from kvservice.model.errors import ConfigError

SCHEME = "kvservice"


@dataclass(frozen=True, slots=True)
class LMCacheOptions(ServiceOptions):
    """Settings of both doors. Made by ``of``."""

    is_shared: bool = field(
        default=True, metadata=why("share with other engines, which needs the next four; false: with nobody, ever")
    )
    model_path: str = field(
        default="", metadata=why("folder of the model's files: stands for weights and config, by a digest of them")
    )
    weights: str = field(default="", metadata=why("revision or digest of the weights, in place of model_path"))
    config: str = field(
        default="", metadata=why("digest of the model's configuration, RoPE above all, in place of model_path")
    )
    kv_format: str = field(
        default="",
        metadata=why("what else orders the bytes of a chunk: engine, its release, its attention backend"),
    )
    kv_scales: str = field(default="", metadata=why('for 8-bit KV: where its scales come from, such as "checkpoint"'))
    model: str = field(default="", metadata=why("name in the identity; empty: LMCache's, which may be a local folder"))
    tenant: str = field(default="default", metadata=why("whose caches these are; tenants never share"))
    prefill_s: float = field(
        default=0.0, metadata=why("seconds that computing one chunk takes, for the service's eviction; unknown: 0")
    )
    lookup_deadline_s: float = field(
        default=0.5, metadata=why("a lookup not answered by then counts as a miss: the chunks are computed")
    )
    load_deadline_s: float = field(
        default=10.0, metadata=why("chunks not loaded by then have failed: they are computed")
    )
    lock_s: float = field(
        default=300.0, metadata=why("a lock that nobody gave back by then is given up: its request was aborted")
    )
    load_threads: int = field(default=2, metadata=why("threads that copy to LMCache's memory, 3-5 GB/s each"))
    store_threads: int = field(default=1, metadata=why("threads that copy to the service's memory"))
    waiting_max: int = field(
        default=1024, metadata=why("tasks that may wait for a thread; what is asked beyond is answered as failed")
    )
    breaker_failures_max: int = field(
        default=5, metadata=why("after so many failed or slow calls in a row LMCache goes on without us for a while")
    )
    breaker_slow_s: float = field(default=1.0, metadata=why("a call that takes longer counts as failed"))
    breaker_pause_s: float = field(
        default=2.0, metadata=why("first pause before the service is tried again; doubles up to 30 s")
    )

    @classmethod
    def of(cls, given: Mapping[str, object], where: str) -> "LMCacheOptions":
        """Options as the user gave them in ``where``. Raises ConfigError for whatever is wrong or missing."""
        options = cls(**{"address": ""} | read_options(cls, given, where))
        options.check_service(where)
        check_tenant(options.tenant, where)
        if options.is_shared:
            options._check_complete(where)
        return options

    def _check_complete(self, where: str) -> None:
        missing = [] if self.model_path else [name for name in ("weights", "config") if not getattr(self, name)]
        missing += [] if self.kv_format else ["kv_format"]
        if missing:
            raise ConfigError(
                f"{where}: to share chunks with other engines it must be known what decides their bytes, and LMCache's "
                f'keys do not say {", ".join(missing)}. Give "model_path", the folder of the model\'s files, or '
                '"weights" and "config", names that change with them (the hub\'s commit will do for both, if the '
                'engine overrides nothing); and "kv_format", engine, release and attention backend, such as '
                '"vllm 0.32 FLASH_ATTN". Or set "is_shared": false to keep the chunks to this process'
            )


def options_of_url(url: str) -> dict[str, object]:
    """What ``kvservice:///path/of/socket?model_path=...`` or ``kvservice://127.0.0.1:port?...`` says, as options.

    Numbers, true and false are read as such. Raises ConfigError for an option that is there twice.
    """
    parts = urlsplit(url)
    found: dict[str, object] = {"address": f"unix:{parts.path}" if parts.path.strip("/") else parts.netloc}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name in found:
            raise ConfigError(f"{without_query(url)}: {name!r} is there twice")
        found[name] = _value(name, text)
    return found


def without_query(url: str) -> str:
    """What of a URL may stand in a message: its options may hold what should not be there, a token for example."""
    return url.partition("?")[0]


def _value(name: str, text: str) -> object:
    kinds = {spec.name: spec.type for spec in LMCacheOptions.__dataclass_fields__.values()}
    try:
        if kinds.get(name) is bool:
            return {"true": True, "false": False}.get(text, text)
        return float(text) if kinds.get(name) is float else int(text) if kinds.get(name) is int else text
    except ValueError:
        return text  # the check of its type says so
