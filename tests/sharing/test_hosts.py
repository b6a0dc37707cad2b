"""Three hosts with a network between them, which is cut and slowed down. Skipped where none can be made."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvservice.client import Client
from kvservice.sharing.command import ask
from tests.client.builders import Engine, assert_equal_bits
from tests.sharing.hosts import PEER_PORT, Host, hosts, why_not
from tests.sharing.nodes import IDENTITY, Rows, prompt_of, until

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")]


class Sidecar:
    """A client of a node on another host, over its unix socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = Client.connect(f"unix:{folder}/kv.sock", IDENTITY)

    def live(self) -> int:
        members = ask(str(self.folder / "kv.sock"), "GET", "members", {}, 10.0)["members"]
        return sum(one["state"] == "live" for one in members)

    def store(self, seed: int) -> Rows:
        engine, prompt = Engine(IDENTITY.geometry, blocks=1000, seed=seed), prompt_of(seed)
        slots = engine.allocate(prompt.token_count)
        self.client.store(prompt, engine.planes, slots)
        ask(str(self.folder / "kv.sock"), "POST", "drain", {}, 60.0)
        return engine.rows(slots)

    def restore(self, seed: int) -> Rows | None:
        engine, prompt = Engine(IDENTITY.geometry, blocks=1000, seed=99), prompt_of(seed)
        slots = engine.allocate(prompt.token_count)
        with self.client.lookup([prompt]) as plans:
            if plans.hit_tokens != prompt.token_count:
                return None
            self.client.restore(plans, engine.planes, [slots]).wait()
        return engine.rows(slots)


@contextmanager
def three(folder: Path, *flags: str) -> Iterator[tuple[Sequence[Host], Sidecar, Sidecar]]:
    """A shared node on the first host, sidecars on the two others, all acquainted."""
    with hosts(3) as machines:
        shared, *others = machines
        share = ("--shared", f"{shared.address}:{PEER_PORT}", *flags)
        with (
            shared.serving(folder / "shared", "--peer-port", str(PEER_PORT), "--state-folder", str(folder / "state")),
            others[0].serving(folder / "a", *share),
            others[1].serving(folder / "b", *share),
        ):
            sidecars = [Sidecar(folder / name) for name in ("a", "b")]
            try:
                for one in sidecars:
                    until(lambda one=one: one.live() == 1, "a shared node that answers")  # type: ignore[misc]
                yield machines, sidecars[0], sidecars[1]
            finally:
                for one in sidecars:
                    one.client.close()


def test_what_one_host_stored_another_one_loads(tmp_path: Path) -> None:
    with three(tmp_path, "--peer-deadline-s", "10") as (_, writer, reader):
        rows = writer.store(1)
        found = reader.restore(1)
        assert found is not None
        assert_equal_bits(found, rows)


def test_a_pulled_cable_costs_misses_and_all_goes_on_when_it_is_back(tmp_path: Path) -> None:
    with three(tmp_path) as (machines, writer, reader):
        rows = writer.store(2)
        machines[0].plug(is_in=False)
        for seed in range(16):
            assert reader.restore(100 + seed) is None
        assert reader.restore(2) is None
        until(lambda: reader.live() == 0, "the word that nobody is there")
        machines[0].plug(is_in=True)
        until(lambda: reader.live() == 1, "the shared node's answer")
        found = reader.restore(2)
        assert found is not None
        assert_equal_bits(found, rows)


def test_a_slow_link_is_exact_or_a_miss(tmp_path: Path) -> None:
    with three(tmp_path, "--peer-deadline-s", "10") as (machines, writer, reader):
        rows = writer.store(3)
        if not machines[0].slow_down("8mbit"):
            pytest.skip("this kernel slows no link down")
        found = reader.restore(3)
        assert found is not None
        assert_equal_bits(found, rows)
