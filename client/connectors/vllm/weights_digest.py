"""A digest of weights on disk: what a folder of weights is called when nothing else names it.

    digest := BLAKE3(tag, (name, part)*)      files in order of their names, each part length-prefixed
    part   := config file: its bytes | safetensors: size, header, 4 KiB from the middle of every tensor
            | other weights: size, 1,024 pieces of 4 KiB at equal distances, and the last 4 KiB

A sample, since reading 140 GB at every start would take minutes: training, merging an adapter and quantising change
nearly every element of the tensors they touch, hence the pieces. Who edits single elements must name the weights
himself.
"""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from kvservice.model.errors import InvalidInputError
from kvservice.model.segment import digest

PIECE_BYTES = 4096
PIECES_PER_FILE = 1024
HEADER_BYTES_MAX = 100 << 20
"""As the safetensors library itself."""

_CONFIGS = (
    "adapter_config.json",
    "config.json",
    "hf_quant_config.json",
    "params.json",
    "quant_config.json",
    "quantize_config.json",
)
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def model_name(name: str) -> str:
    """The hub's name; of a local folder its last part, since the rest is another on every machine."""
    return Path(name).name if Path(name).exists() else name


def weights_digest(path: Path) -> str:
    """Digest of a model's or adapter's folder, or of one file; 32 hexadecimal digits.

    Raises InvalidInputError when it holds no weights or they cannot be read.
    """
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        weights = _weights_of(files)
        configs = [file for file in files if file.name in _CONFIGS]
        if not weights:
            raise InvalidInputError(f"{path} holds no weights ({', '.join(_WEIGHTS)})")
        parts = [part for file in configs for part in (file.name.encode(), file.read_bytes())]
        parts += [part for file in weights for part in _file_parts(file)]
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    return digest(b"kvservice weights\0", *parts).hex()[:32]


def _weights_of(files: list[Path]) -> list[Path]:
    """The weights an engine would load: of several kinds the first, since folders often hold the same in two."""
    for suffix in _WEIGHTS:
        found = [file for file in files if file.suffix == suffix and file.is_file()]
        if found:
            return found
    return []


def _file_parts(path: Path) -> Iterator[bytes]:
    yield path.name.encode()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        yield struct.pack("<Q", size)
        if path.suffix == ".safetensors":
            yield from _tensor_parts(path, descriptor, size)
        else:
            places = [*range(0, size, max(size // PIECES_PER_FILE, PIECE_BYTES)), max(size - PIECE_BYTES, 0)]
            yield b"".join(os.pread(descriptor, PIECE_BYTES, place) for place in places)
    finally:
        os.close(descriptor)


def _tensor_parts(path: Path, descriptor: int, size: int) -> Iterator[bytes]:
    prefix = os.pread(descriptor, 8, 0)
    header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 0 < header_bytes <= min(size, HEADER_BYTES_MAX):
        raise InvalidInputError(f"{path} is no safetensors file: its header would have {header_bytes} bytes")
    header = os.pread(descriptor, header_bytes, 8)
    yield header
    try:
        tensors = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"}
        places = [8 + header_bytes + (begin + max(end - PIECE_BYTES, begin)) // 2 for begin, end in tensors.values()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInputError(f"{path} is no safetensors file: its header cannot be read: {error}") from error
    yield b"".join(os.pread(descriptor, PIECE_BYTES, place) for place in sorted(places))
