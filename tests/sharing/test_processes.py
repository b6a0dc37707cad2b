"""A shared node in a process of its own, which is killed, stopped and started again under a sidecar that goes on."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvservice.app import LocalNode
from kvservice.config import process_environment
from kvservice.peers.member import MemberState
from tests.client.builders import assert_equal_bits, free_port, make_settings
from tests.freezing import freeze
from tests.sharing.nodes import MIB, Rows, Worker, addresses, live, prompt_of, sidecar, until, worker

pytestmark = pytest.mark.heavy


@contextmanager
def serving(folder: Path, port: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """``kvservice serve`` with a peer port and an SSD folder, healthy; ended at the end, whatever became of it."""
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable, "-m", "kvservice", "serve", "--socket", str(folder / "kv.sock"), "--grpc-port", "-1",
        "--http-port", "-1", "--host-bytes", "32MiB", "--peer-port", str(port), "--ssd-folder", str(folder / "ssd"),
        "--ssd-bytes", "64MiB", "--ssd-free-floor-bytes", "0", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=process_environment())
    assert process.stdout is not None
    try:
        assert "peer port" in process.stdout.readline()
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(30)
        process.stdout.close()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(30)


def link_of(node: LocalNode, port: int) -> object:
    cluster = node.peers.cluster
    assert cluster is not None
    return next(link for address, link in cluster.links.items() if address.port == port)


def expired(node: LocalNode, port: int) -> int:
    """Calls to the node at a port that ran into their deadline."""
    return int(node.on_loop(lambda _: link_of(node, port).counters.expired))  # type: ignore[attr-defined]


def test_a_killed_owner_is_a_miss_and_finds_its_caches_again_after_a_restart(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "shared"
    with serving(folder, port) as process, sidecar(tmp_path / "a", port) as node, worker(node) as writer:
        rows = stored(writer, 1)
        until(lambda: (folder / "ssd").exists(), "an SSD folder")
        process.terminate()  # what is only in its memory goes to its SSD first
        process.wait(60)
        with sidecar_alone(tmp_path / "b", port) as other, worker(other) as reader:
            assert reader.restore(prompt_of(1)) is None
            with serving(folder, port):
                until(lambda: bool(live(other)), "the owner that was away")
                found = reader.restore(prompt_of(1))
                assert found is not None
                assert_equal_bits(found[0], rows)


def test_a_stopped_owner_costs_one_deadline_for_all_keys_and_work_resumes(tmp_path: Path) -> None:
    port = free_port()
    with (
        serving(tmp_path / "shared", port) as process,
        sidecar(tmp_path / "a", port, peer_deadline_s=1.0) as node,
        sidecar(tmp_path / "b", port, peer_deadline_s=1.0) as other,
        worker(node) as writer,
        worker(other) as reader,
    ):
        rows = stored(writer, 2)
        before = expired(other, port)
        freeze(process.pid)
        for seed in range(16):
            assert reader.restore(prompt_of(100 + seed)) is None
        assert expired(other, port) - before <= 3, "a call, a ping and a probe"
        process.send_signal(signal.SIGCONT)
        until(lambda: bool(live(other)), "the owner that was stopped")
        found = reader.restore(prompt_of(2))
        assert found is not None
        assert_equal_bits(found[0], rows)


def test_the_copy_of_a_nodes_disk_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    first, second = free_port(), free_port()
    with serving(tmp_path / "one", first):
        pass
    shutil.copytree(tmp_path / "one" / "ssd", tmp_path / "two" / "ssd")
    with (
        serving(tmp_path / "one", first),
        serving(tmp_path / "two", second),
        sidecar(tmp_path / "a", first, second) as node,
    ):
        cluster = node.peers.cluster
        assert cluster is not None
        until(lambda: bool(cluster.directory.refused), "a refusal")
        assert "copied" in next(iter(cluster.directory.refused.values()))
        assert len([one for one in cluster.directory.members if one.state is MemberState.LIVE]) == 1


def test_a_full_owner_refuses_and_nobody_is_hurt(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--host-bytes", "1MiB", "--ssd-bytes", "1MiB")
    with serving(tmp_path / "shared", port, *flags), sidecar(tmp_path / "a", port) as node, worker(node) as writer:
        rows = {seed: stored(writer, seed) for seed in range(6)}
        for seed, expected in rows.items():
            found = writer.restore(prompt_of(seed))
            assert found is not None
            assert_equal_bits(found[0], expected)


def test_the_command_line_tells_who_is_there_and_drains(tmp_path: Path) -> None:
    first, second = free_port(), free_port()
    shared = ("--shared", addresses(first, second))
    with (
        serving(tmp_path / "one", first, *shared),
        serving(tmp_path / "two", second, *shared),
        sidecar(tmp_path / "a", first, second) as node,
        worker(node) as writer,
    ):
        until(lambda: len(live(node)) == 2, "two live nodes")
        rows = stored(writer, 7)
        until(lambda: command("members", tmp_path / "one").count("live") == 2, "both, as the first one sees them")
        assert "not given yet: 0" in command("drain", tmp_path / "one")
        until(lambda: "draining" in command("members", tmp_path / "two"), "the word that it drains")
        with sidecar(tmp_path / "b", second) as other, worker(other) as reader:
            found = reader.restore(prompt_of(7))
            assert found is not None
            assert_equal_bits(found[0], rows)


def command(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvservice", name, "--socket", str(folder / "kv.sock")],
        capture_output=True, text=True, timeout=60, check=False, env=process_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def stored(writer: Worker, seed: int) -> Rows:
    rows = writer.store(prompt_of(seed), seed)
    writer.pushed()
    return rows


@contextmanager
def sidecar_alone(folder: Path, port: int) -> Iterator[LocalNode]:
    """One whose shared node is not there."""
    folder.mkdir(exist_ok=True)
    with LocalNode(make_settings(folder, shared=addresses(port), host_bytes=32 * MIB)) as node:
        yield node
