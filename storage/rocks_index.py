"""The index in a RocksDB database, through rocksdict. The only file that knows RocksDB."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rocksdict import (
    BlockBasedOptions,
    Cache,
    ChecksumType,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    WriteBatch,
)

from kvservice.model.errors import CorruptError, DiskError, DiskFullError, InvalidInputError
from kvservice.storage.disk import translated
from kvservice.storage.index_format import (
    CHECKSUM,
    NOTE_KEY,
    RECORD_KEY,
    CorruptIndexError,
    decode_entry,
    decode_note,
    encode_entry,
    encode_note,
    geometries_of,
    note_key,
    record_key,
)
from kvservice.storage.slab_format import Note
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.storage.ssd_index import (
    CHANGES_MAX,
    U64,
    Change,
    IndexDigest,
    PutNote,
    PutRecord,
    RemoveNote,
    RemoveRecord,
)

DAMAGED_MAX = 8
"""Damaged indexes that are kept aside at most."""
CURRENT = "CURRENT"
"""The file that a RocksDB database has from its first moment to its last."""
MIB = 1 << 20

_NOT_DAMAGE = (
    "No space left",
    "Disk quota exceeded",
    "Permission denied",
    "Read-only file",
    "Too many open",
    "lock hold",
    "lock file",
)


class RocksIndex:
    """An index in a RocksDB database. See Index.

    Writing keeps the GIL, syncing does not. Measured: reading and decoding 100,000 records of 220 bytes takes 0.8 s of
    CPU time, a tenth of it here, the rest in making Python objects of them.
    """

    def __init__(self, folder: Path, *, is_durable: bool = False) -> None:
        """Open the database in ``folder``, made if missing. ``is_durable``: sync with every ``apply``.

        Raises CorruptIndexError, or DiskError for what is no damage.
        """
        self._folder, self._is_durable = folder, is_durable
        _require_whole(folder)
        with self._translated("open"):
            self._db = Rdict(str(folder), _options())

    def apply(self, changes: Sequence[Change]) -> None:
        """See Index."""
        if len(changes) > CHANGES_MAX:
            raise InvalidInputError(f"a batch of {len(changes)} changes, the limit is {CHANGES_MAX}")
        batch = WriteBatch(raw_mode=True)
        for change in changes:
            match change:
                case PutRecord(entry):
                    batch.put(*encode_entry(entry))
                case RemoveRecord(namespace, key, offset):
                    batch.delete(record_key(namespace, key, offset))
                case PutNote(note):
                    batch.put(*encode_note(note))
                case RemoveNote(offset):
                    batch.delete(note_key(offset))
        with self._translated("change", is_written=True):
            self._db.write(batch)
        if self._is_durable:
            self.sync()

    def notes(self) -> list[Note]:
        """See Index."""
        return [decode_note(key, value) for key, value in self._items(NOTE_KEY)]

    def entries(self) -> Iterator[SsdEntry]:
        """See Index."""
        geometries = geometries_of(self.notes())
        return (decode_entry(key, value, geometries) for key, value in self._items(RECORD_KEY))

    def digest(self) -> IndexDigest:
        """See Index."""
        count = total = 0
        for _, value in self._items(b""):
            count += 1
            total += int.from_bytes(value[-CHECKSUM.size :], "little")
        return IndexDigest(count, total & U64)

    def sync(self) -> None:
        """See Index."""
        with self._translated("sync", is_written=True):
            self._db.flush_wal(sync=True)

    def flush(self) -> None:
        """See Index."""
        with self._translated("flush", is_written=True):
            self._db.flush(wait=True)

    def close(self) -> None:
        """See Index. What was not written stays so: a failed write was told when it happened."""
        with suppress(Exception):  # rocksdict raises nothing narrower; it repeats the error of the failed write
            self._db.close()

    def _items(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """All keys with ``prefix`` and their values, in order; CorruptIndexError at the end if something was skipped.

        Not Rdict.items(): that one stops at a damaged block as if it were the end, without a word.
        """
        cursor = self._db.iter()
        try:
            with self._translated("read"):
                cursor.seek(prefix)
                while cursor.valid() and (key := cursor.key()).startswith(prefix):
                    yield key, cursor.value()
                    cursor.next()
                cursor.status()
        finally:
            del cursor  # the traceback of an exception would keep it, and with it the lock of a closed database

    @contextmanager
    def _translated(self, action: str, *, is_written: bool = False) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  rocksdict raises nothing narrower
            raise _error_of(str(error), action, self._folder, is_written=is_written) from None


class RocksPlace:
    """A folder for the index beside the slab; damaged ones lie in ``<name>.damaged-<n>``. See IndexPlace."""

    def __init__(self, folder: Path, *, is_durable: bool = False) -> None:
        """``folder`` belongs to the index alone. ``is_durable``: see RocksIndex."""
        self._folder, self._is_durable = folder, is_durable

    def exists(self) -> bool:
        """See IndexPlace."""
        return self._folder.exists() or self._folder.is_symlink()

    def open(self) -> RocksIndex:
        """See IndexPlace."""
        return RocksIndex(self._folder, is_durable=self._is_durable)

    def set_aside(self) -> None:
        """See IndexPlace."""
        names = [self._folder.with_name(f"{self._folder.name}.damaged-{n}") for n in range(1, DAMAGED_MAX + 1)]
        with translated("set aside the index", self._folder):
            name = next((name for name in names if not name.exists()), names[-1])
            _remove_tree(name)
            self._folder.rename(name)

    def drop_damaged(self) -> None:
        """See IndexPlace."""
        with translated("remove a damaged index", self._folder):
            for path in self._folder.parent.glob(f"{self._folder.name}.damaged-*"):
                _remove_tree(path)


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_paranoid_checks(True)
    # The end of a log that a power failure tore off is left out; a start that was not clean finds those records.
    options.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    options.set_compression_type(DBCompressionType.none())  # digests do not compress
    options.set_write_buffer_size(16 * MIB)
    options.set_max_total_wal_size(64 * MIB)
    options.set_max_background_jobs(2)
    options.set_max_open_files(128)
    options.set_skip_stats_update_on_db_open(True)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(MIB)
    options.set_max_manifest_file_size(4 * MIB)
    table = BlockBasedOptions()
    table.set_checksum_type(ChecksumType.xxh3())  # its crc32c runs at 1 GB/s
    table.set_block_size(16 << 10)
    table.set_block_cache(Cache(8 * MIB))  # nothing is looked up: an index is read once, from end to end
    options.set_block_based_table_factory(table)
    return options


def _require_whole(folder: Path) -> None:
    """RocksDB makes a new database where only its first file is missing, and removes what the old one left."""
    with translated("look into the index", folder):
        if folder.exists() and not folder.is_dir():
            raise CorruptIndexError(f"{folder} is a file, not the folder of an index")
        folder.mkdir(0o700, exist_ok=True)
        if any(folder.iterdir()) and not (folder / CURRENT).exists():
            raise CorruptIndexError(f"{folder} holds files of an index, but not {CURRENT}")


def _error_of(text: str, action: str, folder: Path, *, is_written: bool) -> CorruptError | DiskError:
    """RocksDB's errors are texts, ``Corruption: ...`` or ``IO error: ...``; a lost or short file is one of both."""
    if is_written or any(words in text for words in _NOT_DAMAGE):
        is_full = "No space left" in text or "quota exceeded" in text
        advice = "free room on its file system" if is_full else "see the reason"
        kind = DiskFullError if is_full else DiskError
        return kind(f"cannot {action} the index {folder}: {text}; {advice}, and start the service again")
    return CorruptIndexError(f"cannot {action} the index {folder}: {text}")


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
