"""Who may import whom: the table of ARCHITECTURE.md, held by a test."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.parsing import parse

ROOT = Path(__file__).resolve().parent.parent

# folder -> the parts of kvservice it may import, besides itself
MAY_IMPORT = {
    "kvservice/model": set[str](),
    "kernels": set[str](),
    "storage": {"model", "wire"},
    "client": {"model", "wire", "kernels", "storage"},
}
SERVER_PARTS = ("stats", "curves", "planning", "page", "sharing", "peers", "access")
SERVER_MAY_IMPORT = {"model", "wire", "storage", "config", *SERVER_PARTS}
SERVER_MAY_IMPORT_LAZILY = {"kernels"}
CLIENT_SIDE = ("client", "kernels", "storage")
THIRD_PARTY_OF_MODEL = {"blake3"}
ENTRY_POINT = "kvservice/__main__.py"
READS_ENVIRONMENT = "kvservice/config.py"
BARE_NAMES = {"client", "kernels", "storage", "proto", "deploy", "tests", "bench"}


def python_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def server_files() -> list[Path]:
    parts = [ROOT / "kvservice" / name for name in SERVER_PARTS]
    files = [*(ROOT / "kvservice").glob("*.py"), *(path for part in parts for path in part.rglob("*.py"))]
    return [path for path in files if name_of(path) != ENTRY_POINT]


def all_files() -> list[Path]:
    return [path for folder in (*MAY_IMPORT,) for path in python_files(folder)] + server_files()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    tree = parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parts_of_ours(names: Iterator[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("kvservice.")}


def test_folders_import_only_what_the_table_allows() -> None:
    for folder, allowed in MAY_IMPORT.items():
        own = folder.rpartition("/")[2]
        for path in python_files(folder):
            extra = parts_of_ours(imports(path)) - allowed - {own, "__version__"}
            assert not extra, f"{name_of(path)} imports {extra}"


def test_server_imports_no_client_and_kernels_only_lazily() -> None:
    own = {path.stem for path in (ROOT / "kvservice").glob("*.py")} | {"__version__"}
    for path in server_files():
        everywhere, at_top = parts_of_ours(imports(path)), parts_of_ours(imports(path, top_level_only=True))
        extra = everywhere - SERVER_MAY_IMPORT - SERVER_MAY_IMPORT_LAZILY - own
        assert not extra, f"{name_of(path)} imports {extra}"
        assert not at_top & SERVER_MAY_IMPORT_LAZILY, f"{name_of(path)} must import kernels inside the function"


def test_model_needs_the_standard_library_and_blake3_only() -> None:
    import sys

    for path in python_files("kvservice/model"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert roots <= sys.stdlib_module_names | THIRD_PARTY_OF_MODEL | {"kvservice"}, name_of(path)


def test_torch_and_triton_appear_only_under_kernels_and_client() -> None:
    for path in all_files():
        if not name_of(path).startswith(("kernels/", "client/")):
            assert not {"torch", "triton"} & {name.split(".")[0] for name in imports(path)}, name_of(path)


def test_engines_appear_only_under_connectors() -> None:
    for path in all_files():
        if not name_of(path).startswith("client/connectors/"):
            assert not {"vllm", "lmcache"} & {name.split(".")[0] for name in imports(path)}, name_of(path)


def test_a_connectors_edges_alone_are_light() -> None:
    """Engines import connectors in every process, early: outside functions nothing there may load numba or kernels."""
    for name in ("client/__init__.py", "client/connectors/__init__.py", "client/connectors/breaker.py"):
        at_top = imports(ROOT / name, top_level_only=True)
        heavy = [one for one in at_top if one.startswith(("numba", "torch", "kvservice.kernels", "kvservice.client"))]
        assert not heavy, f"{name} imports {heavy}"


def test_only_config_reads_the_environment() -> None:
    for path in all_files():
        if name_of(path) != READS_ENVIRONMENT:
            text = path.read_text()
            assert "os.environ" not in text, name_of(path)
            assert "getenv" not in text, name_of(path)


def test_no_folder_is_imported_by_its_bare_name() -> None:
    for path in [*all_files(), *python_files("tests"), *python_files("bench")]:
        own = name_of(path).split("/")[0]  # tests share builders and look at benches, benches share their clock
        allowed = {"tests": {"tests", "bench"}, "bench": {"bench"}}.get(own, set())
        bare = {name.split(".")[0] for name in imports(path)} & (BARE_NAMES - allowed)
        assert not bare, f"{name_of(path)} imports {bare}; write kvservice.<name>"


def test_the_rules_can_fail(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("from kvservice.app import Service\nimport torch\ndef f():\n    import vllm.config\n")
    assert parts_of_ours(imports(planted)) == {"app"}
    assert {"torch", "vllm.config"} <= set(imports(planted))
    assert "vllm.config" not in set(imports(planted, top_level_only=True))
