"""Makes edits visible to numba's cache, which looks at the outermost function's file only; picks how Triton runs.

Without a GPU the kernels run in Triton's interpreter. It must be chosen before a kernel is first imported.
"""

import os

import torch

from tests.kernels.builders import KERNELS

_LOOPS = KERNELS / "cpu_loops.py"
_newest = max((KERNELS / name).stat().st_mtime for name in ("vector.py", "cpu_steps.py"))
if _newest > _LOOPS.stat().st_mtime:
    os.utime(_LOOPS)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
