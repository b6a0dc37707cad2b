"""What a round of agents takes and saves, before there is any traffic: closed forms, and nothing measured. Pure.

N agents have T = P + S tokens each: P private, S shared. A share r of S is refreshed, row by row, in every prompt but
the leader's, and replaced rows are all that a mirror stores of S:

    dense  = N T                     stored = T + (N - 1)(P + r S)              ratio -> T / (P + r S) for large N
    prefill without reuse = N T      with   = T + (N - 1)(P + r S)              tokens; the leader computes in full
    seconds a token = (2 parameters + 2 layers heads head_size T) / flops       causal mean, T the prompt's length
    break-even bandwidth = bytes a token / seconds a token
"""

import math
from dataclasses import dataclass

from kvservice.model.errors import InvalidInputError
from kvservice.planning.document import WhatIfDocument
from kvservice.planning.model_config import ModelShape

AGENTS_MAX = 1_000_000
TOKENS_MAX = 100_000_000


@dataclass(frozen=True, slots=True)
class RoundShape:
    """A round. ``tokens``: of each agent's prompt; ``private_share`` of them is its own; ``refresh_ratio`` of the
    shared ones is computed anew in every prompt."""

    agents: int = 10
    tokens: int = 8192
    private_share: float = 0.1
    refresh_ratio: float = 0.05

    def __post_init__(self) -> None:
        _check(1 <= self.agents <= AGENTS_MAX, "agents", self.agents, f"1 to {AGENTS_MAX}")
        _check(1 <= self.tokens <= TOKENS_MAX, "tokens", self.tokens, f"1 to {TOKENS_MAX}")
        _check(0 <= self.private_share <= 1, "private_share", self.private_share, "0 to 1")
        _check(0 <= self.refresh_ratio <= 1, "refresh_ratio", self.refresh_ratio, "0 to 1")


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast prefill is: measured tokens a second, or FLOP/s that the accelerator really does. 0: not said."""

    prefill_tokens_per_s: float = 0.0
    flops: float = 0.0


def _check(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise InvalidInputError(f"{name} = {value!r}: it must be {rule}")


def token_seconds(model: ModelShape, tokens: int, speed: Speed) -> float | None:
    """Seconds of prefill a token, on average over a prompt of ``tokens``; None if nobody said how fast that is."""
    if speed.prefill_tokens_per_s:
        return 1 / speed.prefill_tokens_per_s
    if speed.flops and model.parameters:
        return (2 * model.parameters + 2 * model.layers * model.attention_elements * tokens) / speed.flops
    return None


def what_if(model: ModelShape, round_: RoundShape, speed: Speed, host_bytes: int = 0) -> WhatIfDocument:
    """The closed forms for one round; ``host_bytes``: memory that rounds may be kept in, 0: not said."""
    agents, tokens = round_.agents, round_.tokens
    private = tokens * round_.private_share
    own = private + round_.refresh_ratio * (tokens - private)
    stored, token_s = tokens + (agents - 1) * own, token_seconds(model, tokens, speed)
    stored_bytes, limit = stored * model.token_bytes, tokens / own if own else math.inf
    return {
        "bytes_per_token": model.token_bytes,
        "tokens_per_agent": tokens,
        "dense_bytes": agents * tokens * model.token_bytes,
        "stored_bytes": round(stored_bytes),
        "ratio": round(agents * tokens / stored, 4),
        "ratio_limit": round(limit, 4) if math.isfinite(limit) else None,
        "mirror_bytes": round(own * model.token_bytes),
        "prefill_tokens": round(stored),
        "prefill_tokens_without": agents * tokens,
        "prefill_saved_s": None if token_s is None else (agents * tokens - stored) * token_s,
        "break_even_bytes_per_s": None if token_s is None else model.token_bytes / token_s,
        "rounds_in_host": host_bytes / stored_bytes if host_bytes else None,
        "notes": _notes(model, token_s),
    }


def _notes(model: ModelShape, token_s: float | None) -> list[str]:
    notes = ["closed forms: nothing here was measured; run tables and rounding to 4 KiB are left out, under 1 %"]
    if token_s is None:
        known = "prefill_tokens_per_s" if not model.parameters else "prefill_tokens_per_s or flops"
        notes.append(f"seconds and bandwidth are not known: say {known}")
    if model.windowed_layers:
        notes.append(f"{model.windowed_layers} layers have a window; they are counted as if they kept every token")
    return notes
