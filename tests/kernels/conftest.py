"""Makes edits visible to numba's cache, which looks at the outermost function's file only; picks how Triton runs.

Without a GPU the kernels run in Triton's interpreter. It must be chosen before a kernel is first imported.
"""

import os

import torch

from tests.kernels.builders import KERNELS

for _name, _below in (
    ("cpu_loops.py", ("vector.py", "cpu_steps.py")),
    ("cpu_deviation.py", ("vector.py", "cpu_steps.py", "cpu_loops.py")),
    ("cpu_tables.py", ("vector.py", "cpu_loops.py")),
    ("cpu_blocks.py", ("vector.py", "cpu_steps.py")),
    ("cpu_packed.py", ("vector.py", "cpu_steps.py", "cpu_loops.py", "cpu_blocks.py")),
):
    _file = KERNELS / _name
    if max((KERNELS / name).stat().st_mtime for name in _below) > _file.stat().st_mtime:
        os.utime(_file)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
