"""A record that another node is being sent: it stays where it is, and comes from SSD meanwhile if need be."""

from kvservice.caches import Cache
from kvservice.loads import Feed, Load
from kvservice.model.errors import DiskError, KVServiceError
from kvservice.model.identity import INT8
from kvservice.node import Node
from kvservice.peers.host_loop import LOOP_S_MAX, NodeLoop
from kvservice.peers.streams_channel import Source
from kvservice.storage.record_layout import RecordLayout
from kvservice.storage.record_reader import read_head

ARRIVAL_S_MAX = 10.0
"""Without a layer more from SSD for so long, a fetch is given up."""


class NodeHeld:
    """See Held: a cache under a hold. ``load``: what brings it from SSD, if it is on its way."""

    def __init__(self, node: Node, loop: NodeLoop, cache: Cache, load: Load | None) -> None:
        self._catalog = node.catalog
        self._loop = loop
        self._cache = cache
        self._load = load
        self._feed = Feed()
        self._layout: RecordLayout | None = None
        if load is not None:
            self._feed.add([load])
        self.record_bytes = cache.record_bytes
        arena = node.tier.arena
        self._view = arena.slice(cache.extent)
        self.source = Source(self._view.data, arena.descriptor(), cache.extent.offset)

    @property
    def first_layer_end(self) -> int:
        """Where the first layer ends in the record, which must have arrived. Raises CorruptError or RecordFormatError
        for what is no record."""
        return self._end_of(1)

    @property
    def may_pack(self) -> bool:
        """See Held."""
        return self._cache.family.space.identity.lossy == INT8

    def wait(self, beyond: int) -> int:
        """See Held."""
        if self._load is None:
            return self.record_bytes
        while True:
            step, layers, error = self._loop.call(self._look)
            end = self._end_of(layers)
            if end > beyond:
                return end
            if error is not None:
                raise error
            self._loop.wait_for(self._more(step, self._load), ARRIVAL_S_MAX + LOOP_S_MAX)

    def _look(self) -> tuple[int, int, KVServiceError | None]:
        assert self._load is not None
        return self._feed.step, self._load.layers, self._load.error

    async def _more(self, step: int, load: Load) -> None:
        await self._feed.wait(step, ARRIVAL_S_MAX)
        if self._feed.step <= step and not load.is_done:
            raise DiskError(f"cache {self._cache}: nothing came from SSD for {ARRIVAL_S_MAX:g} s; ask again later")

    def _end_of(self, layers: int) -> int:
        """Where the layers that have arrived end in the record."""
        if not layers:
            return 0
        if self._layout is None:
            self._layout = read_head(self._view).layout
        return self._layout.bounds[layers]

    def release(self) -> None:
        """See Held."""
        self._loop.post(self._release)

    def _release(self) -> None:
        if self._load is not None:
            self._load.feeds.discard(self._feed)
        self._catalog.unhold(self._cache)
