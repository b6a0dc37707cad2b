"""Nodes that do not trust the network: TLS, tokens, tenants, over the public client."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvservice.app import LocalNode
from kvservice.model.errors import ConfigError
from kvservice.peers.streams_client import PeerLink
from tests.access.certificates import Authority
from tests.access.files import section, write
from tests.client.builders import assert_equal_bits, free_port, make_settings
from tests.sharing.nodes import IDENTITY, PATIENT, addresses, held, live, prompt_of, until, worker

TENANT = IDENTITY.tenant


@contextmanager
def guarded(folder: Path, port: int, authority: Authority, tenants: str, **changes: object) -> Iterator[LocalNode]:
    """A shared node with a certificate, which lets a node with a token in, for some tenants."""
    pair = authority.issue("shared")
    folder.mkdir()
    access = write(folder / "access.toml", section("node", tenants, role="node", token="let me in"))
    values = PATIENT | {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "access_file": str(access)} | changes
    settings = make_settings(folder, peer_port=port, **values)
    with LocalNode(settings) as node:
        yield node


@contextmanager
def outside(folder: Path, port: int, ca: Path, token: str) -> Iterator[LocalNode]:
    """A sidecar with no certificate of its own."""
    folder.mkdir()
    (folder / "token").write_text(token + "\n")
    settings = make_settings(
        folder, shared=addresses(port), peer_ca=str(ca), peer_token_file=str(folder / "token"), **PATIENT
    )
    with LocalNode(settings) as node:
        yield node


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def refusals(node: LocalNode, port: int) -> int:
    """Calls to the node at a port that came to nothing."""
    cluster = node.peers.cluster
    assert cluster is not None
    link = next(link for address, link in cluster.links.items() if address.port == port)
    assert isinstance(link, PeerLink)
    return link.counters.failed


def test_with_a_token_over_tls_nodes_share(tmp_path: Path, authority: Authority) -> None:
    port = free_port()
    with (
        guarded(tmp_path / "shared", port, authority, f'"{TENANT}"'),
        outside(tmp_path / "a", port, authority.cert, "let me in") as first,
        outside(tmp_path / "b", port, authority.cert, "let me in") as second,
        worker(first) as writer,
        worker(second) as reader,
    ):
        until(lambda: bool(live(first) and live(second)), "the shared node")
        rows = writer.store(prompt_of(1))
        writer.pushed()
        found = reader.restore(prompt_of(1))
        assert found is not None
        assert_equal_bits(found[0], rows)


def test_a_foreign_tenants_caches_are_neither_taken_nor_found(tmp_path: Path, authority: Authority) -> None:
    port = free_port()
    with (
        guarded(tmp_path / "shared", port, authority, '"somebody else"') as shared,
        outside(tmp_path / "a", port, authority.cert, "let me in") as node,
        worker(node) as writer,
    ):
        until(lambda: bool(live(node)), "the shared node")
        writer.store(prompt_of(2))
        writer.pushed()
        assert held(shared) == 0
        assert node.on_loop(lambda one: one.counters.pushes.refused) > 0
        assert writer.restore(prompt_of(3)) is None


@pytest.mark.parametrize("wrong", ["token", "authority"])
def test_who_cannot_prove_itself_goes_on_alone(tmp_path: Path, authority: Authority, wrong: str) -> None:
    port = free_port()
    ca = Authority(tmp_path / "other").cert if wrong == "authority" else authority.cert
    token = "guess" if wrong == "token" else "let me in"
    with (
        guarded(tmp_path / "shared", port, authority, '"*"'),
        outside(tmp_path / "a", port, ca, token) as node,
        worker(node) as writer,
    ):
        until(lambda: refusals(node, port) > 0, "a refusal")
        assert not live(node)
        writer.store(prompt_of(4))
        assert writer.restore(prompt_of(4)) is not None
        assert writer.restore(prompt_of(5)) is None


@pytest.mark.parametrize("name", ["peer_ca", "peer_token_file"])
def test_files_that_are_not_there_stop_the_boot(tmp_path: Path, name: str) -> None:
    settings = make_settings(tmp_path, shared="127.0.0.1:1", **{name: str(tmp_path / "nothing")}, **PATIENT)
    with pytest.raises(ConfigError, match="nothing"), LocalNode(settings):
        pass
