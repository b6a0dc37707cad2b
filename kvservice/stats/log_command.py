"""`kvservice log export`: fetches the request log of a running node into a file, whole or not at all."""

import json
import shutil
import urllib.error
from pathlib import Path

from kvservice.model.errors import InvalidInputError, UnavailableError
from kvservice.stats.asking import open_url
from kvservice.stats.log_table import FORMATS
from kvservice.text import text_of_bytes

TIMEOUT_S = 120.0
"""Making a file of four million rows takes seconds."""


def export(http: str, file: Path) -> str:
    """What was done. Raises InvalidInputError, UnavailableError."""
    kind = file.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise InvalidInputError(f"{file}: a file of the log ends in {' or '.join('.' + one for one in FORMATS)}")
    part = file.with_name(file.name + ".part")
    try:
        with open_url(f"http://{http}/log.{kind}", TIMEOUT_S) as reply:
            try:
                with part.open("wb") as stream:
                    shutil.copyfileobj(reply, stream)
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)
    except urllib.error.HTTPError as error:
        raise UnavailableError(f"the node at {http} has no log to give: {_message(error)}") from error
    except OSError as error:
        raise UnavailableError(f"{http} to {file}: {error}. Is `kvservice serve` running?") from error
    return f"{file}: {text_of_bytes(file.stat().st_size)}"


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"
