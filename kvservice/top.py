"""``kvservice top``: a node's numbers in a terminal, until q or Ctrl-C. Asks over HTTP; changes nothing.

Without a terminal, and with ``--once``, it is one frame of plain text.
"""

import argparse
import math
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.text import Text

from kvservice.model.errors import InvalidInputError, KVServiceError
from kvservice.stats.asking import HttpNode
from kvservice.top_frame import Seen, frame
from kvservice.top_rates import Document, rates

HTTP_TIMEOUT_S = 5.0
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.2, 3600.0
SLOW_EVERY = 3
"""Plan and families are asked for with every third frame."""
ONCE_LINES = 60
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The other screen without a cursor, and back."""
HOME, TO_END_OF_LINE, TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
Ask = Callable[[str], Document]


def run(parsed: argparse.Namespace) -> int:
    """0, or 1 if nobody answered a ``--once``. Raises InvalidInputError."""
    interval_s, node = _interval_s(parsed.interval), HttpNode.of_flags(parsed)
    node.check()
    watch = Watch(node.name, lambda path: node.answer(path, HTTP_TIMEOUT_S))
    if parsed.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return print_once(watch, sys.stdout)
    with _screen(sys.stdin, sys.stdout):
        _watch_until_quit(watch, interval_s)
    return 0


def _interval_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not INTERVAL_S_MIN <= value <= INTERVAL_S_MAX:
        raise InvalidInputError(f"interval = {text!r}: it must be {INTERVAL_S_MIN} to {INTERVAL_S_MAX:.0f} seconds")
    return value


class Watch:
    """Looks at a node again and again; keeps the last answers, for rates and while nobody answers."""

    def __init__(self, address: str, ask: Ask) -> None:
        self._address, self._ask = address, ask
        self._looks = 0
        self._before: Document | None = None
        self._stats: Document | None = None
        self._plan: Document | None = None
        self._families: Document | None = None

    def look(self) -> Seen:
        """How the node stands now; ``problem`` says if it does not answer."""
        problem = ""
        try:
            self._before, self._stats = self._stats, self._ask("/stats")
            if self._looks % SLOW_EVERY == 0:
                self._plan, self._families = self._ask("/plan"), self._ask("/families")
            self._looks += 1
        except KVServiceError as error:
            self._before, self._looks, problem = None, 0, str(error)
        speeds = {} if self._stats is None else rates(self._before, self._stats)
        return Seen(self._address, self._stats, speeds, self._plan, self._families, problem)


def print_once(watch: Watch, stream: TextIO) -> int:
    """One frame as plain text; 1 if nobody answers."""
    seen = watch.look()
    if seen.problem:
        print(f"kvservice: {seen.problem}", file=sys.stderr)  # noqa: T201  a command line prints
        return 1
    width = shutil.get_terminal_size().columns
    stream.write("".join(f"{line.plain.rstrip()}\n" for line in frame(seen, width, ONCE_LINES)))
    return 0


@contextmanager
def _screen(keys: TextIO, stream: TextIO) -> Iterator[None]:
    """The terminal's other screen, keys read one by one; all as it was afterwards, whatever happens."""
    settings = termios.tcgetattr(keys)
    on_term = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    try:
        tty.setcbreak(keys)
        stream.write(ENTER)
        yield
    except KeyboardInterrupt:
        return
    finally:
        stream.write(LEAVE)
        stream.flush()
        termios.tcsetattr(keys, termios.TCSADRAIN, settings)
        signal.signal(signal.SIGTERM, on_term)


def _watch_until_quit(watch: Watch, interval_s: float) -> None:
    console = Console(highlight=False)
    while True:
        size = os.get_terminal_size(sys.stdout.fileno())
        _show(console, frame(watch.look(), size.columns, size.lines - 1))
        if _has_quit(interval_s):
            return


def _show(console: Console, lines: list[Text]) -> None:
    """Over what was there, line by line: a screen that is cleared first would flicker."""
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=True, end="\n")
    text = capture.get().replace("\n", f"{TO_END_OF_LINE}\n")
    sys.stdout.write(f"{HOME}{text}{TO_END}q quits")
    sys.stdout.flush()


def _has_quit(wait_s: float) -> bool:
    """Waits for a key as long as a frame stands; was it q, or the end of input?"""
    ready, _, _ = select.select([sys.stdin], [], [], wait_s)
    return bool(ready) and os.read(sys.stdin.fileno(), 64)[:1].lower() in (b"q", b"\x04", b"")
