"""Block layouts learnt from vLLM's real attention, with AMX and without, in every type and block size it has here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import models
from tests.vllm.layout_leg import MARK

LEG_TIMEOUT_S = 240
KINDS = [
    [dtype, block_size, *heads]
    for dtype in ("bfloat16", "float16", "float32")
    for block_size in (32, 128)
    for heads in ((2, 32), (3, 64), (1, 80))
]


def run_leg(*, model: Path | None, without_amx: bool) -> list[dict[str, Any]]:
    leg = {"model": model and str(model), "kinds": KINDS, "without_amx": without_amx}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("layout_leg.py"), json.dumps(leg)],
        capture_output=True,
        text=True,
        timeout=LEG_TIMEOUT_S,
        check=False,
        cwd=models.ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
             "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(lines[0][len(MARK) :])
    return found


def has_amx() -> bool:
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def check(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["is_untouched"], one
        assert one["passed"] == [True, True, True], one
        assert all(one["nests"]), f"{one}: slow, by index; it should be a nest of strides"


@pytest.mark.parametrize("without_amx", [False, True])
def test_every_kind_of_block_is_learnt(without_amx: bool) -> None:
    found = run_leg(model=None, without_amx=without_amx)
    check(found)
    kinds = {one["isa"] for one in found}
    assert ("amx" in kinds) == (has_amx() and not without_amx)
    assert len(found) == len(KINDS)


def test_an_engines_own_blocks_are_learnt_and_its_identity_does_not_depend_on_amx(tmp_path: Path) -> None:
    model = models.tiny_llama(tmp_path, layers=11)
    one, other = (run_leg(model=model, without_amx=without_amx) for without_amx in (False, True))
    for found in (one, other):
        check(found)
        assert [layer["name"] for layer in found] == [f"model.layers.{n}.self_attn.attn" for n in range(11)]
        assert all(layer["others"] == 0 for layer in found)
    assert one[0]["namespace"] == other[0]["namespace"]
    assert one[0]["weights"].startswith("files:")
    if has_amx():
        assert one[0]["isa"] != other[0]["isa"]
