"""How close a reused prompt is to its full prefill, and how fast memory is here."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
import torch
from torch import Tensor

from kvservice.client.reuse.decoder import Decoder

MEMCPY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Closeness:
    """Mean KL divergence to the full prefill in nats, and the share of equal next tokens, teacher forced."""

    kl: float
    agreement: float

    @classmethod
    def mean(cls, each: Sequence["Closeness"]) -> "Closeness":
        """Over prompts of equal weight."""
        return cls(fmean(one.kl for one in each), fmean(one.agreement for one in each))


def continuation_logits(decoder: Decoder, slots: Tensor, prompt_tokens: int, first: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``[tokens, vocab]`` before each of ``tokens``, which are fed to the prompt's KV whatever it predicts.

    ``first``: logits ``[1, vocab]`` behind the prompt. ``slots`` int64 reach over the prompt and its continuation.
    """
    behind = decoder.logits(decoder.extend(tokens[:-1], slots, prompt_tokens))
    return torch.cat((first, behind))


def closeness(reference: Tensor, found: Tensor) -> Closeness:
    """Of two runs of logits ``[tokens, vocab]`` over the same tokens."""
    wanted, got = reference.log_softmax(-1), found.log_softmax(-1)
    kl = (wanted.exp() * (wanted - got)).sum(-1).mean()
    agreement = (reference.argmax(-1) == found.argmax(-1)).float().mean()
    return Closeness(float(kl), float(agreement))


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians of runs that alternated with copies of 64 MiB, in GB/s."""

    restore_gb_s: float
    memcpy_gb_s: float
    ratio: float


def restore_speed(restore: Callable[[], None], restored_bytes: int, runs: int = 7) -> Speed:
    """Time ``restore`` against a plain copy, run by run; the ratio is the median of the pairs' ratios."""
    source = np.ones(MEMCPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    restores, copies = [], []
    for _ in range(runs):
        restores.append(restored_bytes / _seconds(restore))
        copies.append(MEMCPY_BYTES / _seconds(lambda: np.copyto(target, source)))
    ratios = [one / other for one, other in zip(restores, copies, strict=True)]
    return Speed(median(restores) / 1e9, median(copies) / 1e9, median(ratios))


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
