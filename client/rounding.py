"""What a lossy identity does to rows on their way into a record; nothing where the identity is exact."""

from collections.abc import Sequence

from kvservice.model.identity import Identity
from kvservice.storage.buffer import StorageBits


def round_planes(identity: Identity, planes: Sequence[StorageBits]) -> None:
    """Round rows as ``identity`` says, in place: plane by plane ``[rows, row_elements]``, inside the record."""
    if not identity.is_lossy:
        return
    from kvservice.kernels.cpu_int8 import round_rows  # numba: not before an engine has built its model

    for shape, rows in zip(identity.geometry.planes, planes, strict=True):
        round_rows(rows, shape.head_size, identity.geometry.dtype)
