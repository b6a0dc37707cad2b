"""A way to another node on which rows that have a form of 8 bits come and go so: half the bytes, the same bits.

A carrier beside the link's own: which of the two is faster depends on the network between, and is found out by use.
"""

from collections.abc import Iterable, Sequence

from kvservice.caches import Space
from kvservice.model.segment import CacheKey
from kvservice.peers.streams_client import PeerLink
from kvservice.sharing.place import Offer, Parcel, Question
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import OnPiece, RemoteRecord


class PackedStream:
    """See Carrier. ``link``: what everything goes over; it is closed by whoever made it.

    Until the kernels of both nodes are loaded, which the first call sees to, rows come and go as they lie.
    """

    def __init__(self, link: PeerLink) -> None:
        self._link = link

    @property
    def name(self) -> str:
        """See Carrier."""
        return self._link.name

    async def find(self, questions: Sequence[Question], ahead_bytes: int = 0) -> list[Offer | None]:
        """See Carrier. What comes ahead is not packed."""
        return await self._link.find(questions, ahead_bytes)

    async def fetch(self, record: RemoteRecord, target: Bytes, on_piece: OnPiece, start: int = 0) -> None:
        """See Carrier."""
        await self._link.fetch(record, target, on_piece, start, packed=True)

    def let_go(self, records: Iterable[RemoteRecord]) -> None:
        """See Carrier."""
        self._link.let_go(records)

    async def store(self, parcel: Parcel) -> bool:
        """See Carrier."""
        return await self._link.store(parcel, packed=True)

    async def delete(self, space: Space, keys: Sequence[CacheKey] | None) -> int:
        """See Carrier."""
        return await self._link.delete(space, keys)

    async def close(self) -> None:
        """The link goes on."""
