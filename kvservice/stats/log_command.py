"""`kvservice log export`: fetches the request log of a running node into a file, whole or not at all."""

import shutil
from http.client import HTTPException
from pathlib import Path

from kvservice.model.errors import InvalidInputError, UnavailableError
from kvservice.stats.asking import HttpNode
from kvservice.stats.log_table import FORMATS
from kvservice.text import text_of_bytes

TIMEOUT_S = 120.0
"""Making a file of four million rows takes seconds."""


def export(node: HttpNode, file: Path) -> str:
    """What was done. Raises InvalidInputError, DiskError, and as ``HttpNode.open``."""
    kind = file.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise InvalidInputError(f"{file}: a file of the log ends in {' or '.join('.' + one for one in FORMATS)}")
    part = file.with_name(file.name + ".part")
    reply = node.open(f"/log.{kind}", TIMEOUT_S)
    try:
        with reply, part.open("wb") as stream:
            shutil.copyfileobj(reply, stream)
        part.replace(file)
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"{node.name} to {file}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return f"{file}: {text_of_bytes(file.stat().st_size)}"
