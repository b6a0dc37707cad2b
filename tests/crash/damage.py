"""Harm done to the folder of a service that is not running: index files, and bits of records on the slab."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

from kvservice.model.segment import CacheKey
from kvservice.storage.disk import RealDisk
from kvservice.storage.recovery import INDEX_NAME
from kvservice.storage.slab import SLAB_NAME, Slab
from kvservice.storage.slab_format import Found, FoundRecord, taken_bytes

FLIPS_MAX = 3
INDEX_DAMAGES = ("index removed", "index file removed", "index file cut", "index bits flipped", "index file emptied")


def damage_index(rng: Random, folder: Path) -> tuple[str, str]:
    """Remove the index, or harm one of its files; says what was done, and to which file."""
    index = folder / INDEX_NAME
    files = sorted(path for path in index.glob("*") if path.is_file()) if index.is_dir() else []
    if not files:
        return "no index", ""
    what = rng.choice(INDEX_DAMAGES)
    path = rng.choice(files)
    size = path.stat().st_size
    match what:
        case "index removed":
            shutil.rmtree(index)
        case "index file removed":
            path.unlink()
        case "index file cut":
            os.truncate(path, rng.randrange(size + 1))
        case "index file emptied":
            os.truncate(path, 0)
        case _:
            flip_bits(rng, path, [(0, size)] * min(8, size))
    return what, path.name


def flip_bits(rng: Random, path: Path, stretches: Sequence[tuple[int, int]]) -> None:
    """One bit in each stretch (start, end) of a file."""
    with path.open("r+b") as file:
        for start, end in stretches:
            at = rng.randrange(start, end)
            file.seek(at)
            byte = file.read(1)[0] ^ 1 << rng.randrange(8)
            file.seek(at)
            file.write(bytes([byte]))


def scan_slab(folder: Path) -> list[Found]:
    """All that is whole on the slab; reads only, unless the slab was growing when its service died."""
    disk = RealDisk(folder)
    try:
        slab = Slab.open(disk, (folder / SLAB_NAME).stat().st_size)
        found = list(slab.scan({}))
        slab.close()
    finally:
        disk.close()
    return found


def flip_records(rng: Random, folder: Path) -> list[CacheKey]:
    """Flip a bit in each of some records, anywhere from their first byte to their footer; whose they are."""
    records = [one for one in scan_slab(folder) if isinstance(one, FoundRecord)]
    chosen = rng.sample(records, min(len(records), rng.randrange(1, FLIPS_MAX + 1)))
    for record in chosen:
        start = record.extent.offset
        length = taken_bytes(record.extent.length) if rng.random() < 0.2 else record.extent.length
        flip_bits(rng, folder / SLAB_NAME, [(start, start + length)])
    return [record.head.meta.key for record in chosen]
