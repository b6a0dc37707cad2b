"""A dry run of all that a pass calls, on a few scratch blocks: kernels are compiled, or fetched, before one is needed.

Without it the first pass of a machine would hold up the engine for the seconds that compiling takes.
"""

from dataclasses import replace

import numpy as np
import torch

from kvservice.client.connectors.vllm.engine_memory import engine_memory
from kvservice.client.connectors.vllm.layout import scratch_blocks
from kvservice.client.connectors.vllm.paged import EnginePaged, Place
from kvservice.client.connectors.vllm.snapshot import Snapshot, StagedRows
from kvservice.client.connectors.vllm.staging import Staging
from kvservice.client.paged import DTYPES, check_target_slots, layer_rotations
from kvservice.client.reuse.refresh import deviation
from kvservice.client.store_draft import Draft
from kvservice.kernels.cpu_tables import slot_bounds
from kvservice.kernels.shapes import Target
from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.identity import Identity
from kvservice.model.segment import DIGEST_BYTES, CacheKey, ContextId, SegmentId
from kvservice.storage.record import RecordReader, RecordWriter, master_layout, mirror_layout

BLOCKS = 3


def warm_up(paged: EnginePaged, identity: Identity) -> None:
    """Restore a master and a mirror of zeros, compare, copy and store rows. The engine's own memory is not touched."""
    caches = [scratch_blocks(cache, BLOCKS) for cache in paged.caches]
    scratch = EnginePaged(caches, paged.layouts, paged.indices, paged.block_size, paged.geometry)
    tokens = scratch.layouts[0].block_size + 1
    master, mirror = _records(identity, tokens)
    slots = np.arange(2 * tokens, dtype=np.int64)
    memory = engine_memory(scratch, identity)
    by = 0 if identity.pinned_reason else 1
    targets = [Target(by, slots[:tokens]), Target(by, slots[tokens:])]
    check_target_slots([target.slots for target in targets], memory.slot_count)
    slot_bounds(slots)
    segment = memory.prepare(master, targets, [None, mirror])
    segment.open_layers(0, identity.geometry.layers)
    segment.restore_layers(0, identity.geometry.layers)
    memory.finish_layer(identity.geometry.layers - 1)
    plane = identity.geometry.planes[0]
    rows = torch.zeros((tokens, plane.heads, plane.head_size), dtype=DTYPES[identity.geometry.dtype])
    deviation((rows,), (rows,))
    scratch.gather(
        0, Place(torch.from_numpy(slots)), [torch.zeros((len(slots), plane.row_elements), dtype=rows.dtype)] * 2
    )
    snapshot = Snapshot.begin(scratch, identity, [slots], Staging(len(slots) * identity.geometry.token_bytes))
    assert snapshot is not None
    snapshot.take()
    bits = [
        np.zeros((len(slots), one.row_elements), master.master_planes(0)[0].dtype) for one in identity.geometry.planes
    ]
    snapshot.gather_layer(0, snapshot.slots_of(0), bits)
    snapshot.close()
    _compare(identity, master, by)


def _compare(identity: Identity, master: RecordReader, by: int) -> None:
    """Find and rebuild a difference, as a store does where nobody knows the rows, and where their master went."""
    draft = Draft(identity, replace(master.meta, position=by), np.arange(master.meta.tokens), master)
    planes = [[plane.copy() for plane in master.master_planes(layer)] for layer in range(identity.geometry.layers)]
    memory, rotations = StagedRows(identity, planes), layer_rotations(identity)
    draft.find_diff(memory, rotations)
    draft.is_known = True
    draft.make_whole()
    _, layout = draft.record()
    draft.write(np.zeros(layout.record_bytes, np.uint8), memory, rotations)


def _records(identity: Identity, tokens: int) -> tuple[RecordReader, RecordReader]:
    """A master of zeros, and a mirror of it in which one row of every layer is replaced."""
    key = CacheKey(SegmentId(bytes(DIGEST_BYTES)), ContextId(bytes(DIGEST_BYTES)))
    meta = CacheMeta(identity.namespace(), key, 0, tokens, identity.geometry)
    layout = master_layout(meta)
    buffer = np.zeros(layout.record_bytes, np.uint8)
    RecordWriter(buffer, meta, layout).finish()
    master = RecordReader(buffer)
    planes = len(identity.geometry.planes)
    runs = [[np.array([[0, 1]], np.int32)] * planes for _ in range(identity.geometry.layers)]
    own = replace(meta, master=MasterReference(key.context, master.generation))
    mirror_bytes = mirror_layout(own, runs)
    buffer = np.zeros(mirror_bytes.record_bytes, np.uint8)
    writer = RecordWriter(buffer, own, mirror_bytes)
    for layer in range(identity.geometry.layers):
        writer.mirror_rows(layer, runs[layer])
    writer.finish()
    return master, RecordReader(buffer)
