"""The index in RocksDB when its files go bad: it is refused, or says what once was true; it never lies, never dies."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvservice.model.errors import DiskError, DiskFullError
from kvservice.storage.index_format import CorruptIndexError
from kvservice.storage.rocks_index import DAMAGED_MAX, RocksIndex, RocksPlace
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.storage.ssd_index import IndexDigest, PutNote, PutRecord
from tests.storage.index_damage import WHOLESALE, damage, empty_folder, lose_folder
from tests.storage.recovery_builders import index_contents, make_entry, make_identity_note

ENTRIES = [make_entry(number % 7, number, offset=4096 * number) for number in range(1, 400)]
ROUNDS = 50


def fill(folder: Path, *, is_flushed: bool = False) -> RocksIndex:
    """Half of the entries in a table, half in the log."""
    index = RocksIndex(folder)
    index.apply([PutNote(make_identity_note())])
    index.apply([PutRecord(entry) for entry in ENTRIES[:200]])
    index.flush()
    for entry in ENTRIES[200:]:
        index.apply([PutRecord(entry)])
    if is_flushed:
        index.flush()
    return index


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a killed process leaves it: closing would bring the log into a table."""
    folder = tmp_path_factory.mktemp("whole")
    index = fill(folder / "open")
    shutil.copytree(folder / "open", folder / "index")
    index.close()
    return folder / "index"


def read(folder: Path) -> tuple[list[SsdEntry], IndexDigest]:
    index = RocksIndex(folder)
    try:
        return index_contents(index)[0], index.digest()
    finally:
        index.close()


def test_a_killed_process_leaves_all_that_it_applied(whole: Path, tmp_path: Path) -> None:
    assert read(shutil.copytree(whole, tmp_path / "copy"))[0] == ENTRIES


def test_damage_on_any_seed_is_refused_or_gives_what_once_was_true(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    refused, short = 0, 0
    digest = read(shutil.copytree(whole, tmp_path / "read"))[1]  # whoever opens it empties the log into a table
    known = {entry.extent.offset: entry for entry in ENTRIES}
    for seed in range(ROUNDS):
        folder = tmp_path / str(seed)
        shutil.copytree(whole, folder)
        what = damage(folder, random.Random(seed))
        try:
            entries, found = read(folder)
        except CorruptIndexError:
            refused += 1
        else:
            assert all(known[entry.extent.offset] == entry for entry in entries), (seed, what)
            assert (len(entries) == len(ENTRIES)) == (found == digest), (seed, what)
            short += len(entries) < len(ENTRIES)
        place = RocksPlace(folder)
        place.set_aside()
        place.open().close()  # nothing of the damaged one holds a lock
        shutil.rmtree(folder)
        place.drop_damaged()
    assert refused > ROUNDS // 10
    assert short, "a damaged log is silently short: what finds it is the comparison of digests"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("spoil", [way for way in WHOLESALE if way not in (lose_folder, empty_folder)])
def test_what_is_no_database_any_more_is_refused_and_left_alone(
    whole: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "index"
    shutil.copytree(whole, folder)
    spoil(folder)
    before = contents_of(folder)
    with pytest.raises(CorruptIndexError):
        RocksIndex(folder)
    assert all(contents_of(folder).get(name) == data for name, data in before.items() if name.endswith(".sst"))


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def test_a_block_that_cannot_be_read_is_not_taken_for_the_end(tmp_path: Path) -> None:
    """Rdict.items() stops there without a word."""
    folder = tmp_path / "index"
    fill(folder, is_flushed=True).close()
    table = max(folder.glob("*.sst"), key=lambda path: path.stat().st_size)
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    index, place = RocksIndex(folder), RocksPlace(folder)
    for whole_pass in (lambda: list(index.entries()), index.digest):
        with pytest.raises(CorruptIndexError, match="checksum mismatch"):
            whole_pass()
    with pytest.raises(CorruptIndexError) as caught:
        index.digest()
    index.close()
    place.set_aside()
    place.open().close()
    assert caught.value is not None, "an error that is still held holds no lock"


def test_an_index_given_up_in_the_middle_of_reading_can_be_made_anew(tmp_path: Path) -> None:
    place = RocksPlace(tmp_path / "index")
    index = fill(tmp_path / "index")
    entries = index.entries()
    next(entries)
    del entries
    index.close()
    place.set_aside()
    place.open().close()


def test_only_so_many_damaged_ones_are_kept(tmp_path: Path) -> None:
    place = RocksPlace(tmp_path / "index")
    (tmp_path / "index.damaged-2").touch()  # a file, not a folder
    for _ in range(DAMAGED_MAX + 3):
        place.open().close()
        place.set_aside()
    assert len(list(tmp_path.iterdir())) == DAMAGED_MAX
    place.drop_damaged()
    assert not list(tmp_path.iterdir())


def test_nobody_else_may_read_the_folder(tmp_path: Path) -> None:
    RocksIndex(tmp_path / "index").close()
    assert (tmp_path / "index").stat().st_mode & 0o777 == 0o700


class BrokenDatabase:
    """Every call ends in RocksDB's text for an error."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __getattr__(self, name: str) -> Callable[..., None]:
        def refuse(*_: Any, **__: Any) -> None:
            raise Exception(self.text)  # noqa: TRY002  as rocksdict does

        return refuse


@pytest.mark.parametrize(
    ("text", "kind", "advice"),
    [
        ("IO error: No space left on device: While appending to file: 000004.log: ", DiskFullError, "free room"),
        ("IO error: Disk quota exceeded: While appending to file", DiskFullError, "free room"),
        ("IO error: Input/output error: While fdatasync", DiskError, "start the service again"),
        ("Corruption: block checksum mismatch", DiskError, "start the service again"),
    ],
)
@pytest.mark.parametrize("act", ["apply", "sync", "flush"])
def test_what_cannot_be_written_is_a_disk_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, text: str, kind: type[DiskError], advice: str
) -> None:
    index = RocksIndex(tmp_path / "index")
    database = index._db
    monkeypatch.setattr(index, "_db", BrokenDatabase(text))
    with pytest.raises(kind, match=advice) as caught:
        index.apply([]) if act == "apply" else getattr(index, act)()
    assert type(caught.value) is kind
    assert str(tmp_path) in str(caught.value)
    index.close()  # says nothing of it again
    database.close()


def test_what_is_no_damage_does_not_give_the_index_up(tmp_path: Path) -> None:
    index = RocksIndex(tmp_path / "index")
    with pytest.raises(DiskError, match="lock"):
        RocksIndex(tmp_path / "index")
    index.close()


class RecordingDatabase:
    """Notes the names of calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.calls.append(name)


@pytest.mark.parametrize(("is_durable", "calls"), [(False, ["write"]), (True, ["write", "flush_wal"])])
def test_a_durable_index_syncs_with_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_durable: bool, calls: list[str]
) -> None:
    index = RocksIndex(tmp_path / "index", is_durable=is_durable)
    database, recording = index._db, RecordingDatabase()
    monkeypatch.setattr(index, "_db", recording)
    index.apply([PutNote(make_identity_note())])
    assert recording.calls == calls
    database.close()
