"""What a request wishes of reuse from other contexts: its prompt in segments, under a policy; or why it gets none.

Who gets none is served by plain exact reuse. Imports no engine: vLLM's ``Request`` through the fields read here.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.round_request import Reuse, RoundRequest, Segment
from kvservice.client.rounds import CHECK_LAYER, SHIFTED_KINDS, PartKind, ReusePolicy, RoundPrompt
from kvservice.model.identity import Identity, Namespace

REASONS_TOLD_MAX: Final = 100

log = logging.getLogger("vllm.kvservice")


@dataclass(frozen=True, slots=True)
class ReuseWish:
    """``prompt``: under a policy. ``asked``: the request's words, of which the prompt may be a part. ``priority``: the
    engine's; lower goes first.
    """

    prompt: RoundPrompt
    asked: RoundRequest
    priority: int = 0

    @property
    def is_plain(self) -> bool:
        """True if no segment may come from another context: there is nothing to reuse, only what is said to be kept."""
        return self.prompt.first_shared == len(self.prompt.segments)

    @property
    def first_shared_token(self) -> int:
        """Position of the first row that may be refreshed; the prompt's length if there is none."""
        return self.prompt.token_count if self.is_plain else self.prompt.segments[self.prompt.first_shared].position


def engine_refusal(config: Any, identity: Identity, check_layer: int = 0) -> str:
    """Why an engine cannot refresh KV, in one line; empty if nothing is known against it. ``config``: vLLM's.

    ``check_layer``: as the user set it; 0: not at all.
    """
    parallel = config.parallel_config
    if int(parallel.tensor_parallel_size) > 1:
        return "tensor parallelism: every rank would pick rows by its own heads"
    if int(parallel.pipeline_parallel_size) > 1:
        return "pipeline parallelism: no rank has all layers"
    if getattr(config, "speculative_config", None) is not None:
        return "speculative decoding: a drafter would miss the refreshed rows"
    if getattr(config, "lora_config", None) is not None:
        return "LoRA: adapters are mapped to the engine's own batch, so a refresh would run with another request's"
    if identity.pinned_reason:
        return f"its KV cannot be moved: {identity.pinned_reason}"
    if identity.geometry.layers <= max(check_layer, CHECK_LAYER):
        return f"a model of {identity.geometry.layers} layers has no layer {max(check_layer, CHECK_LAYER)} to check at"
    return ""


class WishReader:
    """Reads the wishes of one engine's requests. Used by one thread. A refusal is logged once a reason.

    ``refusal``: why the engine itself cannot refresh KV; it may be set later, and holds from then on. ``check_layer``:
    of every policy.
    """

    def __init__(self, namespace: Namespace, refusal: str, counts: Counts, check_layer: int = CHECK_LAYER) -> None:
        self.refusal = refusal
        self._check_layer = check_layer
        self._namespace = namespace
        self._counts = counts
        self._told: set[str] = set()

    def of(self, request: Any, asked: RoundRequest | None) -> ReuseWish | None:
        """The wish of a vLLM ``Request``; None if it has none, or gets none."""
        if asked is None:
            return None
        selectors = {
            kind: mode.text for kind, mode in asked.modes.items() if isinstance(mode, Reuse) and kind in SHIFTED_KINDS
        }
        if not selectors:
            return None
        if refusal := self.refusal or _request_refusal(request):
            self._refuse(refusal)
            return None
        lengths = list(_reusable(asked))
        if not lengths:
            return None
        prompt = self._prompt(request, lengths, selectors)
        return ReuseWish(prompt, asked, int(getattr(request, "priority", 0) or 0))

    def _prompt(self, request: Any, lengths: list[Segment], selectors: dict[PartKind, str]) -> RoundPrompt:
        policy = ReusePolicy.by_kind(selectors, self._check_layer)
        tokens = request.prompt_token_ids[: sum(length for _, length in lengths)]
        return RoundPrompt.from_lengths(self._namespace, tokens, lengths, policy=policy)

    def _refuse(self, reason: str) -> None:
        self._counts.add("reuse_refused")
        if reason not in self._told and len(self._told) < REASONS_TOLD_MAX:
            self._told.add(reason)
            log.warning("kvservice: reuse at other positions refused, exact reuse goes on: %s", reason)


def _request_refusal(request: Any) -> str:
    for name, what in (
        ("lora_request", "a LoRA adapter: the refresh would run without it"),
        ("cache_salt", "a cache salt: its KV is not to be shared with other contexts"),
        ("mm_features", "images or other items that are no tokens"),
        ("prompt_embeds", "embeddings instead of tokens"),
    ):
        if getattr(request, name, None):
            return f"the request has {what}"
    if getattr(request, "resumable", False):
        return "the request's prompt is streamed, so its tokens may change"
    return ""


def _reusable(asked: RoundRequest) -> Iterator[Segment]:
    """Segments up to the first that must be neither looked up nor stored."""
    end = 0
    for kind, tokens in asked.segments:
        if asked.off_from is not None and end >= asked.off_from:
            return
        end += tokens
        yield kind, tokens
