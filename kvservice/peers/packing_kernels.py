"""The kernels that pack rows, loaded by a thread when they are first asked for: nobody waits for them.

Importing numba takes half a second, compiling two more on a machine that never did. A call between nodes has a deadline
of one, and whoever is silent for that long is taken for lost. Until the kernels are here, rows go as they lie.
"""

import logging
import threading
from collections.abc import Callable

import numpy as np

log = logging.getLogger(__name__)


def _load_all() -> None:
    """Import and compile, for rows that may be written and for such that may not."""
    from kvservice.kernels.cpu_int8 import DTYPES, pack, packed_bytes, unpack

    rows, packed = np.zeros((1, 2), np.uint16), np.empty(packed_bytes(1, 2), np.uint8)
    read_only = rows.view()
    read_only.flags.writeable = False
    for dtype in DTYPES:
        pack(rows, 2, dtype, packed)
        pack(read_only, 2, dtype, packed)
        unpack(packed, 2, dtype, rows)


class Kernels:
    """Of this process. Any thread may ask."""

    def __init__(self, load_all: Callable[[], object] = _load_all) -> None:
        self._load_all = load_all
        self._lock = threading.Lock()
        self._is_begun = False
        self._is_ready = False

    def are_ready(self) -> bool:
        """May rows be packed without a wait? If not, a thread sees to it."""
        if not self._is_ready and not self._is_begun:
            with self._lock:
                is_first, self._is_begun = not self._is_begun, True
            if is_first:
                threading.Thread(target=self._load, name="kvservice-packing", daemon=True).start()
        return self._is_ready

    def load(self) -> None:
        """Have them ready when this returns. Raises what importing them does."""
        self._load_all()
        self._is_begun = self._is_ready = True

    def _load(self) -> None:
        try:
            self.load()
        except Exception:
            log.exception("the kernels that pack rows cannot be loaded: between nodes rows go as they lie")


KERNELS = Kernels()
