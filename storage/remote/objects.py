"""What an engine of remote storage has to do: keep byte strings under names. All that is the same in every engine,
verification, deadlines, breaker and counts, is in tier.py, once.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

from kvservice.model.identity import Namespace
from kvservice.model.segment import ContextId, SegmentId
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import RemoteFeatures, RemoteName, RemoteRecord
from kvservice.storage.remote.label import Label
from kvservice.storage.remote.pieces import Landing

HEAD_READ_BYTES = 8192
"""Label, prefix and header of all but very deep models: 100 layers have a header of 2 KB."""


class FirstBytes(NamedTuple):
    """How an object begins. ``data`` is on a 16-byte boundary and nobody else's; it may be shorter than asked for.

    ``object_bytes``: its length, -1 where the place does not say. ``version``: the place's word for these very bytes,
    empty to use the label's.
    """

    data: Bytes
    object_bytes: int = -1
    version: str = ""


class Objects(Protocol):
    """An engine. Raises the project's errors only, as contract.py says; it is cancelled when a deadline runs out."""

    @property
    def name(self) -> str:
        """One word, for metrics and messages."""

    @property
    def features(self) -> RemoteFeatures:
        """What it can do."""

    async def first_bytes(self, names: Sequence[RemoteName], most: int) -> list[FirstBytes | None]:
        """Up to ``most`` first bytes of every object, None for one that is not there."""

    async def contexts(self, namespace: Namespace, segment: SegmentId, most: int) -> list[ContextId]:
        """Up to ``most`` contexts of a segment that are held, newest first where known. Empty if it cannot list."""

    async def read(self, record: RemoteRecord, landing: Landing, start: int) -> None:
        """Land the record's bytes from ``start`` on.

        Raises CorruptError if the object is another one by now, StaleEpochError if it is gone.
        """

    async def create(self, name: RemoteName, label: Label, record: Bytes) -> bool:
        """Keep label and record as one; False if the name is taken. Touches ``record`` only until it returns."""

    async def delete(self, name: RemoteName) -> bool:
        """Forget a name; was it there?"""

    def delete_all(self, namespace: Namespace) -> AsyncGenerator[int]:
        """Forget all of a namespace; of every batch, which is one deadline's work, how many. NotListedError: it cannot.

        What somebody else put under names like ours stays.
        """

    async def close(self) -> None:
        """End what is open. Called once."""
