"""Block hashes of requests whose KV may be refreshed: the engine's prefix cache must never serve it as exact.

The engine names a block by the tokens up to its end, and by nothing else. So the block that holds the first row which
may be refreshed gets another name, and with it every block behind: their names are chained. Blocks before keep theirs,
and are shared with exact requests in both directions. Imports no engine; `vllm.v1.request.Request` through the fields
used here.
"""

from collections.abc import Callable
from typing import Any

from kvservice.model.segment import digest

Hasher = Callable[[Any], list[bytes]]
EXACT_END = "kvservice_exact_end"
"""What a spliced request is marked with, for as long as it lives: where its exact rows end, in tokens."""
HASHER = "kvservice_hasher"
"""Where a spliced request keeps the hasher that the engine gave it."""


def splice_block_hashes(request: Any, first_token: int, block_size: int, mark: bytes) -> None:
    """Rename a request's blocks from the one that holds ``first_token`` on; blocks that come later are renamed too.

    ``mark``: how the KV is refreshed. Requests with equal tokens and marks share blocks, so it must not name a request.
    ``block_size``: tokens of a hashed block. Without prefix caching there are no names, and nothing is done. To be
    called before the engine first looks for its blocks, and again, while it has none, if it is refreshed otherwise.
    """
    setattr(request, EXACT_END, first_token)
    hasher: Hasher | None = getattr(request, HASHER, request._block_hasher)
    if hasher is None:
        return
    setattr(request, HASHER, hasher)
    first = first_token // block_size
    request._block_hasher = _spliced(hasher, first, mark)
    del request.block_hashes[first:]
    request.update_block_hashes()


def _spliced(hasher: Hasher, first: int, mark: bytes) -> Hasher:
    def hash_blocks(request: Any) -> list[bytes]:
        known: list[bytes] = request.block_hashes
        hashes = hasher(request)
        at = first - len(known)
        if not 0 <= at < len(hashes):
            return hashes
        renamed = hashes[at]
        ours = [*hashes[:at], digest(b"kvservice refreshed block\0", renamed, mark)[: len(renamed)]]
        known.extend(ours)  # the hasher chains behind what the request has
        behind = hasher(request)
        del known[len(known) - len(ours) :]
        return [*ours, *behind]

    return hash_blocks
