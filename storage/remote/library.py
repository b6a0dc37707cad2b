"""Libraries of remote places are optional: each is imported when its engine is opened, by name."""

import importlib
from typing import Any

from kvservice.model.errors import ConfigError


def require_library(module: str, extra: str) -> Any:
    """Import ``module``. Raises ConfigError that says what to install if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a shared library of the system is missing
        raise ConfigError(
            f"this storage needs the library {module.partition('.')[0]!r}: pip install 'kvservice[{extra}]' ({error})"
        ) from error
