"""What importing a connector's parts loads. vLLM's CPU worker dies when numba was imported before it was built."""

import subprocess
import sys

import pytest

import kvservice.client

HEAVY = ("numba", "llvmlite", "torch", "kvservice.kernels.cpu", "kvservice.client.session")


@pytest.mark.parametrize(
    "module",
    [
        "kvservice.client.connectors.breaker",
        "kvservice.client.connectors.vllm.options",
        "kvservice.client.connectors.vllm.chunks",
        "kvservice.client.connectors.vllm.engine_identity",
        "kvservice.client.connectors.vllm.request_extras",
    ],
)
def test_importing_a_part_loads_no_kernels(module: str) -> None:
    script = f"import sys, {module}; print(*[name for name in sys.modules if name.startswith({HEAVY!r})])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("part", ["layout", "paged"])
def test_an_engines_blocks_load_torch_but_not_numba(part: str) -> None:
    script = (
        f"import sys, kvservice.client.connectors.vllm.{part}; print('torch' in sys.modules, 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("name", kvservice.client.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(kvservice.client, name).__name__ == name
    assert name in dir(kvservice.client)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Cliant"):
        kvservice.client.Cliant  # noqa: B018
