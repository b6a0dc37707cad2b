"""Real nodes with a Flight port: a second way to their records, and the only one where streams do not get through."""

import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from kvservice.app import LocalNode
from kvservice.model.cache import Tier
from kvservice.peers.routes_log import Medium
from tests.access.certificates import Authority
from tests.client.builders import assert_equal_bits, free_port
from tests.sharing.nodes import live, prompt_of, shared_node, sidecar, until, without_shared_memory, worker
from tests.sharing.test_secured import guarded


@pytest.fixture(autouse=True)
def _over_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    without_shared_memory(monkeypatch)


def flight_records(node: LocalNode) -> int:
    """How many records came here over Flight."""
    return sum(
        one["transfers"] for one in node.peers.router.document() if one["medium"] == Medium.FLIGHT and one["transfers"]
    )


def knows_flight(node: LocalNode) -> bool:
    cluster = node.peers.cluster
    assert cluster is not None
    return any(Medium.FLIGHT in place.ways for place in cluster.places.values())


def test_a_node_says_its_flight_port_and_flight_goes_on_when_streams_do_not(tmp_path: Path) -> None:
    port = free_port()
    with (
        shared_node(tmp_path / "shared", port, flight_port=0) as shared,
        sidecar(tmp_path / "a", port) as first,
        sidecar(tmp_path / "b", port) as second,
        worker(first) as writer,
        worker(second) as reader,
    ):
        assert shared.peers.facts().flight_port == shared.peers.flight_port > 0
        until(lambda: knows_flight(second), "a second way")
        prompt, later = prompt_of(1), prompt_of(2)
        rows = writer.store(prompt)
        writer.pushed()
        found = reader.restore(prompt)
        assert found is not None
        assert found[1] == {Tier.REMOTE}
        assert_equal_bits(found[0], rows)
        rows = writer.store(later, seed=2)
        writer.pushed()
        server = shared.peers._server
        assert server is not None
        server.stop()
        before = flight_records(second)
        until(lambda: reader.restore(later) is not None, "records over Flight")
        assert flight_records(second) > before
        assert live(second), "it is there: it answers over Flight"
        found = reader.restore(later)
        assert found is not None
        assert_equal_bits(found[0], rows)


@pytest.mark.parametrize("peer_port", [-1, 0])
def test_flight_alone_carries_everything(tmp_path: Path, peer_port: int) -> None:
    """The address of a Flight port is enough, be there a peer port behind it or not."""
    port = free_port()
    shared = f"flight://127.0.0.1:{port}"
    with (
        shared_node(tmp_path / "shared", peer_port, flight_port=port),
        sidecar(tmp_path / "a", shared=shared) as first,
        sidecar(tmp_path / "b", shared=shared) as second,
        worker(first) as writer,
        worker(second) as reader,
    ):
        until(lambda: bool(live(first) and live(second)), "a shared node that answers")
        prompt = prompt_of(1)
        rows = writer.store(prompt)
        writer.pushed()
        found = reader.restore(prompt)
        assert found is not None
        assert found[1] == {Tier.REMOTE}
        assert_equal_bits(found[0], rows)
        assert flight_records(second)


@pytest.mark.heavy
def test_a_node_that_goes_is_lost_over_both_ways_and_found_again(tmp_path: Path) -> None:
    port, flight_port = free_port(), free_port()
    with sidecar(tmp_path / "a") as lonely:
        assert lonely.peers.cluster is None
    with (
        sidecar(tmp_path / "b", shared=f"127.0.0.1:{port}", peer_deadline_s=1.0) as node,
        worker(node) as reader,
    ):
        with shared_node(tmp_path / "shared", port, flight_port=flight_port):
            until(lambda: bool(live(node)) and knows_flight(node), "both ways")
        until(lambda: not live(node), "the loss")
        assert reader.restore(prompt_of(3)) is None
        with shared_node(tmp_path / "shared", port, flight_port=flight_port):
            until(lambda: bool(live(node)), "the return")


def test_a_nodes_flight_port_shows_its_new_certificate(tmp_path: Path) -> None:
    authority, port, flight_port = Authority(tmp_path / "ca"), free_port(), free_port()
    pair, new = authority.issue("shared"), authority.issue("shared", file="new")
    with guarded(tmp_path / "shared", port, authority, '"*"', flight_port=flight_port) as node:
        old = pair.cert.read_text()
        assert shown_at(flight_port) == old
        for ours, theirs in ((pair.key, new.key), (pair.cert, new.cert)):
            ours.write_bytes(theirs.read_bytes())
        node.on_loop(lambda _: node.peers._guard.look())  # as a service does every second
        until(lambda: shown_at(flight_port) == new.cert.read_text() != old, "the new certificate")


def shown_at(port: int) -> str:
    """The certificate there; empty while the port is opened anew."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=10.0) as plain,
        context.wrap_socket(plain) as secured,
    ):
        return ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")
    return ""
