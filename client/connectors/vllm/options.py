"""What a user may set: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``, read once at start.

A wrong option stops the engine's start, with the nearest name that exists. Imports no engine and no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvservice.client.connectors.option_checks import check_tenant, may_be_none, read_options, why
from kvservice.client.connectors.service_options import ServiceOptions
from kvservice.model.errors import ConfigError
from kvservice.model.identity import INT8

WHERE = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class ConnectorOptions(ServiceOptions):
    """The connector's settings. Made by ``of``; ``chunk_tokens`` is a multiple of the engine's block size then."""

    chunk_tokens: int = field(
        default=256,
        metadata=why("tokens of a record, rounded up to whole blocks: fewer find more of a prompt, more cost less"),
    )
    load_tokens_min: int = field(
        default=1,
        metadata=why("fewer found tokens than that are computed: a load has a price of its own, see load_seconds"),
    )
    is_async: bool = field(
        default=True,
        metadata=why("load between steps; false: in the step, layer by layer, which stalls the step's other requests"),
    )
    is_shared: bool = field(
        default=True,
        metadata=why("share with other engines, which needs the weights' digest; false: only within this engine"),
    )
    model: str = field(
        default="", metadata=why("name in the identity; empty: the hub's name, or the architecture of a local folder")
    )
    weights: str = field(
        default="", metadata=why("revision or digest of the weights; empty: the hub's commit, or a digest of files")
    )
    adapters: Mapping[str, str] = field(
        default_factory=dict,
        metadata=why("digest or revision of LoRA adapters by name; others are read from their folders"),
    )
    lossy: str = field(
        default="",
        metadata=why('"int8": what is stored is rounded to 8 bits a value, half the bytes on slow links; empty: exact'),
    )
    tenant: str = field(default="default", metadata=why("whose caches these are; tenants never share"))
    identity_file: str = field(
        default="",
        metadata=why("file that the engine's identity is written to at its start, for `kvservice explain`"),
    )
    reuse: bool = field(
        default=True,
        metadata=why("reuse segments at other positions for requests that ask so; false: exact reuse for them too"),
    )
    check_layer: int = field(
        default=0,
        metadata=why("layer at which fresh rows are compared with restored ones; left out: an eighth of the layers"),
    )
    is_deterministic: bool = field(
        default=False,
        metadata=why("refresh prompt by prompt inside every layer: the same bits whoever shares a round's pass"),
    )
    raise_fit_min: float = field(
        default=0.95,
        metadata=why("share of fitting tokens from which a prompt is reused at a higher ratio; 0.95: it is computed"),
    )
    round_wait_s: float = field(
        default=0.5, metadata=why("how long the first prompt of a round waits for the others, at most")
    )
    leader_wait_s: float = field(
        default=10.0, metadata=why("how long a round waits for the one that computes its shared segments, at most")
    )
    refresh_slice_s: float = field(
        default=0.05, metadata=why("of a step that computes tokens too, what refreshing may take before it goes on")
    )
    refresh_rows_max: int = field(
        default=8192, metadata=why("rows that one step may order to be refreshed; a prompt with more is computed")
    )
    refresh_tail_rows: int = field(
        default=64,
        metadata=may_be_none("rows behind the last reused segment, a question, that a pass computes too; 0: none"),
    )
    lookup_deadline_s: float = field(
        default=0.5, metadata=why("a lookup not answered by then counts as a miss: the request is computed")
    )
    load_deadline_s: float = field(
        default=10.0, metadata=why("a load not finished by then has failed: the request is computed")
    )
    saves_bytes_max: int = field(
        default=1 << 30, metadata=why("memory for rows on their way to the service; what finds no room is not saved")
    )
    breaker_failures_max: int = field(
        default=5,
        metadata=why("after so many failed or slow calls in a row the engine goes on without cache for a while"),
    )
    breaker_slow_s: float = field(default=1.0, metadata=why("a call that takes longer counts as failed"))
    breaker_pause_s: float = field(
        default=2.0, metadata=why("first pause before the service is tried again; doubles up to 30 s")
    )

    @classmethod
    def of(cls, extra: Mapping[str, object], block_size: int) -> "ConnectorOptions":
        """Options as the user gave them. Raises ConfigError for an unknown name, a wrong type or a wrong value."""
        options = cls(**{"address": ""} | read_options(cls, extra, WHERE))
        options.check_service(WHERE)
        check_tenant(options.tenant, WHERE)
        if options.lossy not in ("", INT8):
            raise ConfigError(f'{WHERE}: lossy is {options.lossy!r}; leave it out for exact KV, or give "{INT8}"')
        blocks = -(-options.chunk_tokens // block_size)
        return replace(options, chunk_tokens=blocks * block_size)
