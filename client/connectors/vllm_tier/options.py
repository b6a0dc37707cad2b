"""What a user may set: the tier's entry in ``secondary_tiers``, read once at start.

A wrong option stops the engine's start, with the nearest name that exists. Imports no engine and no torch.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields

from kvservice.client.connectors.option_checks import check_tenant, read_options, why
from kvservice.client.connectors.service_options import ServiceOptions

WHERE = "secondary_tiers, KVServiceTier"


@dataclass(frozen=True, slots=True)
class TierOptions(ServiceOptions):
    """The tier's settings. Made by ``of``."""

    is_shared: bool = field(
        default=True,
        metadata=why("share with other engines, which needs weights, config and quantization; false: with nobody"),
    )
    weights: str = field(default="", metadata=why("revision or digest of the weights; vLLM does not tell a tier"))
    config: str = field(
        default="", metadata=why("digest of the model's configuration, RoPE above all; vLLM does not tell a tier")
    )
    quantization: str = field(
        default="", metadata=why('how the weights are quantized when loaded, "none" if not; vLLM does not tell a tier')
    )
    kv_scales: str = field(
        default="", metadata=why('for 8-bit KV: where its scales come from, such as "checkpoint" or "page"')
    )
    layout: str = field(
        default="", metadata=why("what else orders the bytes of a block, if engines that share differ in it")
    )
    model: str = field(default="", metadata=why("name in the identity; empty: vLLM's, which may be a local folder"))
    identity_file: str = field(
        default="", metadata=why("file to write the identity to, for `kvservice explain`; empty: none")
    )
    tenant: str = field(default="default", metadata=why("whose caches these are; tenants never share"))
    keeps_on_reset: bool = field(
        default=False,
        metadata=why("true: find old chunks after vLLM reset its caches, which it also does when weights change"),
    )
    lookup_deadline_s: float = field(
        default=0.5, metadata=why("a lookup not answered by then counts as a miss: the chunk is computed")
    )
    load_deadline_s: float = field(
        default=10.0, metadata=why("chunks not loaded by then have failed: they are computed")
    )
    load_threads: int = field(default=2, metadata=why("threads that copy to vLLM's memory, 3-5 GB/s each"))
    store_threads: int = field(default=1, metadata=why("threads that copy to the service's memory"))
    stores_waiting_max: int = field(
        default=4096, metadata=why("chunks that may wait to be stored, and pin vLLM's memory; more are not stored")
    )
    breaker_failures_max: int = field(
        default=5,
        metadata=why("after so many failed or slow calls in a row the engine goes on without the tier for a while"),
    )
    breaker_slow_s: float = field(default=1.0, metadata=why("a call that takes longer counts as failed"))
    breaker_pause_s: float = field(
        default=2.0, metadata=why("first pause before the service is tried again; doubles up to 30 s")
    )

    @classmethod
    def of(cls, given: Mapping[str, object], by_user: Collection[str] | None = None) -> "TierOptions":
        """Options as vLLM hands them on. Raises ConfigError for an unknown name, a wrong type or a wrong value.

        ``by_user``: names that the user wrote. Others that are unknown come from a newer vLLM and are left alone;
        None: the user wrote all of them.
        """
        known = {spec.name for spec in fields(cls)}
        ours = {name: value for name, value in given.items() if by_user is None or name in known or name in by_user}
        options = cls(**{"address": ""} | read_options(cls, ours, WHERE))
        options.check_service(WHERE)
        check_tenant(options.tenant, WHERE)
        return options
