"""What the scheduler's side tells the worker's side of a step, and back. Crosses processes: plain data, no tensors.

Imports no engine. vLLM pickles these objects itself.
"""

from dataclasses import dataclass

from kvservice.client.connectors.vllm.chunks import Chunk
from kvservice.client.rounds import RoundPrompt


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

    ``block_ids``: the engine's blocks of the chunk; the first holds its first token, behind ``skip`` others.
    ``is_awaited``: others wait to hear that it is stored, or will not be. ``is_last``: the request is over, and its
    blocks are kept until they were copied. ``prompt``: set if a pass has brought most of the chunk, which is its
    segment ``index``: it is stored as what differs from its master, where that saves.
    """

    request_id: str
    chunk: Chunk
    block_ids: tuple[int, ...]
    skip: int = 0
    is_awaited: bool = False
    is_last: bool = False
    prompt: RoundPrompt | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class RefreshOrder:
    """Restore and refresh a prompt in one pass with all others of the step, between steps.

    ``load``: what was promised, with the exact chunks at its start; they end at ``exact_end``, and what lies behind is
    up to the pass.
    ``block_ids``: all of the request's, the first holds its first token; those before ``load.start`` may be shared.
    ``prompt``: its segments and policy. ``round``: its name, "" if it has none.
    """

    load: LoadOrder
    exact_end: int
    block_ids: tuple[int, ...]
    prompt: RoundPrompt
    round: str = ""


@dataclass(frozen=True, slots=True)
class StepOrders:
    """All that a step wants of the workers. ``tokens``: how many it computes, to tell what a token costs.

    ``is_idle``: the engine has nothing to compute, and steps only to hear of what it waits for.
    """

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    tokens: int = 0
    is_idle: bool = False
    refreshes: tuple[RefreshOrder, ...] = ()


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
    settled: tuple[str, ...] = ()
    """Requests of awaited saves that are stored or will not be; one entry a save."""
    reuse_refusal: str = ""
    """Why nothing is refreshed with this engine; exact reuse goes on."""

    def aggregate(self, other: "WorkerNotice") -> "WorkerNotice":
        """Both workers' notices as one: a refusal of any worker counts."""
        return WorkerNotice(
            self.refusal or other.refusal,
            (*self.loaded, *other.loaded),
            (*self.settled, *other.settled),
            self.reuse_refusal or other.reuse_refusal,
        )
