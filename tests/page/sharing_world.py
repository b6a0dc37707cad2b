"""A sidecar that brought and gave records, behind its HTTP application; a shared node, cold storage, and nobody."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from aiohttp import web

from kvservice.app import LocalNode, build_application
from tests.client.builders import free_port
from tests.sharing.nodes import prompt_of, shared_node, sidecar, worker
from tests.sharing.shelf import Shelf


@dataclass(frozen=True, slots=True)
class SharingPage:
    """``address`` answers over HTTP for ``node``, which shares with ``shared`` at ``port``; nobody is at ``nobody``."""

    address: str
    node: LocalNode
    shared: LocalNode
    port: int
    nobody: int


@contextmanager
def sharing_page(folder: Path) -> Iterator[SharingPage]:
    """One prompt came from the shared node, another one went there."""
    port, nobody = free_port(), free_port()
    shelf = Shelf()

    async def open_remote(*_: object, **__: object) -> Shelf:
        return shelf

    with (
        patch("kvservice.sharing.network.open_remote", open_remote),
        shared_node(folder / "shared", port, node_name="shelf-1") as shared,
        sidecar(folder / "a", port) as other,
        sidecar(folder / "b", port, nobody, cold="s3://bucket/prefix?key=secret", is_load_gated=False) as node,
        worker(other) as writer,
        worker(node) as reader,
        served(node) as address,
    ):
        writer.store(prompt_of(1))
        writer.pushed()
        assert reader.restore(prompt_of(1)) is not None
        reader.store(prompt_of(2))
        reader.pushed()
        yield SharingPage(address, node, shared, port, nobody)


@contextmanager
def served(node: LocalNode) -> Iterator[str]:
    """The node's HTTP side: where it answers."""
    runner = web.AppRunner(build_application(node.on_loop(lambda one: one)), access_log=None)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"127.0.0.1:{runner.addresses[0][1]}"

    address = node.run_on_loop(start())
    try:
        yield address
    finally:
        node.run_on_loop(runner.cleanup())
