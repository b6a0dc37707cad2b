"""Refreshes on the real vLLM's own layers: bit for bit what the engine computes itself, and nothing else is touched.

One engine a leg, see round_engine_leg.py.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import models
from tests.vllm.legs import LEG_TIMEOUT_S, ROOT, environment
from tests.vllm.round_engine_leg import MARK

NEAR = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-5}
"""How far KV may be off, relative to its norm, when rows are computed in calls of other sizes."""
FORWARD_DIFFERS = "layer 0 called by itself writes other KV than within the model"
NO_SLOT_IS_WRITTEN = "layer 0 stores rows that have no slot (slot -1)"
PLANTED = "its layers cannot be called one by one: RuntimeError: planted by the test"

Make = Callable[[Path], Path]


@pytest.fixture(scope="session")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with our entry points in it, as an installed package has them."""
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())
    points = text["project"]["entry-points"]["vllm.general_plugins"]
    folder = tmp_path_factory.mktemp("site")
    info = folder / "kvservice_of_this_tree-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvservice-of-this-tree\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    return folder


def run_leg(
    model: Path,
    plugin_folder: Path,
    folder: Path,
    *,
    plugins: str | None = None,
    is_multiprocess: bool = False,
    **leg: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the leg found, and what its connector reported when vLLM registered its KV."""
    spec = {"model": str(model), "folder": str(folder), "is_tried": not is_multiprocess, **leg}
    path = f"{plugin_folder}:{Path(__file__).with_name('engine_spy')}"
    filtered = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("round_engine_leg.py"), json.dumps(spec)],
        capture_output=True,
        text=True,
        timeout=LEG_TIMEOUT_S,
        check=False,
        cwd=ROOT,
        env={**environment(is_multiprocess=is_multiprocess), "PYTHONPATH": path, **filtered},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = json.loads(lines[0][len(MARK) :])
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found, report


def check(found: dict[str, Any], *, dtype: str = "bfloat16") -> None:
    assert found["all must"] == [True, True, True]
    assert found["all picked"]
    assert found["local rows"]
    assert all(found["written rows"].values()), found["written rows"]
    assert found["round"]["hkvd"]
    assert found["round"]["mixed"]
    near = [found["beside true rows"], found["pieces"], found["round"]["hkvd, joined"], found["round"]["mixed, joined"]]
    assert max(near) <= NEAR[dtype], near
    assert all(found["failures"].values()), found["failures"]
    assert found["refused"] == {
        "as it is": "",
        "scaled": FORWARD_DIFFERS,
        "stores all": NO_SLOT_IS_WRITTEN,
        "raises": PLANTED,
        "again": "",
        "untouched": True,
    }
    assert all(held for name, held in found.items() if name.endswith(": context"))
    assert found["said after"]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(models.tiny_llama, id="llama"),
        pytest.param(lambda cache: models.tiny_llama(cache, head_size=80), id="llama, heads of 80"),
        pytest.param(lambda cache: models.tiny_qwen(cache, "qwen2"), id="qwen2"),
        pytest.param(lambda cache: models.tiny_qwen(cache, "qwen3"), id="qwen3"),
        pytest.param(lambda cache: models.tiny_qwen(cache, "qwen3_moe"), id="qwen3, experts"),
        pytest.param(models.tiny_gemma3, id="gemma3"),
    ],
)
def test_any_models_layers_give_the_engines_own_bits(
    make: Make, model_cache: Path, plugin_folder: Path, tmp_path: Path
) -> None:
    found, report = run_leg(make(model_cache), plugin_folder, tmp_path)
    assert report["seen"] == 1, "the plugin did not see the worker"
    check(found)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types_too(dtype: str, tiny_model: Path, plugin_folder: Path, tmp_path: Path) -> None:
    found, _ = run_leg(tiny_model, plugin_folder, tmp_path, engine={"dtype": dtype})
    assert found["isa"] == "vec"
    check(found, dtype=dtype)


def test_other_blocks_too_and_without_the_plugin(tiny_model: Path, plugin_folder: Path, tmp_path: Path) -> None:
    engine = {"block_size": 128}
    found, report = run_leg(tiny_model, plugin_folder, tmp_path, plugins="", without_amx=True, engine=engine)
    assert report["seen"] == 0, "VLLM_PLUGINS did not keep the plugin away"
    assert report["runner"] == "CPUModelRunner"
    check(found)


@pytest.mark.parametrize(("plugins", "seen"), [(None, 1), ("", 0)])
def test_a_worker_of_its_own_process_finds_its_model(
    plugins: str | None, seen: int, tiny_model: Path, plugin_folder: Path, tmp_path: Path
) -> None:
    found, report = run_leg(tiny_model, plugin_folder, tmp_path, plugins=plugins, is_multiprocess=True)
    assert (report["seen"], report["runner"], report["layers"]) == (seen, "CPUModelRunner", 4)
    assert report["pid"] != found["pid"]
