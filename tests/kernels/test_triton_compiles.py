"""What the kernels compile to, looked at without a GPU: no spills, whole 16-byte accesses, no fused multiply-add."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")
CAPABILITIES = (80, 90, 100)
KERNELS = ("restore", "restore_values", "restore_latent", "diff", "deviation", "gather")


@cache
def described(capability: int) -> dict[str, dict[str, int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, str(Path(__file__).with_name("compiled.py")), str(capability)]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_spill_nothing_and_fuse_nothing(capability: int, kernel: str) -> None:
    said = described(capability)[kernel]
    assert (said["LOCAL"], said["STACK"], said["FFMA"]) == (0, 0, 0)
    assert said["REG"] <= 128


@pytest.mark.parametrize("kernel", ["restore", "restore_values", "restore_latent", "gather"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_rows_move_in_whole_16_byte_accesses(capability: int, kernel: str) -> None:
    said = described(capability)[kernel]
    assert said["LDG128"] >= 1
    assert said["STG128"] >= 2
