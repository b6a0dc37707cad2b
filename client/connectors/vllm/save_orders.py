"""What is to be saved of a step, and of a request that ends: chunks and segments whose rows are all there by then.

State and decisions only: the workers copy and store. Imports no engine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvservice.client.connectors.vllm.chunks import Chunk
from kvservice.client.connectors.vllm.members import Member
from kvservice.client.connectors.vllm.metadata import SaveOrder
from kvservice.client.connectors.vllm.tracked import KnownKeys, Tracked


class SaveOrders:
    """``known``: keys that the service holds, or is about to; they are not saved again."""

    def __init__(self, block_size: int, chunk_tokens: int, known: KnownKeys) -> None:
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._known = known

    def of_step(self, output: Any, requests: Mapping[str, Tracked]) -> Iterator[SaveOrder]:
        """Of the step that ``output`` (SchedulerOutput) describes. Follows the engine's blocks as well."""
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            tracked = requests.get(new.req_id)
            if tracked is not None:
                tracked.blocks = list(new.block_ids[0])
                yield from self._of_request(tracked, new.num_computed_tokens + scheduled[new.req_id])
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, added, computed in rows:
            tracked = requests.get(request_id)
            if tracked is not None:
                if request_id in cached.resumed_req_ids:
                    tracked.blocks = []
                tracked.blocks.extend(added[0] if added is not None else ())
                yield from self._of_request(tracked, computed + scheduled[request_id])

    def of_output(self, tracked: Tracked) -> SaveOrder | None:
        """What an agent has said and ended by itself: all of it is what later prompts may hold. None if it has not."""
        request, member = tracked.request, tracked.member
        status = getattr(getattr(request, "status", None), "name", "")
        if member is None or member.saves is None or status != "FINISHED_STOPPED":
            return None
        end = int(request.num_tokens) - 1  # the last token, which ended it, has no KV and is no part of it
        chunk = member.output_chunk(request.all_token_ids[:end])
        if chunk is None or int(request.num_computed_tokens) < end:
            return None
        order = next(self._order(tracked, chunk), None)
        return None if order is None else replace(order, is_last=True)

    def _of_request(self, tracked: Tracked, computed: int) -> Iterator[SaveOrder]:
        """Chunks that are whole once the step has run. Drafted tokens may be rejected, so only known ones count."""
        chain, request = tracked.chain, tracked.request
        whole = min(computed, request.num_tokens)
        if tracked.taken < request.num_prompt_tokens or whole - chain.end >= self._chunk_tokens:
            tracked.extend()
        while tracked.saved < len(chain.chunks) and chain.chunks[tracked.saved].end <= whole:
            chunk = chain.chunks[tracked.saved]
            tracked.saved += 1
            yield from self._order(tracked, chunk)
        if not tracked.is_tail_done and whole >= request.num_prompt_tokens:
            tracked.is_tail_done = True
            tail = tracked.tail()
            if tail is not None:
                yield from self._order(tracked, tail)
        member = tracked.member
        if member is not None:
            yield from self._of_member(tracked, member, whole)

    def _of_member(self, tracked: Tracked, member: Member, whole: int) -> Iterator[SaveOrder]:
        for save in member.due(whole):
            for order in self._order(tracked, save.chunk):
                member.unsettled += 1
                prompt = member.prompt if save.is_brought else None
                yield replace(order, is_awaited=True, prompt=prompt, index=save.index)

    def _order(self, tracked: Tracked, chunk: Chunk) -> Iterator[SaveOrder]:
        size = self._block_size
        blocks, skip = tuple(tracked.blocks[chunk.start // size : -(-chunk.end // size)]), chunk.start % size
        if chunk not in self._known and len(blocks) * size >= skip + chunk.tokens:
            self._known.add(chunk)
            yield SaveOrder(tracked.request.request_id, chunk, blocks, skip)
