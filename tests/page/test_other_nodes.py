"""What other nodes do, seen: in the stats document, in a terminal and in the tables of the command line."""

import io
import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from rich.cells import cell_len
from rich.console import Console

from kvservice.__main__ import main
from kvservice.model.identity import Namespace
from kvservice.peers.directory import DEPARTED_MAX, Directory, DirectoryLimits
from kvservice.peers.member import Address, Facts, Listing, NodeId, Roll, SourceState
from kvservice.peers.routes import INT8_SHARE, Router
from kvservice.peers.routes_log import Medium
from kvservice.sharing.routed import RoutedPlace
from kvservice.stats.others_document import NAMED_MAX, others_document
from kvservice.stats.report import stats_tables
from kvservice.top_frame import Seen, frame
from kvservice.top_others import other_lines, others_bar
from kvservice.top_rates import rates
from tests.client.builders import free_port
from tests.page.sharing_world import SharingPage, sharing_page
from tests.server.test_schema import check
from tests.sharing.nodes import held, shared_node, sidecar, until
from tests.sharing.test_routed import Way

ESCAPE = "\x1b]0;owned\x07evil[red]"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharingPage]:
    with sharing_page(tmp_path_factory.mktemp("sharing")) as made:
        yield made


def stats_of(page: SharingPage) -> Any:
    with urllib.request.urlopen(f"http://{page.address}/stats", timeout=10) as reply:
        return json.load(reply)


def others_of(page: SharingPage) -> dict[str, Any]:
    return {one["state"]: one for one in stats_of(page)["network"]["others"]}


def test_the_document_names_everybody_else_with_what_came_and_went(page: SharingPage) -> None:
    document = stats_of(page)
    check("stats", document)
    others = others_of(page)
    assert set(others) == {"live", "unmet", "cold"}
    live, unmet, cold = (others[name] for name in ("live", "unmet", "cold"))
    assert (live["name"], live["address"], live["is_answering"]) == ("shelf-1", f"127.0.0.1:{page.port}", True)
    assert live["brought_bytes"] == document["remote"]["record_bytes"] > 0
    assert live["given"] > 0
    assert live["given_bytes"] > live["given"]
    assert live["given_bytes"] + cold["given_bytes"] == document["pushes"]["record_bytes"]
    assert (unmet["address"], unmet["brought_bytes"]) == (f"127.0.0.1:{page.nobody}", 0)
    assert cold["address"] == "s3://bucket/prefix", "nothing that may be a secret"
    assert set(cold["ways"]) == {"cold"}
    assert cold["given_ways"] == {}


def test_a_nodes_ways_have_speeds_and_the_decisions_for_them(page: SharingPage) -> None:
    document, ways = stats_of(page), others_of(page)["live"]["ways"]
    assert "stream" in ways
    assert "int8_stream" not in ways, "nothing here is lossy"
    assert sum(one["chosen"] for one in ways.values()) == document["remote"]["begun"]
    assert sum(one["bytes"] for one in ways.values()) == document["remote"]["record_bytes"]
    for one in ways.values():
        assert sum(one["reasons"].values()) == one["chosen"]
        assert one["latency_s"] > 0
        assert one["bytes_per_s"] > 0
    assert max(one["transfers"] for one in ways.values()) > 0


def test_ways_that_lossy_records_could_take_are_told_with_what_is_known_of_them() -> None:
    router, given = Router(lambda: 1.0), Router(lambda: 1.0, direction="to")
    for _ in range(5):
        router.measured("there", Medium.STREAM, 1 << 20, 1.0)
    stream, lossy, exact = {Medium.STREAM: Way("there", [0.0])}, Namespace(b"lossy"), Namespace(b"exact")
    place = RoutedPlace(router, stream, packed=Way("there", [0.0]), given=given, is_lossy=lambda one: one == lossy)
    given.done(given.choose("there", 10, [Medium.STREAM]), 0.5)
    place.speed_of(exact)
    (told,) = others_document(None, [place], router, given, UUID(int=1))
    assert set(told["ways"]) == set(told["given_ways"]) == {"stream"}, "nobody asked for such yet"
    place.speed_of(lossy)
    (told,) = others_document(None, [place], router, given, UUID(int=1))
    assert set(told["ways"]) == set(told["given_ways"]) == {"stream", "int8_stream"}
    packed = told["ways"]["int8_stream"]
    assert (packed["transfers"], packed["chosen"]) == (0, 0)
    assert packed["bytes_per_s"] == pytest.approx((1 << 20) / INT8_SHARE, rel=0.1)
    went = told["given_ways"]["stream"]
    assert (went["chosen"], went["bytes"], went["reasons"]) == (1, 10, {"only": 1})
    place.add_way(Medium.SHARED_MEMORY, Way("there", [0.0]))
    (told,) = others_document(None, [place], router, given, UUID(int=1))
    assert set(told["ways"]) == {"stream", "shared_memory", "int8_stream"}
    assert told["given_ways"] == {}, "it is read here"
    plain = RoutedPlace(router, {Medium.STREAM: Way("there", [0.0])})
    assert set(others_document(None, [plain], router, given, UUID(int=1))[0]["ways"]) == {"stream"}


def test_a_node_that_shares_with_nobody_names_nobody(tmp_path: Path) -> None:
    with shared_node(tmp_path / "alone", 0) as node:
        document = node.stats()
    check("stats", json.loads(json.dumps(document)))
    assert document["network"]["others"] == []
    assert others_bar(document) is None


def test_one_that_drained_and_went_has_left(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        shared = stack.enter_context(shared_node(tmp_path / "shared", port, node_name="leaver"))
        node = stack.enter_context(sidecar(tmp_path / "a", port))

        def states() -> list[tuple[str, str]]:
            return [(one["name"], one["state"]) for one in node.stats()["network"]["others"]]

        assert states() == [("leaver", "live")]
        shared.run_on_loop(shared.peers.drain(5.0))
        until(lambda: states() == [("leaver", "draining")], "the drain")
        shared.run_on_loop(shared.peers.close())
        until(lambda: ("leaver", "left") in states(), "the end")
        assert held(node) == 0


def test_who_left_is_remembered_in_bounds_and_forgotten_when_it_is_back() -> None:
    now_s = 0.0
    directory = Directory(lambda: now_s, knows_liveness=False, limits=DirectoryLimits(grace_s=1.0))
    count = DEPARTED_MAX + 3
    addresses = [Address("h", number + 1) for number in range(count)]
    facts = [Facts(NodeId(UUID(int=number + 1), 1), f"n{number}") for number in range(count)]
    directory.apply(Roll(SourceState.LISTED, tuple(Listing(one) for one in addresses)))
    for address, one in zip(addresses, facts, strict=True):
        directory.heard(address, one)
        directory.lost(one.node)
    now_s = 2.0
    directory.advance()
    assert [one.name for one in directory.departed.values()] == [f"n{number}" for number in range(3, count)]
    directory.heard(addresses[-1], facts[-1])
    assert facts[-1].node.uuid not in directory.departed
    assert [one.name for one in directory.members] == [facts[-1].name]


# In a terminal


def lines_of(stats: Any, width: int = 80, lines: int = 24) -> list[str]:
    return [line.plain for line in frame(Seen("here:1", stats, rates(None, stats)), width, lines)]


def test_top_has_a_bar_of_what_came_and_a_line_for_each_node(page: SharingPage) -> None:
    stats = stats_of(page)
    lines = lines_of(stats)
    (bar,) = (line for line in lines if line.startswith("others   ["))
    assert " from, " in bar
    assert f"came {stats['remote']['found']} of {stats['remote']['asked']}" in bar
    (title,) = (number for number, line in enumerate(lines) if line.startswith("other nodes"))
    told = lines[title + 1 : title + 4]
    way = next(name for name, one in stats["network"]["others"][0]["ways"].items() if one["chosen"])
    assert any(line.startswith("shelf-1 ") and f" live         {way}" in line and "/s" in line for line in told), told
    assert any(" unmet " in line for line in told)
    assert any(" cold " in line for line in told)
    assert any("brought from other nodes" in line for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("width", "lines"), [(80, 24), (40, 8), (200, 60), (1, 1)])
def test_a_frame_with_many_nodes_fits(page: SharingPage, width: int, lines: int) -> None:
    stats = stats_of(page)
    stats["network"]["others"] *= 40
    made = lines_of(stats, width, lines)
    assert len(made) <= max(lines, 8)
    assert max(cell_len(line) for line in made) <= max(width, 40)


def test_names_of_nodes_are_not_obeyed_by_the_terminal(page: SharingPage) -> None:
    stats = stats_of(page)
    others = stats["network"]["others"]
    others[0] |= {"name": ESCAPE, "state": ESCAPE}
    others.append(deepcopy(others[0]) | {"name": "\u6f22" * 60})
    text = "\n".join(line.plain for line in other_lines(others, 20))
    assert "\x1b" not in text
    assert "\x07" not in text
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(stats_tables(stats))
    printed = console.export_text()
    assert "\x1b" not in printed
    assert "evil[red]" in printed


def test_an_older_node_that_names_nobody_is_shown_as_before(page: SharingPage) -> None:
    stats = stats_of(page)
    del stats["network"]["others"]
    assert not any(line.startswith("other nodes") for line in lines_of(stats))
    stats_tables(stats)


def test_commands_show_them(page: SharingPage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--http", page.address]) == 0
    assert "shelf-1" in capsys.readouterr().out
    assert main(["stats", "--http", page.address]) == 0
    printed = capsys.readouterr().out
    assert "Other nodes" in printed
    assert "shelf-1" in printed


def test_of_many_members_those_that_are_not_live_are_named() -> None:
    directory, router = Directory(lambda: 0.0, knows_liveness=False), Router(lambda: 0.0)
    addresses = [Address("h", number + 1) for number in range(NAMED_MAX + 10)]
    directory.apply(Roll(SourceState.LISTED, tuple(Listing(one) for one in addresses)))
    facts = [Facts(NodeId(UUID(int=number + 1), 1), f"n{number}") for number in range(len(addresses))]
    for address, one in zip(addresses, facts, strict=True):
        directory.heard(address, one)
    directory.lost(facts[-1].node)
    cluster: Any = SimpleNamespace(directory=directory, places={})
    found = others_document(cluster, (), router, router, facts[0].node.uuid)
    assert len(found) == NAMED_MAX
    assert [one["name"] for one in found][:2] == [facts[-1].name, "n1"]
