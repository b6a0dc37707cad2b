"""House style that a machine can hold. The longest function is a ratchet: the limit only goes down."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.parsing import parse

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 420
TEST_FILE_LINES_MAX = 480
BANNED_NAMES = {"utils.py", "common.py", "helpers.py", "manager.py", "misc.py"}
BANNED_TEXT = {
    "pickle": re.compile(r"\bpickle\.[a-zA-Z]|(import|from) pickle|torch\.load\("),
    "work left for later": re.compile(r"\b(TODO|FIXME|XXX)\b"),
    "a sleep": re.compile(r"\btime\.sleep\("),
}
TEXT_ALLOWED_IN = {"a sleep": ("bench/",)}
BINARY = {".parquet", ".png", ".svg"}


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    paths = [ROOT / name for name in names] or [path for path in ROOT.rglob("*") if ".venv" not in path.parts]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def own_python() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py" and "wire" not in path.parts]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1


def test_functions_stay_short() -> None:
    too_long = [(lines, name) for path in own_python() for name, lines in functions(path) if lines > FUNCTION_LINES_MAX]
    assert not too_long, sorted(too_long, reverse=True)


def test_files_stay_readable_in_one_sitting() -> None:
    for path in own_python():
        name = path.relative_to(ROOT).as_posix()
        limit = TEST_FILE_LINES_MAX if name.startswith("tests/") else FILE_LINES_MAX
        assert len(path.read_text().splitlines()) <= limit, name


def test_no_drawer_files() -> None:
    assert not [path for path in own_python() if path.name in BANNED_NAMES]


def test_no_banned_text() -> None:
    for what, pattern in BANNED_TEXT.items():
        allowed = TEXT_ALLOWED_IN.get(what, ())
        for path in own_python():
            name = path.relative_to(ROOT).as_posix()
            if name != "tests/test_tidy.py" and not name.startswith(allowed):
                assert not pattern.search(path.read_text()), f"{name} holds {what}"


def test_every_module_says_what_it_is() -> None:
    for path in own_python():
        text = path.read_text()
        assert not text or ast.get_docstring(parse(text)), path


def test_text_files_end_with_one_newline_and_hold_no_tabs_or_trailing_spaces() -> None:
    for path in tracked():
        if path.suffix in BINARY or "wire" in path.parts or path.name == "LICENSE":
            continue
        text = path.read_text()
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), path
        assert not re.search(r"[ \t]+$", text, re.MULTILINE), path
        assert path.name == "Makefile" or "\t" not in text, path


def test_readme_names_every_top_level_folder_in_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for folder in ("kvservice", "proto", "client", "kernels", "storage", "deploy", "tests", "bench"):
        assert f"`{folder}/" in text, folder
