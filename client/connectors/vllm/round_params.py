"""What requests say of their rounds in ``kv_transfer_params``, for an engine that must go on whatever they say."""

import logging
from dataclasses import dataclass
from typing import Any

from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.round_request import Mistake, RoundRequest, RoundRequestError

log = logging.getLogger("vllm.kvservice")


@dataclass(frozen=True, slots=True)
class RoundWords:
    """``request``: None if nothing was said, or nothing that is understood. ``reuse_end``: what lies from this position
    on is neither looked up nor stored; None: no such position.
    """

    request: RoundRequest | None = None
    reuse_end: int | None = None


class RoundParamsReader:
    """Reads requests of one engine. Used by one thread. A mistake is counted, and logged once a kind."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._told: set[Mistake] = set()

    def of(self, request: Any) -> RoundWords:
        """What a vLLM ``Request`` says. Never raises for what a user wrote.

        A wrong request gets what one without words gets. If it may have said that something is not to be stored, it
        gets no reuse at all.
        """
        try:
            asked = RoundRequest.from_params(
                getattr(request, "kv_transfer_params", None), len(request.prompt_token_ids)
            )
        except RoundRequestError as error:
            self._refuse(error)
            return RoundWords(reuse_end=None if error.may_reuse else 0)
        return RoundWords(asked, None if asked is None else asked.off_from)

    def _refuse(self, error: RoundRequestError) -> None:
        self._counts.add("round_params_refused")
        if error.mistake not in self._told:
            self._told.add(error.mistake)
            what = "plain exact reuse" if error.may_reuse else "no reuse"
            log.warning("kvservice: a request gets %s: %s (told once a kind of mistake)", what, error)
