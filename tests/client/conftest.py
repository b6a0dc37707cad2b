"""Nodes that the client tests talk to, and clients that are closed behind them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvservice.app import LocalNode, Service
from kvservice.client import Client
from kvservice.model.identity import Identity
from tests.client.builders import free_port, make_settings

Connect = Callable[..., Client]


@pytest.fixture
def local_node(tmp_path: Path) -> Iterator[LocalNode]:
    with LocalNode(make_settings(tmp_path)) as node:
        yield node


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(make_settings(tmp_path)) as service:
        yield service


@pytest.fixture(params=["in process", "unix socket", "loopback"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Opens clients of one node, over each of the transports."""
    port = free_port() if request.param == "loopback" else -1
    settings = make_settings(tmp_path, grpc_port=port)
    with ExitStack() as stack:
        if request.param == "in process":
            node = stack.enter_context(LocalNode(settings))
        else:
            stack.enter_context(Service(settings))
        address = f"127.0.0.1:{port}" if port > 0 else f"unix:{settings.socket}"

        def open_client(identity: Identity, *others: Identity, is_writer: bool = True) -> Client:
            if request.param == "in process":
                client = Client.in_process(node, identity, *others, is_writer=is_writer)
            else:
                client = Client.connect(address, identity, *others, is_writer=is_writer)
            return stack.enter_context(client)

        yield open_client


@pytest.fixture
def local(local_node: LocalNode) -> Iterator[Connect]:
    """Opens clients of one node in this process."""
    with ExitStack() as stack:

        def open_client(identity: Identity, *others: Identity, is_writer: bool = True) -> Client:
            return stack.enter_context(Client.in_process(local_node, identity, *others, is_writer=is_writer))

        yield open_client
