"""The chain of keys of a request: from its tokens, and from what else decides its KV."""

import logging
import os
from collections.abc import Sequence
from typing import Any

from kvservice.client.connectors.vllm.block_hashes import EXACT_END
from kvservice.client.connectors.vllm.chunks import ChunkChain
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.request_extras import ExtrasReader
from kvservice.client.connectors.vllm.round_params import RoundParamsReader
from kvservice.client.connectors.vllm.wishes import WishReader
from kvservice.client.rounds import CHECK_LAYER
from kvservice.model.identity import Namespace
from kvservice.model.segment import digest

log = logging.getLogger("vllm.kvservice")


class ChainMaker:
    """Makes chains for the requests of one engine. Used by one thread."""

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        chunk_tokens: int,
        block_size: int,
        extras: ExtrasReader,
        counts: Counts,
        reuse_refusal: str = "",
        check_layer: int = CHECK_LAYER,
    ) -> None:
        self._namespaces = tuple(namespaces)
        self._chunk_tokens = chunk_tokens
        self._block_size = block_size
        self._extras = extras
        self._rounds = RoundParamsReader(counts)
        self._wishes = WishReader(self._namespaces[0], reuse_refusal, counts, check_layer)
        self._reset = b""
        self._told: set[str] = set()

    def __call__(self, request: Any) -> ChunkChain | None:
        """The chain of a vLLM ``Request``, empty yet. If its KV cannot be named, which is logged once a reason, it is
        none, or one that stays empty.
        """
        extras = self._extras.of(request)
        refusal = extras.refusal
        if getattr(request, "resumable", False):
            refusal = "its prompt is streamed, so its tokens may change"
        if refusal:
            if refusal not in self._told and len(self._told) < 100:
                self._told.add(refusal)
                log.info("kvservice: a request is not reused: %s", refusal)
            return self._bystander(request)
        extra = digest(b"kvservice reset\0", self._reset, extras.extra) if self._reset else extras.extra
        words = self._rounds.of(request)
        wish = self._wishes.of(request, words.request)
        # From its first refreshed row on a prompt is stored by segments, under keys that say so.
        ends = [words.reuse_end, getattr(request, EXACT_END, None)]  # the mark outlives a reset, as its blocks do
        if wish is not None and not wish.is_plain:
            ends.append(wish.first_shared_token)
        reuse_end = min((end for end in ends if end is not None), default=None)
        return ChunkChain(
            self._namespaces,
            self._chunk_tokens,
            self._block_size,
            extra,
            extras.items,
            asked=words.request,
            wish=wish,
            reuse_end=reuse_end,
        )

    def _bystander(self, request: Any) -> ChunkChain | None:
        """A chain of no chunks for a request of a round that gets nothing: the others must not wait for it."""
        if request.prompt_token_ids is None:
            return None
        asked = self._rounds.of(request).request
        if asked is None or not asked.round:
            return None
        return ChunkChain(self._namespaces, self._chunk_tokens, self._block_size, asked=asked, reuse_end=0)

    def reset(self) -> None:
        """From now on nothing stored before is found, and what is stored is this engine's only.

        Who resets an engine's caches may have changed its weights: keys made of the old ones must not be used again.
        Segments are found in whatever context, so none of them is from now on.
        """
        self._reset = os.urandom(16)
        self.refuse_reuse("the engine's caches were reset, so its weights may have changed")

    def refuse_reuse(self, reason: str) -> None:
        """Requests that come from now on get exact reuse only."""
        self._wishes.refusal = self._wishes.refusal or reason
