"""The CPU's smallest steps as numba intrinsics: copy a line, rotate a line, one pair.

A line is 64 bytes. LLVM vectors are written out, so that both halves of a pair stay in one register width and a
store can bypass the cache. No instruction carries fast-math or contract flags: every operation rounds on its own.
The first argument of the rotating steps is a tag whose numba type picks the storage type (``TAGS``).

Addresses are int64. These steps check nothing.
"""

# mypy: disable-error-code="no-untyped-call, misc, untyped-decorator, no-any-return"
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LINE_BYTES = 64
LANES = 16
"""32-bit words of a line."""

TAGS: dict[str, Any] = {"bfloat16": np.int16(0), "float16": np.uint16(0), "float32": np.uint32(0)}
_BFLOAT16, _FLOAT16 = types.int16, types.uint16

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_NAN_BITS = 0x7FC00000
"""The one NaN a rotation gives; rounded to storage 0x7fc0 (bfloat16) and 0x7e00 (float16)."""


class _Words:
    """Integer and float constants and types of one lane count (0 = scalar)."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.builder = builder
        self.lanes = lanes
        self.int = ir.VectorType(_I32, lanes) if lanes else _I32
        self.float = ir.VectorType(_F32, lanes) if lanes else _F32

    def of(self, value: int) -> Any:
        return ir.Constant(self.int, [value] * self.lanes if self.lanes else value)

    def as_float(self, bits: Any) -> Any:
        return self.builder.bitcast(bits, self.float)

    def as_bits(self, value: Any) -> Any:
        return self.builder.bitcast(value, self.int)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType())


def _load(builder: Any, address: Any, what: Any, align: int) -> Any:
    return builder.load(_pointer(builder, address), align=align, typ=what)


def _store(builder: Any, value: Any, address: Any, align: int, *, is_streamed: bool = False) -> None:
    written = builder.store(value, _pointer(builder, address), align=align)
    if is_streamed:
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))


def _float16_to_float32(words: _Words, half: Any) -> Any:
    """Low 16 bits of each word as float16: exact, subnormals by an exact float subtraction of 2^-14."""
    b = words.builder
    shifted = b.shl(b.and_(half, words.of(0x7FFF)), words.of(13))
    exponent = b.and_(shifted, words.of(0x0F800000))
    normal = b.add(shifted, words.of((127 - 15) << 23))
    special = b.add(normal, words.of((128 - 16) << 23))
    one_up = words.as_float(b.add(normal, words.of(1 << 23)))
    small = words.as_bits(b.fsub(one_up, words.as_float(words.of(113 << 23))))
    bits = b.select(b.icmp_unsigned("==", exponent, words.of(0x0F800000)), special, normal)
    bits = b.select(b.icmp_unsigned("==", exponent, words.of(0)), small, bits)
    return words.as_float(b.or_(bits, b.shl(b.and_(half, words.of(0x8000)), words.of(16))))


def _float32_to_float16(words: _Words, bits: Any) -> Any:
    """Nearest-even float16 of float32 bits, in the low 16 bits; NaN gives 0x7e00."""
    b = words.builder
    sign = b.and_(bits, words.of(0x80000000))
    size = b.xor(bits, sign)
    magic = words.of(126 << 23)  # 0.5: its last place is float16's smallest subnormal, so the addition rounds
    small = b.sub(words.as_bits(b.fadd(words.as_float(size), words.as_float(magic))), magic)
    odd = b.and_(b.lshr(size, words.of(13)), words.of(1))
    normal = b.lshr(b.add(b.add(size, words.of((((15 - 127) << 23) + 0xFFF) & 0xFFFFFFFF)), odd), words.of(13))
    result = b.select(b.icmp_unsigned("<", size, words.of(113 << 23)), small, normal)
    result = b.select(b.icmp_unsigned(">=", size, words.of((127 + 16) << 23)), words.of(0x7C00), result)
    result = b.select(b.icmp_unsigned(">", size, words.of(0x7F800000)), words.of(0x7E00), result)
    return b.or_(result, b.lshr(sign, words.of(16)))


def _round_bfloat16(words: _Words, bits: Any) -> Any:
    """Float32 bits rounded nearest-even to bfloat16 in the high 16 bits (the low ones are leavings)."""
    b = words.builder
    is_even = b.icmp_unsigned("==", b.and_(bits, words.of(0x10000)), words.of(0))
    return b.add(bits, b.select(is_even, words.of(0x7FFF), words.of(0x8000)))


def _unpack(words: _Words, tag: Any, packed: Any) -> tuple[Any, Any]:
    """Low and high 16-bit value of each word, as float32."""
    b = words.builder
    if tag == _BFLOAT16:
        low, high = b.shl(packed, words.of(16)), b.and_(packed, words.of(0xFFFF0000))
        return words.as_float(low), words.as_float(high)
    return _float16_to_float32(words, packed), _float16_to_float32(words, b.lshr(packed, words.of(16)))


def _pack(words: _Words, tag: Any, low: Any, high: Any) -> Any:
    """Two float32 bit patterns rounded to storage and put into one word."""
    b = words.builder
    if tag == _BFLOAT16:
        low, high = _round_bfloat16(words, low), _round_bfloat16(words, high)
        return b.or_(b.lshr(low, words.of(16)), b.and_(high, words.of(0xFFFF0000)))
    low, high = _float32_to_float16(words, low), _float32_to_float16(words, high)
    return b.or_(b.and_(low, words.of(0xFFFF)), b.shl(high, words.of(16)))


def _turn(words: _Words, pairs: list[tuple[Any, Any, Any, Any]]) -> list[Any]:
    """The rotation law in float32 for each (x1, x2, cosine, sine): bits of y1, y2 after one another, NaN made the one.

    NaN is rare: one compare finds it in two results, and only then are they looked through.
    """
    b = words.builder
    results = []
    for x1, x2, cosine, sine in pairs:
        results.append(b.fsub(b.fmul(x1, cosine), b.fmul(x2, sine)))
        results.append(b.fadd(b.fmul(x2, cosine), b.fmul(x1, sine)))
    has_nan = b.fcmp_unordered("uno", results[0], results[1])
    for left, right in zip(results[2::2], results[3::2], strict=True):
        has_nan = b.or_(has_nan, b.fcmp_unordered("uno", left, right))
    bits = [words.as_bits(y) for y in results]
    if words.lanes:
        flags = ir.IntType(words.lanes)
        has_nan = b.icmp_unsigned("!=", b.bitcast(has_nan, flags), ir.Constant(flags, 0))
    before = b.block
    with b.if_then(has_nan, likely=False):
        cleaned = [
            b.select(b.fcmp_unordered("uno", y, y), words.of(_NAN_BITS), one)
            for y, one in zip(results, bits, strict=True)
        ]
        inside = b.block
    return [_either(b, one, before, other, inside) for one, other in zip(bits, cleaned, strict=True)]


def _either(builder: Any, one: Any, before: Any, other: Any, inside: Any) -> Any:
    value = builder.phi(one.type)
    value.add_incoming(one, before)
    value.add_incoming(other, inside)
    return value


def _move_line_of_halves(words: _Words, tag: Any, args: tuple[Any, ...], *, is_streamed: bool) -> None:
    """First elements at ``source``, second ones ``reach`` bytes on; the table holds (cosine, sine) lines."""
    b = words.builder
    target, source, reach, table = args
    lines = [_load(b, b.add(source, step), words.int, 2) for step in (ir.Constant(_I64, 0), reach)]
    count = 2 if tag == types.uint32 else 4
    turns = [_load(b, b.add(table, ir.Constant(_I64, LINE_BYTES * i)), words.float, 4) for i in range(count)]
    if tag == types.uint32:
        results = _turn(words, [(words.as_float(lines[0]), words.as_float(lines[1]), turns[0], turns[1])])
    else:
        first, second = _unpack(words, tag, lines[0]), _unpack(words, tag, lines[1])
        pairs = [(first[i], second[i], turns[2 * i], turns[2 * i + 1]) for i in (0, 1)]
        low_1, low_2, high_1, high_2 = _turn(words, pairs)
        results = [_pack(words, tag, low_1, high_1), _pack(words, tag, low_2, high_2)]
    align = LINE_BYTES if is_streamed else 2
    _store(b, results[0], target, align, is_streamed=is_streamed)
    _store(b, results[1], b.add(target, reach), align, is_streamed=is_streamed)


def _halves_step(tag: Any, *, is_streamed: bool) -> tuple[Any, Callable[..., Any]]:
    signature = types.void(tag, types.int64, types.int64, types.int64, types.int64)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _move_line_of_halves(_Words(builder, LANES), tag, args[1:], is_streamed=is_streamed)
        return context.get_dummy_value()

    return signature, emit


@intrinsic
def move_halves(typing: Any, tag: Any, target: Any, source: Any, reach: Any, table: Any) -> Any:
    """Rotate the line at ``source`` with the line ``reach`` bytes on; both results go as far apart from ``target``."""
    return _halves_step(tag, is_streamed=False)


@intrinsic
def move_halves_streamed(typing: Any, tag: Any, target: Any, source: Any, reach: Any, table: Any) -> Any:
    """``move_halves`` past the cache; both target lines must be 64-byte aligned."""
    return _halves_step(tag, is_streamed=True)


def _neighbours_step(tag: Any, *, is_streamed: bool) -> tuple[Any, Callable[..., Any]]:
    signature = types.void(tag, types.int64, types.int64, types.int64)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = _Words(builder, LANES)
        x1, x2 = _unpack(words, tag, _load(builder, args[2], words.int, 2))
        addresses = (args[3], builder.add(args[3], ir.Constant(_I64, LINE_BYTES)))
        turns = [_load(builder, address, words.float, 4) for address in addresses]
        moved = _pack(words, tag, *_turn(words, [(x1, x2, *turns)]))
        _store(builder, moved, args[1], LINE_BYTES if is_streamed else 2, is_streamed=is_streamed)
        return context.get_dummy_value()

    return signature, emit


@intrinsic
def move_neighbours(typing: Any, tag: Any, target: Any, source: Any, table: Any) -> Any:
    """Rotate a line of neighbouring 16-bit pairs; the table holds one (cosine, sine) line for its 16 pairs."""
    return _neighbours_step(tag, is_streamed=False)


@intrinsic
def move_neighbours_streamed(typing: Any, tag: Any, target: Any, source: Any, table: Any) -> Any:
    """``move_neighbours`` past the cache; the target must be 64-byte aligned."""
    return _neighbours_step(tag, is_streamed=True)


@intrinsic
def move_pair(typing: Any, tag: Any, target: Any, source: Any, reach: Any, cosine: Any, sine: Any) -> Any:
    """Rotate one element at ``source`` with the one ``reach`` bytes on; cosine and sine are addresses too."""
    signature = types.void(tag, *[types.int64] * 5)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = _Words(builder, 0)
        target, source, reach, *turns = args[1:]
        stored = _I32 if tag == types.uint32 else _I16
        pair = [_load(builder, address, stored, 2) for address in (source, builder.add(source, reach))]
        cosine, sine = (_load(builder, address, _F32, 4) for address in turns)
        x1, x2 = (_widen_one(words, tag, value) for value in pair)
        for address, bits in zip(
            (target, builder.add(target, reach)), _turn(words, [(x1, x2, cosine, sine)]), strict=True
        ):
            _store(builder, _narrow_one(words, tag, bits), address, 2)
        return context.get_dummy_value()

    return signature, emit


def _widen_one(words: _Words, tag: Any, stored: Any) -> Any:
    if tag == types.uint32:
        return words.as_float(stored)
    return _unpack(words, tag, words.builder.zext(stored, _I32))[0]


def _narrow_one(words: _Words, tag: Any, bits: Any) -> Any:
    if tag == types.uint32:
        return bits
    return words.builder.trunc(_pack(words, tag, bits, words.of(0)), _I16)


@intrinsic
def widen(typing: Any, tag: Any, address: Any) -> Any:
    """The stored value at ``address`` as float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = _Words(builder, 0)
        stored = _load(builder, args[1], _I32 if tag == types.uint32 else _I16, 2)
        return _widen_one(words, tag, stored)

    return types.float32(tag, types.int64), emit


def _loader(stored: Any, result: Any) -> tuple[Any, Callable[..., Any]]:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, args[0], stored, 2)

    return result(types.int64), emit


def _word_pointer(builder: Any, args: Any) -> Any:
    """Where word ``args[1]`` behind address ``args[0]`` is."""
    return _pointer(builder, builder.add(args[0], builder.shl(args[1], ir.Constant(_I64, 3))))


@intrinsic
def load_word(typing: Any, address: Any, index: Any) -> Any:
    """The int64 ``index`` words behind ``address``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_word_pointer(builder, args), align=8, typ=_I64)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def store_word(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Set the int64 ``index`` words behind ``address``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _word_pointer(builder, args), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def load_int32(typing: Any, address: Any) -> Any:
    """The int32 at ``address``."""
    return _loader(_I32, types.int32)


@intrinsic
def load_uint16(typing: Any, address: Any) -> Any:
    """The 16 bits at ``address``."""
    return _loader(_I16, types.uint16)


def _copier(what: Any, *, is_streamed: bool = False) -> tuple[Any, Callable[..., Any]]:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _load(builder, args[1], what, 1)
        _store(builder, value, args[0], LINE_BYTES if is_streamed else 1, is_streamed=is_streamed)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def copy_line(typing: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes."""
    return _copier(ir.VectorType(_I32, LANES))


@intrinsic
def copy_line_streamed(typing: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes past the cache; the target must be 64-byte aligned."""
    return _copier(ir.VectorType(_I32, LANES), is_streamed=True)


@intrinsic
def copy_two_bytes(typing: Any, target: Any, source: Any) -> Any:
    """Copy 2 bytes."""
    return _copier(_I16)


@intrinsic
def copy_four_bytes(typing: Any, target: Any, source: Any) -> Any:
    """Copy 4 bytes."""
    return _copier(_I32)


@intrinsic
def differ_in_line(typing: Any, left: Any, right: Any) -> Any:
    """Whether 64 bytes differ."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lines = [_load(builder, address, ir.VectorType(_I32, LANES), 2) for address in args]
        mask = builder.bitcast(builder.icmp_unsigned("!=", *lines), _I16)
        return builder.icmp_unsigned("!=", mask, ir.Constant(_I16, 0))

    return types.boolean(types.int64, types.int64), emit


@intrinsic
def nonfinite_in_line(typing: Any, tag: Any, address: Any) -> Any:
    """How many values of a line are NaN or infinite."""
    exponents = {_BFLOAT16: 0x7F80, _FLOAT16: 0x7C00}

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one, lanes = (_I32, LANES) if tag == types.uint32 else (_I16, 2 * LANES)
        line = ir.VectorType(one, lanes)
        ones = ir.Constant(line, [exponents.get(tag, 0x7F800000)] * lanes)
        is_full = builder.icmp_unsigned("==", builder.and_(_load(builder, args[1], line, 2), ones), ones)
        return builder.zext(builder.ctpop(builder.bitcast(is_full, ir.IntType(lanes))), _I64)

    return types.int64(tag, types.int64), emit


@intrinsic
def prefetch_line(typing: Any, address: Any) -> Any:
    """Ask for the line at ``address``; reading past a buffer's end is harmless here."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), _I32, _I32, _I32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [ir.PointerType()], kind)
        flags = [ir.Constant(_I32, value) for value in (0, 3, 1)]  # read, keep in all caches, data
        builder.call(prefetch, [_pointer(builder, args[0]), *flags])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def store_fence(typing: Any) -> Any:
    """Order streamed stores before whatever tells others that they are there."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit
