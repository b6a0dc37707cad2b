"""The client of one node: look up, restore, store. What engines and connectors use.

with Client.connect("unix:/run/user/1000/kvservice.sock", identity) as client:
    with client.lookup(prompts) as plans:
        client.restore(plans, paged_kv, slots).wait()
    ...                                                   # the engine computes the rest
    client.store(prompt, paged_kv, slots)
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import Tensor

from kvservice.client.device_paged import DevicePaged, PinnedArena
from kvservice.client.explain import Explanation, explain
from kvservice.client.in_process import InProcessTransport, LocalNode
from kvservice.client.paged import CpuPaged, PagedKV, PagedMemory, Slots
from kvservice.client.plans import Plans, PromptPlan, look_up
from kvservice.client.restore import Progress, Restore, RestoreWork, plan_restore
from kvservice.client.restore_threads import RestoreThreads
from kvservice.client.rounds import RoundPrompt
from kvservice.client.security import Security
from kvservice.client.session import LEASE_TTL_S, Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.client.store import StoreRequest, StoreResult, store_round
from kvservice.client.transport import Transport
from kvservice.model.errors import InvalidInputError, UnavailableError
from kvservice.model.identity import Identity, Namespace
from kvservice.model.segment import CacheKey
from kvservice.wire.v1 import cache_pb2 as wire

RESTORE_THREADS = 2
"""Restores that run at a time; each is one thread, since one restore alone is bound by memory, not by a core."""
STARTED_BYTES_MAX = 1 << 20
"""Of a first layer that the caller's thread writes: 0.1 to 0.2 ms, which waking another thread may take too."""


class Client:
    """One session with one node. Safe from any thread; a context manager that ends the session and what it holds.

    ``session`` becomes the client's own and is closed with it. Views of the last paged KV are kept until then.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._threads = RestoreThreads(RESTORE_THREADS)
        self._pinned: PinnedArena | None = None
        self._memory: CpuPaged | None = None  # checking a model's tensors costs 0.5 ms: kept for the next call

    @classmethod
    def connect(
        cls,
        address: str,
        identity: Identity,
        *others: Identity,
        is_writer: bool = True,
        client_name: str = "",
        lease_ttl_s: float = LEASE_TTL_S,
        token: str = "",
        tls_ca: str = "",
        client_cert: str = "",
        client_key: str = "",
    ) -> "Client":
        """A client of the node at ``unix:/path`` or ``127.0.0.1:port`` on this host, over shared memory.

        ``others``: identities registered beside the first. A client that is no writer cannot write the node's memory:
        its mapping is read-only. ``token``, ``tls_ca``, ``client_cert``, ``client_key``: for a node that asks who
        calls, see ``kvservice.client.security``. Raises UnavailableError when nothing answers there,
        UnauthenticatedError or ForbiddenError when the node does not let it in, ConfigError for files it cannot read.
        """
        transport = SharedMemoryTransport(address, Security(token, tls_ca, client_cert, client_key))
        return cls._over(transport, (identity, *others), is_writer, client_name, lease_ttl_s)

    @classmethod
    def in_process(
        cls,
        node: LocalNode,
        identity: Identity,
        *others: Identity,
        is_writer: bool = True,
        client_name: str = "",
        lease_ttl_s: float = LEASE_TTL_S,
    ) -> "Client":
        """A client of a node in this process. The node must outlive it."""
        return cls._over(InProcessTransport(node), (identity, *others), is_writer, client_name, lease_ttl_s)

    @classmethod
    def _over(
        cls, transport: Transport, identities: Sequence[Identity], is_writer: bool, name: str, lease_ttl_s: float
    ) -> "Client":
        name = name or f"pid {os.getpid()}"
        return cls(Session(transport, identities, is_writer=is_writer, client_name=name, lease_ttl_s=lease_ttl_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let running restores end, fail queued ones (UnavailableError), end the session. Safe to call twice."""
        self._threads.close()
        self._unpin()
        self._memory = None
        self.session.close()

    def reconnect(self) -> None:
        """Open a new session in place of this one, lost or not. Every plan and lease of before is void."""
        self._unpin()
        self.session.reconnect()

    @property
    def namespace(self) -> Namespace:
        """The namespace of the client's own identity; prompts are built with it."""
        return self.session.namespace

    def lookup(self, prompts: Sequence[RoundPrompt]) -> Plans:
        """Ask for all prompts of a round in one call: ``with client.lookup(prompts) as plans``.

        What is found stays readable until the plans are closed. Raises LimitError when the round is too large for one
        call, UnavailableError when the session is lost (then ``reconnect``).
        """
        return look_up(self.session, prompts)

    def restore(
        self,
        plans: Plans,
        paged_kv: PagedKV,
        slots: Sequence[Tensor | Slots],
        *,
        verify: bool = False,
        on_progress: Progress | None = None,
    ) -> Restore:
        """Write what was found to paged KV, on another thread, layer by layer; returns at once. ``wait`` for it.

        A first layer of up to 1 MiB is written here, if a thread is free for the rest and ``on_progress`` is not given.

        ``paged_kv``: per layer, per plane a tensor ``[blocks, block_size, heads, head_size]``. ``slots``: per prompt
        int64 ``[prompt tokens]``; -1 leaves a row out. Rows of segments that were not found are left as they are.
        ``verify`` checks every layer's checksum again while reading. Without it the bytes are those that the node
        verified when they were published, in memory that only writers of this node can reach.

        Raises, before anything is written: TokenCountError, SlotError, GeometryMismatchError, LeaseExpiredError,
        StaleEpochError, CorruptError; InvalidInputError when a cache lies too far away to be moved; UnavailableError
        when the client was closed. ``Restore.wait`` raises LeaseExpiredError if the lease was lost under way, and
        CorruptError, naming the cache, when ``verify`` finds other bytes: rows already written must then be computed;
        UnavailableError, with nothing written, if the client was closed before the restore began.
        """
        plans.ask_ahead()  # the node looks for news while slots and memory are checked here
        identity = self._one_identity([plan.prompt for plan in plans])
        memory = self._paged(paged_kv, identity)
        work = plan_restore(self.session, plans, slots, memory)
        restore = Restore(work, identity.geometry.layers)
        self._threads.begin(_RestoreJob(restore, work, plans, verify, on_progress))
        return restore

    def store(
        self,
        prompt: RoundPrompt,
        paged_kv: PagedKV,
        slots: Tensor | Slots,
        *,
        base: PromptPlan | None = None,
        is_refreshed: bool = False,
        segments: Sequence[int] | None = None,
        on_progress: Progress | None = None,
    ) -> StoreResult:
        """Store the prompt's segments as the engine holds them. See ``StoreRequest`` for the arguments, and
        ``store_round`` for errors."""
        request = StoreRequest(prompt, slots, base, is_refreshed, segments)
        return self.store_round([request], paged_kv, on_progress=on_progress)[0]

    def store_round(
        self, requests: Sequence[StoreRequest], paged_kv: PagedKV, *, on_progress: Progress | None = None
    ) -> tuple[StoreResult, ...]:
        """Store a round's prompts with one reservation and one commit; blocks until all is published.

        Paged KV must not change meanwhile. Raises, and stores nothing: NonFiniteError, SlotError, TokenCountError,
        GeometryMismatchError, InvalidInputError; LeaseExpiredError or StaleEpochError when a base is not leased any
        more. What the node refuses (no room, say) is REFUSED in the result, not raised.

        Raises UnavailableError, and other errors of a call to the node, when the node is lost. Until the commit began
        nothing was stored; from then on any of the round's caches may be, each whole and verified. Store the round
        again: what is held already is EXISTS in the result.
        """
        identity = self._one_identity([request.prompt for request in requests])
        return store_round(self.session, identity, self._paged(paged_kv, identity), requests, on_progress)

    def commit_round(
        self, round_id: str, members: Sequence[CacheKey | StoreResult], *, namespace: Namespace | None = None
    ) -> wire.CommitRoundReply:
        """Have the node elect the masters among what a round stored, and fold the rest into mirrors.

        ``members``: keys, or results of ``store``. ``namespace``: theirs; the client's own if left out.
        """
        keys = dict.fromkeys(
            key for one in members for key in (one.keys if isinstance(one, StoreResult) else (one,))
        )  # without doubles, in order
        request = wire.CommitRoundRequest(
            round=round_id, namespace=namespace or self.namespace, members=[_wire_key(key) for key in keys]
        )
        return self.session.commit_round(request)

    def delete(self, keys: Sequence[CacheKey] | None = None, *, namespace: Namespace | None = None) -> int:
        """Delete these caches, or, without ``keys``, every cache of the namespace; returns how many there were."""
        if keys is None:
            return self.session.delete(wire.DeleteRequest(namespace=namespace or self.namespace))
        if namespace is not None:
            raise InvalidInputError("give keys, or a namespace to delete all of: not both")
        return self.session.delete(wire.DeleteRequest(keys=[_wire_key(key) for key in keys]))

    def explain(self, prompts: Sequence[RoundPrompt], *, asks_others: bool = False) -> tuple[Explanation, ...]:
        """Why every segment of every prompt is found or not; see ``kvservice.client.explain``. Leases nothing."""
        return explain(self.session, prompts, asks_others=asks_others)

    def stats(self) -> dict[str, object]:
        """The node's figures, as GET /stats gives them."""
        document: dict[str, object] = json.loads(self.session.stats_json())
        return document

    def _one_identity(self, prompts: Sequence[RoundPrompt]) -> Identity:
        namespaces = {prompt.namespace for prompt in prompts}
        if len(namespaces) > 1:
            raise InvalidInputError("one call serves one engine's paged KV: all its prompts must share a namespace")
        return self.session.identity_of(namespaces.pop() if namespaces else self.namespace)

    def _paged(self, paged_kv: PagedKV, identity: Identity) -> PagedMemory:
        if paged_kv and paged_kv[0] and paged_kv[0][0].is_cuda:
            if self._pinned is None:
                self._pinned = PinnedArena(self.session.arena)
            return DevicePaged(paged_kv, identity)
        memory = self._memory
        if memory is None or not memory.is_of(paged_kv, identity):
            memory = self._memory = CpuPaged(paged_kv, identity)
        return memory

    def _unpin(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.close()


@dataclass(frozen=True, slots=True)
class _RestoreJob:
    restore: Restore
    work: RestoreWork
    plans: Plans
    is_verified: bool
    on_progress: Progress | None

    def start(self) -> None:
        """The first layer, if it takes no longer than waking a thread would: the engine waits for it."""
        is_small = 0 < self.work.layer_bytes <= min(STARTED_BYTES_MAX, self.work.memory.batch_bytes_max)
        if is_small and self.on_progress is None:
            self.restore.start(self.work, self.plans, verify=self.is_verified)

    def run(self) -> None:
        self.restore.run(self.work, self.plans, verify=self.is_verified, on_progress=self.on_progress)

    def fail(self) -> None:
        self.restore.fail(UnavailableError("the client was closed before the restore began; nothing was written"))


def _wire_key(key: CacheKey) -> wire.CacheKey:
    return wire.CacheKey(segment=key.segment, context=key.context)
