"""Builders with defaults. Records are filled from a seed, so that a failure can be repeated."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.geometry import Geometry, attention_geometry
from kvservice.model.identity import Namespace
from kvservice.model.segment import EXACT, CacheKey, ContextId, SegmentId
from kvservice.storage.buffer import Bytes, Runs, StorageBits
from kvservice.storage.record import RecordWriter, master_layout, mirror_layout

REFERENCE = MasterReference(ContextId(b"m" * 32), 0x0123456789ABCDEF)
DIRT = 0xEE


class RecordBuilder:
    """Makes metas, runs and whole records. Buffers are dirty before, so that a byte left unwritten shows."""

    reference = REFERENCE

    def meta(
        self,
        *,
        tokens: int = 5,
        geometry: Geometry | None = None,
        position: int = 7,
        master: MasterReference | None = None,
        provenance: str = EXACT,
        preceding: tuple[bytes, ...] = (b"8 bytes.", b"nearest!"),
        segment: bytes = b"s" * 32,
    ) -> CacheMeta:
        return CacheMeta(
            namespace=Namespace(b"n" * 32),
            key=CacheKey(SegmentId(segment), ContextId(b"c" * 32)),
            position=position,
            tokens=tokens,
            geometry=geometry or attention_geometry(layers=2, heads=2, head_size=4, dtype="bfloat16"),
            provenance=provenance,
            preceding=preceding,
            master=master,
        )

    def mirror_meta(self, *, tokens: int = 5, geometry: Geometry | None = None) -> CacheMeta:
        return self.meta(tokens=tokens, geometry=geometry, master=REFERENCE)

    def runs(self, *pairs: tuple[int, int]) -> Runs:
        return np.array(pairs, np.int32).reshape(len(pairs), 2)

    def master(self, meta: CacheMeta, seed: int = 0) -> Bytes:
        random, layout = np.random.default_rng(seed), master_layout(meta)
        buffer = np.full(layout.record_bytes, DIRT, np.uint8)
        writer = RecordWriter(buffer, meta, layout)
        for layer in range(meta.geometry.layers):
            fill(writer.master_planes(layer), random)
        writer.finish()
        return buffer

    def mirror(self, meta: CacheMeta, runs: Sequence[Sequence[Runs]], seed: int = 0) -> Bytes:
        random, layout = np.random.default_rng(seed), mirror_layout(meta, runs)
        buffer = np.full(layout.record_bytes, DIRT, np.uint8)
        writer = RecordWriter(buffer, meta, layout)
        for layer, runs_of_layer in enumerate(runs):
            fill(writer.mirror_rows(layer, runs_of_layer), random)
        writer.finish()
        return buffer

    def small_mirror(self) -> Bytes:
        """Layer 0 has no diff; layer 1 has two runs in K, none in V."""
        return self.mirror(self.mirror_meta(), [[self.runs(), self.runs()], [self.runs((0, 1), (3, 2)), self.runs()]])


def fill(planes: Sequence[StorageBits], random: np.random.Generator) -> None:
    for plane in planes:
        plane[...] = random.integers(0, np.iinfo(plane.dtype).max, plane.shape, plane.dtype, endpoint=True)


@pytest.fixture(scope="session")
def build() -> RecordBuilder:
    return RecordBuilder()
