"""What the scheduler's side tells the worker's side of a step, and back. Crosses processes: plain data, no tensors.

Imports no engine. vLLM pickles these objects itself.
"""

from dataclasses import dataclass

from kvservice.client.connectors.vllm.chunks import Chunk


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load the prompt's tokens ``[start, end)`` of one request, and not one row before: those blocks may be shared.

    ``chunks``: what they lie in, in prompt order, without a gap; the first may begin before ``start`` and the last may
    end behind ``end``. ``block_ids``: the engine's blocks, the first holds ``start``, which is a block's first token.
    """

    request_id: str
    start: int
    end: int
    chunks: tuple[Chunk, ...]
    block_ids: tuple[int, ...]
    is_async: bool


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save one chunk, all of whose rows are in paged KV once the step's forward has run.

    ``block_ids``: the engine's blocks of the chunk, the first holds its first token.
    """

    request_id: str
    chunk: Chunk
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOrders:
    """All that a step wants of the workers. ``tokens``: how many it computes, to tell what a token costs.

    ``is_idle``: the engine has nothing to compute, and steps only to hear of what it waits for.
    """

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    tokens: int = 0
    is_idle: bool = False


NOTHING = StepOrders()
IDLE = StepOrders(is_idle=True)
"""The orders of steps without work: one object each, since an engine that waits makes many steps a second."""

IDLE_WAIT_S = 0.005
"""How long an idle step waits, at most, for a lookup or a load to end. Without it the engine's thread goes round and
round, and holds the GIL that the loading threads need: a load of 23 MB took 0.48 s instead of 0.18 s."""


@dataclass(slots=True)
class WorkerNotice:
    """What a worker tells the scheduler's side besides vLLM's own results. ``aggregate`` is vLLM's name for it."""

    refusal: str = ""
    loaded: tuple[str, ...] = ()
    """Requests whose load within a step has ended, well or not."""

    def aggregate(self, other: "WorkerNotice") -> "WorkerNotice":
        """Both workers' notices as one: a refusal of any worker counts."""
        return WorkerNotice(self.refusal or other.refusal, (*self.loaded, *other.loaded))
