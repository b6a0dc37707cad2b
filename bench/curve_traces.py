"""Records what a node was asked for and what was stored, in order, as files for tests of the curves.

A node in this process with a request log and a small arena; real clients play debates of agents on it
(bench/agent_rounds.py), of two tenants. One row an event: a lookup's segment, found or missed, or a cache that was
published, or took another form. Ids are numbered as they come. Run: PYTHONPATH=. python -m bench.curve_traces FOLDER
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.agent_rounds import Debates, Engine, make_identity
from kvservice.app import LocalNode
from kvservice.caches import Cache
from kvservice.client import Client
from kvservice.config import Settings
from kvservice.lookup import Asked, Finding
from kvservice.node import Node
from kvservice.request_log import Begun, RequestLog

FOUND, MISSED, STORED = range(3)
COLUMNS = ("kind", "space", "segment", "context", "master", "record_bytes", "tokens")
NOTHING = -1
TRACES: dict[str, dict[str, Any]] = {
    "wide": {"debates": 400, "agents": 5, "rounds": 600, "exponent": 0.6, "host_bytes": 64 << 20},
    "deep": {"debates": 60, "agents": 8, "rounds": 330, "exponent": 1.0, "host_bytes": 128 << 20},
}
"""``rounds``: of each of two tenants."""


class Numbers(dict[bytes, int]):
    """Numbers things as they come."""

    def __missing__(self, key: bytes) -> int:
        self[key] = len(self)
        return self[key]


class Recorder(RequestLog):
    """A request log that keeps what was found, too, and is told of what is stored."""

    def __init__(self) -> None:
        super().__init__(1 << 16)
        self.rows: list[tuple[int, ...]] = []
        self._spaces, self._segments, self._contexts = Numbers(), Numbers(), Numbers()
        self._space = b""

    def attach(self, node: Node) -> None:
        """Take the place of its log, and hear of what it publishes."""
        node.request_log = self
        note_stored = node.curves.note_stored

        def note(cache: Cache) -> None:
            self._add(STORED, cache)
            note_stored(cache)

        node.curves.note_stored = note  # type: ignore[method-assign]

    def begin(self, space: Any, call: int, begun: Begun | None = None) -> Begun:
        """See RequestLog."""
        self._space = space.namespace
        return super().begin(space, call, begun)

    def note(self, asked: Asked, segment: bytes, finding: Finding, place: int) -> None:
        """See RequestLog."""
        super().note(asked, segment, finding, place)
        if finding.cache is not None:
            self._add(FOUND, finding.cache)
        else:
            ids = self._spaces[self._space], self._segments[segment], self._contexts[asked.accepted_contexts[-1]]
            self.rows.append((MISSED, *ids, NOTHING, 0, asked.tokens))

    def _add(self, kind: int, cache: Cache) -> None:
        family, master = cache.family, cache.master
        ids = self._spaces[family.space.namespace], self._segments[family.segment], self._contexts[cache.context]
        of = NOTHING if master is None else self._contexts[master.context]
        self.rows.append((kind, *ids, of, cache.record_bytes, family.tokens))


def record(folder: Path, spec: dict[str, Any]) -> np.ndarray:
    """Rows ``[events, columns]`` of one trace. ``folder``: for the node's socket."""
    identities = [make_identity("first"), make_identity("second")]
    recorder = Recorder()
    settings = Settings(
        socket=str(folder / "k.sock"), grpc_port=-1, http_port=-1, host_bytes=spec["host_bytes"], worker_threads=1
    )
    with LocalNode(settings) as node:
        node.on_loop(recorder.attach)
        with Client.in_process(node, identities[0]) as one, Client.in_process(node, identities[1]) as two:
            engines = [Engine(one, seed=1), Engine(two, seed=2)]
            worlds = [
                Debates(identity.namespace(), debates=spec["debates"], agents=spec["agents"], seed=seed,
                        exponent=spec["exponent"]).rounds(spec["rounds"])
                for seed, identity in enumerate(identities)
            ]  # fmt: skip
            for rounds in zip(*worlds, strict=True):
                for engine, prompts in zip(engines, rounds, strict=True):
                    engine.play(prompts)
    return np.array(recorder.rows, np.int64)


def write(file: Path, rows: np.ndarray) -> None:
    """As Parquet: columns of small numbers, under half a MiB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: pa.array(rows[:, index].astype(np.int32)) for index, name in enumerate(COLUMNS)}
    pq.write_table(
        pa.table(columns), file, compression="zstd", compression_level=19, use_dictionary=["kind", "space", "tokens"],
        column_encoding={"segment": "DELTA_BINARY_PACKED", "context": "DELTA_BINARY_PACKED",
                         "master": "DELTA_BINARY_PACKED", "record_bytes": "DELTA_BINARY_PACKED"},
    )  # fmt: skip


def main(folder: str) -> None:
    """Every trace."""
    for name, spec in TRACES.items():
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            rows = record(Path(scratch), spec)
        write(Path(folder) / f"{name}.parquet", rows)
        kinds = np.bincount(rows[:, 0], minlength=3).tolist()
        caches = len({(int(one[2]), int(one[3])) for one in rows if one[0] == STORED})
        size = (Path(folder) / f"{name}.parquet").stat().st_size
        print(
            f"{name}: found, missed, stored {kinds}; {caches} caches, {len(set(rows[:, 2].tolist()))} segments, "
            f"{size} bytes, {time.perf_counter() - began:.0f} s"
        )


if __name__ == "__main__":
    main(sys.argv[1])
