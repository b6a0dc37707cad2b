"""What importing the parts next to LMCache loads: no numba, no torch, and no LMCache before a class is asked for."""

import subprocess
import sys

import pytest

HEAVY = ("numba", "llvmlite", "torch", "lmcache", "kvservice.kernels.cpu")
PACKAGE = "kvservice.client.connectors.lmcache"


@pytest.mark.parametrize("part", ["", ".options", ".identity", ".vault", ".holds", ".exchange"])
def test_importing_a_part_loads_nothing_heavy(part: str) -> None:
    script = f"import sys, {PACKAGE}{part}; print(*[name for name in sys.modules if name.startswith({HEAVY!r})])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    import kvservice.client.connectors.lmcache as package

    with pytest.raises(AttributeError, match="KVServiceL3Adapter"):
        package.KVServiceL3Adapter  # noqa: B018
