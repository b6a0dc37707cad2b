"""Does the slab move records as fast as fio moves blocks of their size, with O_DIRECT, at the same depth?

The slab and a plain file of the same folder are first written once, so that neither pays for new blocks. Then both
take turns within a round, and each ratio is that of two neighbours: other load on the machine falls on both. Depth is
the number of threads, here and in fio. Prints a table and writes build/bench/ssd.json. Run: python bench/ssd.py
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvservice.model.cache import Extent
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import RealDisk, block_buffer
from kvservice.storage.slab import Slab, Stamp, taken_bytes

MIB = 1 << 20
SIZES_MIB, DEPTHS = (1, 4, 16, 64), (1, 4)
UNEVEN_BYTES = 64 * 5  # no record ends on a block
FOLDER, RESULT = Path("build/bench"), Path("build/bench/ssd.json")
FIO_FILE = "fio.dat"


@dataclass(frozen=True, slots=True)
class Sample:
    """One pass over all records."""

    gb_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One operation at one size and depth: medians of the rounds; of the ratio also quartiles."""

    operation: str
    record_mib: int
    depth: int
    gb_s: float
    fio_gb_s: float
    of_fio: float
    of_fio_p25: float
    of_fio_p75: float
    cpu_s_per_gb: float
    fio_cpu_s_per_gb: float


class Records:
    """A slab full of records of one size, and a buffer a thread."""

    def __init__(self, slab: Slab, record_bytes: int, depth: int, total_bytes: int) -> None:
        self._slab, self._record_bytes, self._depth = slab, record_bytes, depth
        self._extents = [slab.reserve(record_bytes) for _ in range(total_bytes // taken_bytes(record_bytes))]
        rng = np.random.default_rng(0)
        self._buffers = [block_buffer(taken_bytes(record_bytes))[:record_bytes] for _ in range(depth)]
        for buffer in self._buffers:
            buffer[:] = rng.integers(0, 256, record_bytes, np.uint8)

    def write(self) -> Sample:
        """Write every record once."""
        return self._all(lambda extent, buffer: self._slab.write(extent, buffer, self._stamp()))

    def read(self) -> Sample:
        """Read every record once, piece by piece."""
        return self._all(self._read)

    def free(self) -> None:
        """Give the places back."""
        for extent in self._places():
            self._slab.free(extent)

    def _read(self, extent: Extent, buffer: Bytes) -> None:
        for start, end in self._slab.pieces(extent):
            self._slab.read_piece(extent, start, end, buffer[start:end])

    def _stamp(self) -> Stamp:
        return Stamp(self._slab.next_sequence(), 0, 0.0)

    def _places(self) -> list[Extent]:
        return [extent for extent in self._extents if extent is not None]

    def _all(self, move: Callable[[Extent, Bytes], None]) -> Sample:
        def share(number: int) -> None:
            for extent in self._places()[number :: self._depth]:
                move(extent, self._buffers[number])

        before, started = cpu_seconds(), time.perf_counter()
        with ThreadPoolExecutor(self._depth) as pool:
            list(pool.map(share, range(self._depth)))
        took, gigabytes = time.perf_counter() - started, len(self._places()) * self._record_bytes / 1e9
        return Sample(gigabytes / took, (cpu_seconds() - before) / gigabytes)


def cpu_seconds() -> float:
    """Of this process, all threads, in user and kernel."""
    times = os.times()
    return times.user + times.system


def run_fio(path: Path, operation: str, record_bytes: int, depth: int, total_bytes: int) -> Sample:
    """The same with fio: ``depth`` threads of blocking calls of a record's size, each in its own part of the file."""
    share = total_bytes // depth // record_bytes * record_bytes
    command = [
        "fio", "--name=bench", f"--filename={path}", f"--rw={operation}", f"--bs={record_bytes}", "--direct=1",
        "--ioengine=psync", "--thread", f"--numjobs={depth}", f"--size={share}", f"--offset_increment={share}",
        "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    busy_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Sample(job[operation]["bw_bytes"] / 1e9, busy_s / (job[operation]["io_bytes"] / 1e9))


def measure(slab: Slab, path: Path, record_mib: int, depth: int, total_bytes: int, rounds: int) -> list[Figure]:
    """Both operations at one size and depth."""
    records = Records(slab, record_mib * MIB - UNEVEN_BYTES, depth, total_bytes)
    taken: dict[str, list[tuple[Sample, Sample]]] = {"write": [], "read": []}
    for number in range(rounds):
        for operation, own in (("write", records.write), ("read", records.read)):
            fio = partial(run_fio, path, operation, record_mib * MIB, depth, total_bytes)
            taken[operation].append((own(), fio()) if number % 2 else (fio(), own())[::-1])
    records.free()
    return [figure(operation, record_mib, depth, pairs) for operation, pairs in taken.items()]


def figure(operation: str, record_mib: int, depth: int, pairs: Sequence[tuple[Sample, Sample]]) -> Figure:
    """Medians of what the rounds took."""
    low, middle, high = np.quantile([ours.gb_s / fio.gb_s for ours, fio in pairs], [0.25, 0.5, 0.75])
    return Figure(
        operation,
        record_mib,
        depth,
        gb_s=round(statistics.median(ours.gb_s for ours, _ in pairs), 2),
        fio_gb_s=round(statistics.median(fio.gb_s for _, fio in pairs), 2),
        of_fio=round(float(middle), 3),
        of_fio_p25=round(float(low), 3),
        of_fio_p75=round(float(high), 3),
        cpu_s_per_gb=round(statistics.median(ours.cpu_s_per_gb for ours, _ in pairs), 3),
        fio_cpu_s_per_gb=round(statistics.median(fio.cpu_s_per_gb for _, fio in pairs), 3),
    )


@contextmanager
def slab_and_file(parent: Path, total_bytes: int) -> Iterator[tuple[Slab, Path]]:
    """Both of this size, written once, in a folder that is removed afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder, ExitStack() as stack:
        disk = RealDisk(Path(folder))
        stack.callback(disk.close)
        slab = Slab.create(disk, total_bytes + 64 * MIB)
        stack.callback(slab.close)
        records = Records(slab, 16 * MIB - UNEVEN_BYTES, 1, slab.capacity_bytes)
        records.write()
        records.free()
        path = disk.folder / FIO_FILE
        run_fio(path, "write", 16 * MIB, 1, total_bytes)
        yield slab, path


def report(figures: Sequence[Figure]) -> None:
    """Table and file."""
    columns = f"{'MiB':>5}{'depth':>6}{'slab GB/s':>11}{'fio GB/s':>10}{'of fio':>8}{'quartiles':>16}{'CPU s/GB':>10}"
    print(f"{'':6}{columns}{'fio':>7}")
    for one in figures:
        spread = f"{one.of_fio_p25:.2f} - {one.of_fio_p75:.2f}"
        print(
            f"{one.operation:6}{one.record_mib:5}{one.depth:6}{one.gb_s:11.2f}{one.fio_gb_s:10.2f}{one.of_fio:8.2f}"
            f"{spread:>16}{one.cpu_s_per_gb:10.3f}{one.fio_cpu_s_per_gb:7.3f}"
        )
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"figures": [asdict(one) for one in figures]}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Measure, print the table, write the report. Exit code 2 without fio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=1024, help="moved in every pass")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        print("fio is missing: there is nothing to compare with. Install it (apt-get install fio)", file=sys.stderr)
        sys.exit(2)
    with slab_and_file(options.folder, options.mib * MIB) as (slab, path):
        figures = [
            one
            for record_mib in SIZES_MIB
            for depth in DEPTHS
            for one in measure(slab, path, record_mib, depth, options.mib * MIB, options.rounds)
        ]
    report(sorted(figures, key=lambda one: one.operation, reverse=True))


if __name__ == "__main__":
    main()
