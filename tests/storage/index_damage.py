"""Ways in which the files of an index go bad, on a seed."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path


def damage(folder: Path, chance: random.Random) -> str:
    """Spoil one file of the folder; says what was done to which."""
    path = folder / chance.choice(sorted(path.name for path in folder.iterdir()))
    ways = [flip_bits, cut, zero, empty, remove]
    way = chance.choice(ways if path.stat().st_size else [remove])
    way(path, chance)
    return f"{way.__name__} {path.name}"


def flip_bits(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def zero(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    start = chance.randrange(len(data))
    end = min(len(data), start + chance.randint(1, 4096))
    path.write_bytes(data[:start] + bytes(end - start) + data[end:])


def empty(path: Path, _: random.Random) -> None:
    path.write_bytes(b"")


def remove(path: Path, _: random.Random) -> None:
    path.unlink()


def lose_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def lose_current(folder: Path) -> None:
    (folder / "CURRENT").unlink()


def keep_tables_only(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix != ".sst":
            path.unlink()


def fill_with_rubbish(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"rubbish")


WHOLESALE: list[Callable[[Path], None]] = [
    lose_folder, replace_by_file, empty_folder, lose_current, keep_tables_only, fill_with_rubbish,
]  # fmt: skip
