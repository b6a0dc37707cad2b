"""The request log: bounded, off by default, digests only, and the same numbers as the counters."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvservice import request_log
from kvservice.__main__ import main
from kvservice.accounting import ANSWERS, place_of
from kvservice.app import Service
from kvservice.config import Settings
from kvservice.lookup import Finding
from kvservice.model.plan import Match, MissReason
from kvservice.request_log import FIELDS, ROW, SLICE_ROWS, RequestLog
from kvservice.stats.log_table import COLUMNS
from kvservice.wire.v1 import cache_pb2 as wire
from tests.curves.builders import make_space
from tests.server.builders import World, make_identity, make_meta, make_planes, query
from tests.server.http_world import http_of

IDENTITY = make_identity()
META = make_meta(IDENTITY)
MISS = Finding(None, Match.NONE, MissReason.UNKNOWN_SEGMENT, 0)


def rows_of(content: memoryview) -> Any:
    return np.frombuffer(content, np.dtype(list(FIELDS)))


def note(log: RequestLog, number: int) -> None:
    log.begin(None, number)
    log.note(wire.SegmentQuery(position=number, tokens=1), number.to_bytes(32, "big"), MISS, place_of(MISS))


def test_every_column_is_told_of() -> None:
    text = (Path(__file__).resolve().parents[2] / "deploy/http.md").read_text()
    assert all(f"`{column}`" in text for column in COLUMNS)


def test_a_row_is_what_numpy_reads() -> None:
    assert np.dtype(list(FIELDS)).itemsize == ROW.size == 72


async def test_it_is_a_ring_that_keeps_the_last_rows_in_order() -> None:
    log = RequestLog(10)
    for number in range(25):
        note(log, number)
    snapshot = await log.snapshot()
    assert rows_of(snapshot.rows)["call"].tolist() == list(range(15, 25))
    assert snapshot.lost == 15
    assert len((await RequestLog(5).snapshot()).rows) == 0


async def test_what_is_overwritten_while_it_is_copied_is_lost_and_the_order_holds() -> None:
    log = RequestLog(3 * SLICE_ROWS)
    for number in range(3 * SLICE_ROWS):
        note(log, number)

    async def busy() -> None:
        for number in range(4 * SLICE_ROWS):
            note(log, 10**6 + number)
            if number % (2 * SLICE_ROWS) == 0:
                await asyncio.sleep(0)

    snapshot, _ = await asyncio.gather(log.snapshot(), busy())
    calls = rows_of(snapshot.rows)["call"].tolist()
    assert calls == sorted(calls)
    assert 0 < len(calls) < 3 * SLICE_ROWS
    assert snapshot.lost == 3 * SLICE_ROWS - len(calls)


async def test_every_segment_that_was_asked_for_is_a_row() -> None:
    world = World()
    world.node.request_log = log = RequestLog(100, clock_ns=lambda: 5_000)
    client = world.client()
    await client.store(META, make_planes())
    stranger = make_meta(make_identity(tenant="stranger"))
    await client.lookup(query(META), query(make_meta(IDENTITY, history=["a"]), may_shift=True), query(stranger))
    await client.lookup(query(make_meta(IDENTITY, "nothing"), history=[b"x", b"y" * 40]))
    snapshot = await log.snapshot()
    rows = rows_of(snapshot.rows)
    assert rows["time_us"].tolist() == [5] * 6
    assert len(set(rows["call"].tolist())) == 2
    assert rows["prompt"].tolist() == [0, 1, 2, 3, 3, 3]
    assert [snapshot.namespaces[one].tenant for one in rows["namespace"]] == ["test"] * 2 + [""] + ["test"] * 3
    assert rows["segment"][0].tobytes() == META.key.segment[:16]
    assert rows["context"][0].tobytes() == META.key.context[:16]
    sizes = rows["record_bytes"].tolist()
    assert sizes[0] == sizes[1] > META.dense_bytes
    assert sizes[2:] == [0] * 4
    document: Any = world.node.stats_document()
    assert document["request_log"] == {"capacity": 100, "noted": 6}
    assert document["accounting"]["asked_segments"] == 6


async def test_names_are_those_of_the_rows_that_are_held_however_many_there_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_log, "NAMESPACES_MAX", 3)
    monkeypatch.setattr(request_log, "PROMPT_SEGMENTS_MAX", 1)
    log, spaces = RequestLog(4), [make_space(str(number)) for number in range(20)]
    asked = wire.SegmentQuery(position=0, tokens=1)
    for number in [0, 0, 0, 1, 1, 1, *range(20)]:
        log.begin(spaces[number], number)
        log.note(asked, bytes(32), MISS, place_of(MISS))
        snapshot = await log.snapshot()
        told = [snapshot.namespaces[one].tenant for one in rows_of(snapshot.rows)["namespace"]]
        meant = [str(call) for call in rows_of(snapshot.rows)["call"].tolist()]
        assert all(one in ("", want) for one, want in zip(told, meant, strict=True)), "never another's name"
        assert len(snapshot.namespaces) <= 4
    assert told.count("") < 4, "later ones get the names of those whose rows are gone"


async def test_a_clock_that_goes_back_keeps_the_order_of_rows() -> None:
    times = iter([7_200_000_000_000, 1_000, 3_600_000_000_000])
    log = RequestLog(10, clock_ns=lambda: next(times))
    for number in range(3):
        note(log, number)
    rows = rows_of((await log.snapshot()).rows)
    assert rows["call"].tolist() == [0, 1, 2]
    assert rows["time_us"].tolist() == [7_200_000_000, 1, 3_600_000_000]


async def test_without_the_setting_there_is_no_log() -> None:
    world = World()
    assert world.node.request_log is None
    async with http_of(world.node) as http:
        reply = await http.get("/log.parquet")
        assert reply.status == 404
        assert "log_segments" in reply.json["message"]
        assert (await http.get("/stats")).json["request_log"] == {"capacity": 0, "noted": 0}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
async def test_the_file_adds_up_with_the_counters(kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq  # type: ignore[import-not-found, unused-ignore]

    world = World()
    world.node.request_log = RequestLog(1000)
    client = world.client()
    await client.store(META, make_planes())
    for name in range(20):
        await client.lookup(query(META), query(make_meta(IDENTITY, name, ["a"]), may_shift=True), query(META, tokens=3))
    async with http_of(world.node) as http:
        reply = await http.get(f"/log.{kind}")
        answers = (await http.get("/stats")).json["accounting"]["tokens"]
    assert reply.status == 200
    table = pq.read_table(io.BytesIO(reply.body)) if kind == "parquet" else pa.ipc.open_file(reply.body).read_all()
    assert tuple(table.column_names) == COLUMNS
    assert table.schema.metadata[b"lost"] == b"0"
    sums = dict.fromkeys(ANSWERS, 0)
    for row in table.to_pylist():
        sums[row["answer"]] += row["tokens"]
    assert sums == answers
    first = table.to_pylist()[0]
    assert (first["tenant"], first["model"], first["namespace"]) == ("test", "tiny", IDENTITY.namespace().hex())
    assert (first["segment"], first["reason"], first["match"]) == (META.key.segment[:16], "host", "exact")
    assert first["time"].year >= 2024


async def test_one_export_at_a_time() -> None:
    pytest.importorskip("pyarrow")
    world = World()
    world.node.request_log = log = RequestLog(4 * SLICE_ROWS)
    for number in range(4 * SLICE_ROWS):
        note(log, number)
    async with http_of(world.node) as http:
        replies = await asyncio.gather(*(http.get("/log.arrow") for _ in range(4)))
    assert sorted({one.status for one in replies}) in ([200], [200, 429])
    assert sum(one.status == 200 for one in replies) >= 1


def test_the_command_writes_a_file_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(segments: int, *arguments: str) -> int:
        settings = Settings(
            socket=str(tmp_path / "k.sock"), grpc_port=-1, http_port=0, host_bytes=1 << 22, log_segments=segments
        )
        with Service(settings) as service:
            return main(["log", "export", *arguments, "--http", f"127.0.0.1:{service.addresses.http_port}"])

    assert run(0, str(tmp_path / "a.parquet")) == 1
    assert "log_segments" in capsys.readouterr().err
    assert run(10, str(tmp_path / "a.csv")) == 2
    assert ".parquet or .arrow" in capsys.readouterr().err
    assert main(["log", "export", str(tmp_path / "a.arrow"), "--http", "127.0.0.1:1"]) == 1
    assert "kvservice serve" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.part"))
    pytest.importorskip("pyarrow")
    assert run(10, str(tmp_path / "a.parquet")) == 0
    assert (tmp_path / "a.parquet").read_bytes()[:4] == b"PAR1"
    assert json.dumps(str(tmp_path / "a.parquet"))[1:-1] in capsys.readouterr().out
