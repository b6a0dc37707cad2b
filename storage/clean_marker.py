"""Two small files beside the slab: the mark of a clean stop, and the number of the last boot. Hostile until checked."""

import json
import logging
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from xxhash import xxh3_64_hexdigest

from kvservice.model.errors import DiskError
from kvservice.storage.disk import Disk
from kvservice.storage.ssd_index import IndexDigest

log = logging.getLogger(__name__)

MARKER_NAME = "CLEAN"
EPOCH_NAME = "epoch"
EPOCH_MAX = (1 << 63) - 1
EPOCH_DIGITS_MAX = 19


@dataclass(frozen=True, slots=True)
class CleanMarker:
    """What was true when the service stopped.

    ``boot_epoch``: of the boot that stopped. ``sequence``: no write had a higher number. ``digest``: of the index.
    """

    slab_uuid: UUID
    boot_epoch: int
    sequence: int
    digest: IndexDigest


def write_marker(disk: Disk, marker: CleanMarker) -> None:
    """Put the marker into the folder, as JSON with a checksum over the rest. DiskError if that fails."""
    fields = {
        "slab_uuid": str(marker.slab_uuid),
        "boot_epoch": marker.boot_epoch,
        "sequence": marker.sequence,
        "entries": marker.digest.count,
        "index_checksum": marker.digest.checksum,
    }
    disk.write_small(MARKER_NAME, json.dumps(fields | {"checksum": _checksum(fields)}).encode() + b"\n")


def read_marker(disk: Disk) -> CleanMarker | None:
    """The marker, or None if there is none that can be believed."""
    data = _read(disk, MARKER_NAME)
    if data is None:
        return None
    try:
        fields = _opened(data)
        digest = IndexDigest(fields["entries"], fields["index_checksum"])
        return CleanMarker(UUID(fields["slab_uuid"]), fields["boot_epoch"], fields["sequence"], digest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning("%s is damaged (%s): every record's head is read", disk.folder / MARKER_NAME, error)
        return None


def remove_marker(disk: Disk) -> None:
    """Take the marker away, for good, and what a stop that was killed while it wrote one left. DiskError."""
    disk.remove(MARKER_NAME)
    disk.remove(f"{MARKER_NAME}.new")  # see RealDisk.write_small


def read_epoch(disk: Disk) -> int | None:
    """The last boot's epoch, or None if the file is missing or holds no such number."""
    data = _read(disk, EPOCH_NAME)
    if data is None:
        return None
    text = data.strip()
    if not text.isdigit() or len(text) > EPOCH_DIGITS_MAX or int(text) >= EPOCH_MAX:
        log.warning("%s is damaged: the boot epoch is taken from the clock", disk.folder / EPOCH_NAME)
        return None
    return int(text)


def write_epoch(disk: Disk, epoch: int) -> None:
    """Keep this boot's epoch. DiskError if that fails."""
    disk.write_small(EPOCH_NAME, b"%d\n" % epoch)


def next_epoch(earlier: list[int | None], now_ns: int) -> int:
    """Above every earlier epoch that is known, and the time if that is higher: it rises though a clock jumps back."""
    return max([now_ns, *(epoch + 1 for epoch in earlier if epoch is not None)])


def _read(disk: Disk, name: str) -> bytes | None:
    try:
        return disk.read_small(name)
    except DiskError as error:
        log.warning("%s counts as missing: %s", name, error)
        return None


def _opened(data: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(data)
    if fields.pop("checksum") != _checksum(fields):
        raise ValueError("its checksum differs")
    return fields


def _checksum(fields: dict[str, object]) -> str:
    return xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())
