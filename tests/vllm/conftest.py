"""Tests on the real vLLM: collected only in its own environment, that is by `make test-vllm`."""

import importlib.util
from pathlib import Path

import pytest

from tests.vllm import models

IS_HERE = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if IS_HERE else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vllm")
    group.addoption("--model-cache", type=Path, default=Path("~/.cache/kvservice/models").expanduser())
    group.addoption("--model-python", type=Path, default=models.ROOT / ".venv/bin/python")


@pytest.fixture(scope="session")
def model_cache(request: pytest.FixtureRequest) -> Path:
    cache: Path = request.config.getoption("--model-cache")
    return cache.absolute()


@pytest.fixture(scope="session")
def tiny_model(model_cache: Path) -> Path:
    """A random model whose tokens change when a block is wrong."""
    return models.tiny_llama(model_cache)


@pytest.fixture(scope="session")
def smollm2_model(request: pytest.FixtureRequest, model_cache: Path) -> Path:
    """A real model; converted in the development environment the first time."""
    python: Path = request.config.getoption("--model-python")
    return models.smollm2(model_cache, python.absolute())
