"""Options of all tests."""

import pytest
from hypothesis import settings

settings.register_profile("kvservice", deadline=None)  # how long an example takes says more of the machine's load
settings.load_profile("kvservice")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-servers",
        action="store_true",
        help="fail, rather than skip, the tests whose server (Redis, etcd, S3, Mooncake) is not installed",
    )
