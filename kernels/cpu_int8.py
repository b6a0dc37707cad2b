"""Rows as 8 bits a value: rounded once when they are stored, and from then on packed and unpacked without loss.

A group is one head of one row. With ``a`` its largest absolute value and everything in float32, each step rounded on
its own, nearest even:

    s = a / 127        q = rint(x / s), -127 to 127        stored = narrow(q * s)

Narrowing moves ``q * s`` by less than half of ``s`` (127 * 2^-8 < 0.5 for bfloat16), so the stored value has the same
``q``, and the largest one stays ``a``: rounding what is rounded changes nothing, and ``a`` and the ``q`` give back the
very bits. A head whose largest value is below 2^-100 becomes zeros, so that no step needs a subnormal float32; zeros
have no sign. NaN and infinity are left alone.

    packed := a:uint16 [groups], q:int8 [groups, size]
"""

# mypy: disable-error-code="untyped-decorator"
import numpy as np
import numpy.typing as npt
from numba import njit

from kvservice.kernels.shapes import Bits, KernelInputError

DTYPES = ("bfloat16", "float16")
"""Storage types that have a form of 8 bits."""
Q_MAX = 127
LARGEST_BYTES = 2
_HALF_STEP = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves no place for fractions
_SMALLEST = {"bfloat16": (127 - 100) << 7, "float16": 0}
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}
_Floats = npt.NDArray[np.float32]
_Words = npt.NDArray[np.uint32]
_Int8s = npt.NDArray[np.int8]
_Bytes = npt.NDArray[np.uint8]


def packed_bytes(groups: int, size: int) -> int:
    """Bytes of the packed form of ``groups`` groups of ``size`` values."""
    return groups * (LARGEST_BYTES + size)


def round_rows(rows: Bits, size: int, dtype: str) -> None:
    """Round rows to 8 bits, in place. ``rows``: uint16 storage bits, C-contiguous; ``size``: values of a head.

    Raises KernelInputError for another storage type, layout or size.
    """
    groups = _groups(rows, size, dtype, is_written=True)
    _round(groups, dtype == "bfloat16", _SMALLEST[dtype], _INFINITY[dtype])


def pack(rows: Bits, size: int, dtype: str, out: _Bytes) -> bool:
    """Write the packed form to ``out``, uint8 ``[packed_bytes]``. False if a group does not come back as it is: then
    ``out`` is rubbish. Raises KernelInputError as ``round_rows`` does, and for an ``out`` of another size.
    """
    groups = _groups(rows, size, dtype)
    largest, steps = _parts(out, groups.shape)
    return bool(_pack(groups, dtype == "bfloat16", _SMALLEST[dtype], _INFINITY[dtype], largest, steps))


def unpack(packed: _Bytes, size: int, dtype: str, out: Bits) -> None:
    """Write the rows that a packed form stands for to ``out``, laid out as in ``round_rows``; whatever bytes come in,
    only ``out`` is written. Raises KernelInputError as ``pack`` does.
    """
    groups = _groups(out, size, dtype, is_written=True)
    largest, steps = _parts(packed, groups.shape)
    _unpack(largest, steps, dtype == "bfloat16", groups)


def _groups(rows: Bits, size: int, dtype: str, *, is_written: bool = False) -> Bits:
    if dtype not in DTYPES:
        raise KernelInputError(f"{dtype} has no form of 8 bits; use one of {list(DTYPES)}")
    if rows.dtype != np.uint16 or not (rows.flags.c_contiguous and rows.flags.aligned):
        raise KernelInputError("rows must be storage bits (uint16), contiguous and aligned")
    if is_written and not rows.flags.writeable:
        raise KernelInputError("rows to be written are read-only")
    if size < 1 or rows.size % size:
        raise KernelInputError(f"{rows.size} values are not heads of {size}")
    return rows.reshape(-1, size)


def _parts(packed: _Bytes, shape: tuple[int, ...]) -> tuple[Bits, _Int8s]:
    count, size = shape
    if packed.dtype != np.uint8 or packed.ndim != 1 or len(packed) != packed_bytes(count, size):
        raise KernelInputError(f"{packed.size} bytes for {count} heads of {size}, it takes {packed_bytes(count, size)}")
    if not packed.flags.c_contiguous or packed.ctypes.data % LARGEST_BYTES:
        raise KernelInputError("packed bytes must be contiguous and begin at an even address")
    end = count * LARGEST_BYTES
    return packed[:end].view(np.uint16), packed[end:].view(np.int8).reshape(count, size)


# One group, named by its index, as a view of it costs more than its arithmetic. ``floats`` is scratch, and ``words``
# are its bits.


@njit(nogil=True, cache=True)
def _largest(groups: Bits, i_group: int) -> int:
    """Bits of the largest absolute value: as integers they are in the order of the values."""
    found = np.uint16(0)
    for i in range(groups.shape[1]):
        found = max(found, np.uint16(groups[i_group, i] & np.uint16(0x7FFF)))
    return int(found)


@njit(nogil=True, cache=True)
def _step_of(largest: int, is_bfloat16: bool, one: _Floats, bits_of_one: _Words) -> np.float32:
    if is_bfloat16:
        bits_of_one[0] = np.uint32(largest) << np.uint32(16)
    else:
        bits_of_one[0] = np.uint32(largest & 0x7FFF) << np.uint32(13)
        one[0] *= np.float32(2.0**112)
    return np.float32(one[0] / np.float32(Q_MAX))


@njit(nogil=True, cache=True)
def _widen(groups: Bits, i_group: int, is_bfloat16: bool, floats: _Floats, words: _Words) -> None:
    size = groups.shape[1]
    if is_bfloat16:
        for i in range(size):
            words[i] = np.uint32(groups[i_group, i]) << np.uint32(16)
        return
    for i in range(size):
        words[i] = np.uint32(groups[i_group, i] & np.uint16(0x7FFF)) << np.uint32(13)
    for i in range(size):  # exact, subnormals too
        floats[i] *= np.float32(2.0**112)
    for i in range(size):
        words[i] |= np.uint32(groups[i_group, i] & np.uint16(0x8000)) << np.uint32(16)


@njit(nogil=True, cache=True)
def _to_steps(floats: _Floats, step: np.float32) -> None:
    for i in range(len(floats)):
        floats[i] = (floats[i] / step + _HALF_STEP) - _HALF_STEP


@njit(nogil=True, cache=True)
def _narrow(floats: _Floats, words: _Words, is_bfloat16: bool, out: Bits, i_group: int) -> None:
    """Nearest even, of finite values; ``floats`` is used up. A float16 that becomes zero has no sign; of bfloat16 none
    becomes zero, as largest values are not that small."""
    size = out.shape[1]
    if is_bfloat16:
        for i in range(size):
            half = np.uint32(0x7FFF) + ((words[i] >> np.uint32(16)) & np.uint32(1))
            out[i_group, i] = np.uint16((words[i] + half) >> np.uint32(16))
        return
    for i in range(size):
        bits = words[i] & np.uint32(0x7FFFFFFF)
        half = np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        normal = ((bits - np.uint32(112 << 23) + half) >> np.uint32(13)) & np.uint32(0x7FFF)
        out[i_group, i] = np.uint16(normal | ((words[i] >> np.uint32(16)) & np.uint32(0x8000)))
    for i in range(size):
        floats[i] = abs(floats[i]) + np.float32(0.5)  # its last place is the smallest subnormal of float16
    for i in range(size):
        small, normal = words[i] - np.uint32(126 << 23), out[i_group, i]
        sign = normal & np.uint32(0x8000) if small != 0 else np.uint32(0)
        out[i_group, i] = np.uint16(small | sign) if small <= np.uint32(1024) else normal


# All groups


@njit(nogil=True, cache=True)
def _round(groups: Bits, is_bfloat16: bool, smallest: int, infinity: int) -> None:
    size = groups.shape[1]
    floats = np.empty(size, np.float32)
    words = floats.view(np.uint32)
    for i_group in range(len(groups)):
        largest = _largest(groups, i_group)
        if largest >= infinity:
            continue
        if largest <= smallest:
            for i in range(size):
                groups[i_group, i] = 0
            continue
        step = _step_of(largest, is_bfloat16, floats, words)
        _widen(groups, i_group, is_bfloat16, floats, words)
        _to_steps(floats, step)
        for i in range(size):
            floats[i] *= step
        _narrow(floats, words, is_bfloat16, groups, i_group)


@njit(nogil=True, cache=True)
def _pack(groups: Bits, is_bfloat16: bool, smallest: int, infinity: int, largest: Bits, steps: _Int8s) -> bool:
    size = groups.shape[1]
    floats, back = np.empty(size, np.float32), np.zeros((1, size), np.uint16)
    words = floats.view(np.uint32)
    for i_group in range(len(groups)):
        found = _largest(groups, i_group)
        largest[i_group] = found
        if found >= infinity or 0 < found <= smallest:
            return False
        if found == 0:
            floats[:] = 0
        else:
            step = _step_of(found, is_bfloat16, floats, words)
            _widen(groups, i_group, is_bfloat16, floats, words)
            _to_steps(floats, step)
        for i in range(size):
            steps[i_group, i] = np.int8(np.int32(floats[i]))
        if found != 0:
            for i in range(size):
                floats[i] *= step
        _narrow(floats, words, is_bfloat16, back, 0)
        differing = np.uint16(0)
        for i in range(size):
            differing |= groups[i_group, i] ^ back[0, i]
        if differing:
            return False
    return True


@njit(nogil=True, cache=True)
def _unpack(largest: Bits, steps: _Int8s, is_bfloat16: bool, groups: Bits) -> None:
    size = groups.shape[1]
    floats = np.empty(size, np.float32)
    words = floats.view(np.uint32)
    for i_group in range(len(groups)):
        step = _step_of(int(largest[i_group]), is_bfloat16, floats, words)
        for i in range(size):
            floats[i] = np.float32(steps[i_group, i]) * step
        _narrow(floats, words, is_bfloat16, groups, i_group)
