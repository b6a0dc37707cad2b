"""Compiles the Triton kernels without a GPU and prints, as JSON, what the machine code looks like.

Run as a program of its own: in the test process the kernels may belong to Triton's interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvservice.kernels import triton_restore, triton_rows
from kvservice.kernels.triton_law import LAUNCH

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HEAD = {"HEAD_SIZE": 128, "ROTARY_OFFSET": 0, "PAIRS": 64, "IS_INTERLEAVED": False, "STORAGE": 0}
RESTORE = {**HEAD, "HEADS": 4, "COPIED": 128, "PADDED": 64, "HAS_MIRROR": True, "B_TOKENS": 16, "element_stride": 1}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "restore": (triton_restore.restore_plane, RESTORE),
    "restore_values": (triton_restore.restore_plane, {**RESTORE, "PAIRS": 0, "PADDED": 1}),
    "restore_latent": (
        triton_restore.restore_plane,
        {
            **RESTORE,
            "HEADS": 1,
            "HEAD_SIZE": 576,
            "ROTARY_OFFSET": 512,
            "PAIRS": 32,
            "COPIED": 512,
            "PADDED": 32,
            "B_TOKENS": 4,
        },
    ),
    "diff": (triton_rows.diff_plane, {**HEAD, "WIDTH": 512, "B_TOKENS": 16, "B_ELEMENTS": 128}),
    "deviation": (triton_rows.deviation_plane, {**HEAD, "WIDTH": 512, "PADDED": 512, "HALVINGS": 9}),
    "gather": (
        triton_rows.gather_plane,
        {"HEADS": 4, "HEAD_SIZE": 128, "PADDED": 128, "STORAGE": 0, "B_ROWS": 16, "element_stride": 1},
    ),
}
POINTERS = {
    "p_slots": "*i64", "p_sources": "*i32", "p_turns": "*fp32", "p_turn": "*fp32", "p_is_moved": "*i32",
    "p_nonfinite": "*i32",
}  # fmt: skip
OUT = {"diff": "*i32", "deviation": "*fp32"}
ALIGNED = {"block_stride", "offset_stride", "head_stride", "tokens", "rows"}
"""Integers that engines give as multiples of 16; pointers are aligned too."""


def source_of(name: str) -> ASTSource:
    kernel, constants = KERNELS[name]
    signature: dict[str, str] = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.startswith("p_"):
            signature[argument] = OUT.get(name, "*i16") if argument == "p_out" else POINTERS.get(argument, "*i16")
        else:
            signature[argument] = "i64" if argument.endswith("stride") else "i32"
    attributes = {
        (i_argument,): [["tt.divisibility", 16]]
        for i_argument, argument in enumerate(kernel.arg_names)
        if argument.startswith("p_") or argument in ALIGNED
    }
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def describe(name: str, capability: int) -> dict[str, int]:
    compiled = triton.compile(source_of(name), target=GPUTarget("cuda", capability, 32), options=dict(LAUNCH))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = tool("cuobjdump", "--dump-resource-usage", cubin.name)
        code = tool("nvdisasm", "-c", cubin.name)
    said = {word: int(value) for word, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    said |= {
        word: len(re.findall(rf"\b{pattern}", code))
        for word, pattern in (("LDG128", r"LDG\.E\S*\.128"), ("STG128", r"STG\.E\S*\.128"), ("FFMA", "FFMA"))
    }
    return said


def tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(BIN / name), *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: describe(name, int(sys.argv[1])) for name in KERNELS}))
