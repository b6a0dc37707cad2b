"""`kvservice top`: frames that fit, rates between two answers, a real terminal, and names that are not obeyed."""

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from fcntl import ioctl
from typing import Any, Self

import pytest
from rich.cells import cell_len

from kvservice.__main__ import main
from kvservice.config import process_environment
from kvservice.model.errors import UnavailableError
from kvservice.text import printable
from kvservice.top import Watch
from kvservice.top_frame import Seen, frame
from kvservice.top_rates import COUNTERS, answers_of, rates
from tests.page.builders import HOSTILE, PageWorld

ESCAPE = "\x1b]0;owned\x07\x1b[2Jevil\x9b31m"


@pytest.fixture(scope="module")
def world() -> Iterator[PageWorld]:
    with PageWorld(lookups=400, rounds=2, names=("tiny", HOSTILE)) as made:
        yield made


def ask(world: PageWorld, path: str) -> Any:
    import json
    import urllib.request

    with urllib.request.urlopen(f"http://{world.address}{path}", timeout=10) as reply:
        return json.load(reply)


def seen(world: PageWorld, **changes: Any) -> Seen:
    stats = ask(world, "/stats")
    values = {"stats": stats, "rates": rates(None, stats), "plan": ask(world, "/plan")}
    return Seen("here:1", **({**values, "families": ask(world, "/families")} | changes))


@pytest.mark.parametrize(("width", "lines"), [(80, 24), (40, 8), (200, 60), (1, 1)])
def test_a_frame_fits_its_terminal(world: PageWorld, width: int, lines: int) -> None:
    made = frame(seen(world), width, lines)
    assert len(made) <= max(lines, 8)
    assert max(cell_len(line.plain) for line in made) <= max(width, 40)
    assert all("\n" not in line.plain for line in made)


def test_80_by_24_hold_tiers_traffic_advice_rounds_and_families(world: PageWorld) -> None:
    text = "\n".join(line.plain for line in frame(seen(world), 80, 24))
    for words in ("memory   [#", "1.0 MiB", "stored   [#", "=", "of 800 segments", "unknown_segment", "plan     ",
                  "rounds", "99.0 KiB", "families", "tiny"):  # fmt: skip
        assert words in text, text
    assert "SSD      [" not in text, "there is none"


def test_a_taller_one_holds_namespaces_too(world: PageWorld) -> None:
    lines = [line.plain for line in frame(seen(world), 80, 40)]
    (title,) = (number for number, line in enumerate(lines) if line.startswith("namespaces"))
    told = lines[title + 1 :]
    assert len(told) == 2, "other holds nothing and is not shown"
    assert any(line.startswith("tiny") and "tenant tiny" in line and "400" in line for line in told)
    assert any(HOSTILE[:20] in line for line in told)


def test_an_ssd_tier_has_a_bar(world: PageWorld) -> None:
    stats = ask(world, "/stats")
    stats["ssd"] |= {"is_open": True, "capacity_bytes": 100, "used_bytes": 50, "is_below_floor": True}
    text = "\n".join(line.plain for line in frame(seen(world, stats=stats), 80, 24))
    assert re.search(r"SSD      \[#+\.+\] 50 B of 100 B, .*TOO FULL", text)


def test_rates_are_changes_by_the_nodes_own_clock(world: PageWorld) -> None:
    before = ask(world, "/stats")
    assert set(rates(None, before).values()) == {None}
    world.look_up(*range(20))
    after = ask(world, "/stats")
    made = rates(before, after)
    assert set(made) == set(COUNTERS)
    assert made["segments"] == made["lookups"] == pytest.approx(10)
    found = answers_of(after["accounting"]["segments"]).found - answers_of(before["accounting"]["segments"]).found
    assert made["found"] == pytest.approx(found / 2)
    text = "\n".join(line.plain for line in frame(seen(world, stats=after, rates=made), 80, 24))
    assert "10.0 segments/s" in text


def test_after_a_restart_or_a_clock_that_stands_there_is_no_rate(world: PageWorld) -> None:
    stats = ask(world, "/stats")
    restarted = {**stats, "boot_epoch": stats["boot_epoch"] + 1, "uptime_s": 1.0}
    assert set(rates(stats, restarted).values()) == {None}
    assert set(rates(stats, stats).values()) == {None}
    fallen = {**stats, "uptime_s": stats["uptime_s"] + 1, "lookups": {**stats["lookups"], "calls": 0}}
    assert rates(stats, fallen)["lookups"] is None


def test_names_are_not_obeyed_by_the_terminal(world: PageWorld) -> None:
    families = ask(world, "/families")
    families["rounds"][0]["name"] = ESCAPE
    families["families"][0]["model"] = f"[red]{ESCAPE}"
    plan = {"advice": [ESCAPE]}
    text = "\n".join(line.plain for line in frame(seen(world, families=families, plan=plan), 80, 40))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert "evil" in text
    assert "[red]" in text, "markup is text too"
    assert printable("a\u202eb") == "a\ufffdb", "nor is the direction of text turned round"


def test_wide_characters_are_counted_as_wide(world: PageWorld) -> None:
    families = ask(world, "/families")
    families["rounds"][0]["name"] = "\u6f22" * 60
    made = frame(seen(world, families=families), 80, 24)
    assert max(cell_len(line.plain) for line in made) <= 80


def test_a_node_that_goes_leaves_the_last_numbers_and_says_so(world: PageWorld) -> None:
    is_gone = False

    def asking(path: str) -> Any:
        if is_gone:
            raise UnavailableError("no node answers at here:1")
        return ask(world, path)

    watch = Watch("here:1", asking)
    assert watch.look().problem == ""
    assert watch.look().rates["lookups"] is None, "the test's clock stands still"
    is_gone = True
    gone = watch.look()
    assert "no node answers" in frame(gone, 80, 24)[0].plain
    assert gone.stats is not None
    assert gone.families is not None
    is_gone = False
    back = watch.look()
    assert (back.problem, set(back.rates.values())) == ("", {None})


def test_once_prints_plain_text(world: PageWorld, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--http", world.address]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"kvservice top {world.address}")
    assert "\x1b" not in printed
    assert "families" in printed


def test_once_without_a_node_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--http", "127.0.0.1:1"]) == 1
    printed = capsys.readouterr()
    assert (printed.out, "kvservice serve" in printed.err) == ("", True)


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "fast", "1e9", ""])
def test_nonsense_intervals_are_bad_usage(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--interval", interval]) == 2
    assert "interval" in capsys.readouterr().err


class Terminal:
    """The command in a terminal of its own, 80 columns and 24 lines."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.own, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        command = [sys.executable, "-m", "kvservice", "top", *arguments]
        changes = process_environment({"TERM": "xterm-256color", **environment})
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=changes)
        self.shown = ""

    def until(self, text: str) -> str:
        for _ in range(300):
            if text in self.shown:
                return self.shown
            if select.select([self.own], [], [], 0.1)[0]:
                self.shown += os.read(self.own, 65536).decode(errors="replace")
        raise AssertionError(f"{text!r} never came: {self.shown[-2000:]!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for descriptor in (self.own, self.theirs):
            os.close(descriptor)


def test_in_a_terminal_it_is_live_until_q_and_leaves_all_as_it_was(world: PageWorld) -> None:
    with Terminal("--http", world.address, "--interval", "0.2") as terminal:
        shown = terminal.until("q quits")
        assert shown.startswith("\x1b[?1049h\x1b[?25l"), "another screen, no cursor"
        assert "\x1b[36m" in shown, "in colours"
        assert shown.count("\n") <= 23, "a frame does not scroll"
        world.look_up(*range(20))
        terminal.until("10.0 segments/s")
        os.write(terminal.own, b"q")
        terminal.until("\x1b[?25h\x1b[?1049l")
        assert terminal.process.wait(30) == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_no_color_is_respected(world: PageWorld) -> None:
    with Terminal("--http", world.address, NO_COLOR="1") as terminal:
        assert "\x1b[36m" not in terminal.until("q quits")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_well(world: PageWorld, number: signal.Signals) -> None:
    with Terminal("--http", world.address) as terminal:
        terminal.until("q quits")
        terminal.process.send_signal(number)
        terminal.until("\x1b[?25h\x1b[?1049l")
        assert terminal.process.wait(30) == 0
        assert "Traceback" not in terminal.shown
        assert termios.tcgetattr(terminal.theirs) == terminal.before
