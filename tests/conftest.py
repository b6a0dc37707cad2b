"""Options of all tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-servers",
        action="store_true",
        help="fail, rather than skip, the tests whose server (Redis, etcd, S3, Mooncake) is not installed",
    )
