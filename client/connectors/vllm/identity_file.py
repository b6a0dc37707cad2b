"""An engine's identity in a file, so that `kvservice explain` can compare it with another's. Imports no engine."""

import logging
from collections.abc import Sequence
from pathlib import Path

from kvservice.model.identity import Identity

log = logging.getLogger("vllm.kvservice")


def write_identities(file: str, identities: Sequence[Identity]) -> None:
    """Log every rank's digest, and write its canonical JSON: the first to ``file``, others beside it by number.

    ``file`` empty: only the log. A file that cannot be written is logged, and nothing is raised: an aid must not keep
    an engine from its work.
    """
    for rank, identity in enumerate(identities):
        where = identity_path(file, rank) if file else None
        note = "" if where is None or not _write(where, identity) else f", written to {where}"
        log.info("kvservice: identity of rank %d: namespace %s%s", rank, identity.namespace().hex(), note)


def identity_path(file: str, rank: int) -> Path:
    """``identity.json`` for rank 0, ``identity.1.json`` for rank 1."""
    path = Path(file)
    return path if rank == 0 else path.with_name(f"{path.stem}.{rank}{path.suffix}")


def _write(path: Path, identity: Identity) -> bool:
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(identity.canonical_json() + "\n")
        draft.replace(path)
    except OSError as error:
        log.warning("kvservice: identity_file: %s cannot be written, the engine goes on without it: %s", path, error)
        return False
    return True
