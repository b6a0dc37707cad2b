"""What a user installs: one top-level name, from wheel and sdist, and a command that runs."""

import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvservice import __version__

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist, the wheel built from the sdist, so that the sdist is known to be complete."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    return next(built.glob("*.tar.gz"))


def test_wheel_has_one_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"kvservice", f"kvservice-{__version__}.dist-info"}


def test_wheel_holds_the_linked_folders_and_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"kvservice/py.typed", "kvservice/storage/record.py", "kvservice/kernels/reference.py"}
    wanted |= {"kvservice/client/client.py", "kvservice/wire/v1/cache_pb2.py", "kvservice/storage/FORMAT.md"}
    wanted |= {f"kvservice/page/page.{kind}" for kind in ("html", "css", "js")}
    assert wanted <= names


def test_sdist_holds_protos_and_real_files_for_links(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert "proto/kvservice/wire/v1/cache.proto" in members
    assert members["kvservice/kernels/reference.py"].isfile()


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installs_into_a_new_environment_and_runs(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    package: Path = request.getfixturevalue(kind)
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / "bin"
    if kind == "sdist":
        run(binaries / "pip", "install", "--quiet", "setuptools>=77")
    isolation = [] if kind == "wheel" else ["--no-build-isolation"]
    run(binaries / "pip", "install", "--quiet", "--no-deps", *isolation, package)
    assert run(binaries / "kvservice", "--version", cwd=tmp_path).strip() == f"kvservice {__version__}"


def test_kernels_and_proto_are_not_regular_packages() -> None:
    """A top-level package named kernels would be taken for another project's by libraries that probe for it."""
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not (ROOT / "proto/__init__.py").exists()


def test_links_lead_to_the_top_level_folders() -> None:
    for name in ("client", "kernels", "storage"):
        assert (ROOT / "kvservice" / name).readlink() == Path("..") / name


def test_generated_code_is_current(tmp_path: Path) -> None:
    """Code for calls is kept only of a file that has a service."""
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    run(sys.executable, "-P", "-m", "grpc_tools.protoc", "-I", ROOT / "proto", *outputs, *protos)
    unused = {f"{proto.stem}_pb2_grpc.py" for proto in protos if "\nservice " not in proto.read_text()}
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*") if path.name not in unused}
    assert made == {path.relative_to(ROOT) for path in (ROOT / "kvservice/wire/v1").glob("*_pb2*")}
    for path in made:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), path


def test_generated_code_runs_on_the_oldest_versions_that_are_allowed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        needs = map(Requirement, tomllib.load(file)["project"]["dependencies"])
    oldest = {one.name: str(next(iter(one.specifier)).version) for one in needs}
    wire = (ROOT / "kvservice/wire/v1/cache_pb2.py").read_text()
    assert f"# Protobuf Python Version: {oldest['protobuf']}\n" in wire
    calls = (ROOT / "kvservice/wire/v1/cache_pb2_grpc.py").read_text()
    assert calls.count(f"GRPC_GENERATED_VERSION = '{oldest['grpcio']}.0'") == 1


def test_node_runs_without_torch(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from kvservice.app import Service\n"
        "from kvservice.config import Settings\n"
        "import kvservice.kernels.cpu\n"
        f"with Service(Settings(socket={str(tmp_path / 's')!r}, grpc_port=-1, http_port=-1, host_bytes=1 << 20)):\n"
        "    print('served')\n"
    )
    assert run(sys.executable, "-P", "-c", script, cwd=tmp_path).strip() == "served"
