"""Memory for rows on their way: never more than allowed, used again, and one buffer for all chunks of a step."""

import numpy as np

from kvservice.client.connectors.vllm.chunks import Chunk
from kvservice.client.connectors.vllm.metadata import SaveOrder
from kvservice.client.connectors.vllm.staging import IDLE_BUFFERS_MAX, Gathered, Staging
from kvservice.model.geometry import Geometry, Plane
from kvservice.model.segment import EXACT

GEOMETRY = Geometry(3, "bfloat16", (Plane("K", 2, 16), Plane("V", 1, 8)))


def order(start: int, end: int) -> SaveOrder:
    return SaveOrder(f"{start}", Chunk(start, end, (), (), EXACT), ())


def test_a_buffer_serves_again_what_takes_half_of_it() -> None:
    staging = Staging(100)
    first = staging.take(60)
    assert first is not None
    staging.give_back(first)
    assert staging.take(30) is first
    assert staging.used_bytes == 60, "all of it is taken"
    staging.give_back(first)
    other = staging.take(29)
    assert other is not None
    assert other is not first
    assert (staging.used_bytes, staging.free_bytes) == (29, 71)


def test_the_smallest_that_fits_is_taken() -> None:
    staging = Staging(100)
    buffers = [staging.take(length) for length in (30, 20, 25)]
    for one in buffers:
        assert one is not None
        staging.give_back(one)
    assert staging.take(18) is buffers[1]


def test_there_is_never_more_than_allowed() -> None:
    staging = Staging(100)
    large = staging.take(90)
    assert large is not None
    assert staging.take(11) is None
    staging.give_back(large)
    small = staging.take(10)
    assert small is not None
    again = staging.take(50)
    assert again is not None
    assert again is large, "it fits beside the small one"
    assert staging.take(1) is None
    assert staging.used_bytes == 100
    kept = [staging.take(0) for _ in range(2 * IDLE_BUFFERS_MAX)]
    for one in kept:
        assert one is not None
        staging.give_back(one)
    assert len(staging._idle) <= IDLE_BUFFERS_MAX


def test_rows_of_a_steps_chunks_follow_each_other_in_every_plane() -> None:
    orders = [order(0, 4), order(4, 5), order(9, 12)]
    buffer = np.zeros(8 * GEOMETRY.token_bytes + 100, np.uint8)
    gathered = Gathered.of(orders, GEOMETRY, buffer)
    assert [draft.order for draft in gathered.drafts] == orders
    for layer, planes in enumerate(gathered.planes):
        assert [rows.shape for rows in planes] == [(8, 32), (8, 8)]
        for plane, rows in enumerate(planes):
            rows[:] = 10 * layer + plane
            rows[:] += np.arange(8, dtype=rows.dtype)[:, None] * 100
    found = [
        [draft.planes[layer][plane][:, 0].tolist() for draft in gathered.drafts]
        for layer in range(3)
        for plane in range(2)
    ]
    for index, drafts in enumerate(found):
        first = 10 * (index // 2) + index % 2
        assert drafts == [[first + 100 * row for row in rows] for rows in ((0, 1, 2, 3), (4,), (5, 6, 7))]
