"""Torch tensors as the kernels want them: storage bits, numpy views, checks."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvservice.kernels.shapes import KernelInputError, Plane

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def storage_name(values: Tensor) -> str:
    """The KV dtype's name; raises ``KernelInputError`` for one without kernels."""
    if values.dtype not in _NAMES:
        raise KernelInputError(f"KV dtype {values.dtype} has no kernel; use one of {sorted(_NAMES.values())}")
    return _NAMES[values.dtype]


def bits_of(values: Tensor) -> Tensor:
    """The same memory as int16 or int32."""
    return values.detach().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def numpy_bits(values: Tensor) -> npt.NDArray[Any]:
    """A CPU tensor's memory as numpy storage bits, strides and all; no copy."""
    storage_name(values)
    return bits_of(values).numpy().view(np.uint32 if values.dtype == torch.float32 else np.uint16)


def check_tensor_rows(plane: Tensor, shape: Plane) -> None:
    """Raise ``KernelInputError`` unless ``plane`` is contiguous ``[rows, heads * head_size]``."""
    storage_name(plane)
    width = shape.heads * shape.head_size
    if plane.dim() != 2 or plane.shape[1] != width or not plane.is_contiguous():
        raise KernelInputError(f"rows must be contiguous [rows, {width}], not {list(plane.shape)} {plane.stride()}")


def check_tensor_paged(memory: Tensor, shape: Plane, dtype: torch.dtype) -> None:
    """Raise ``KernelInputError`` unless ``memory`` is ``[blocks, block_size, heads, head_size]`` of ``dtype``."""
    if memory.dim() != 4 or memory.shape[2:] != (shape.heads, shape.head_size) or memory.dtype != dtype:
        raise KernelInputError(
            f"paged memory must be {dtype} [blocks, block_size, {shape.heads}, {shape.head_size}], "
            f"not {memory.dtype} {list(memory.shape)}"
        )
