"""Two engines, each with a sidecar, and one shared node: what one computed the other one loads, over TCP."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvservice.sharing.command import ask
from tests.vllm.legs import CHUNK, ServiceProcess, make_prompts, run_leg, running_service
from tests.vllm.test_collective import ENGINE, PROMPTS, SHARED, SOME, words_of

READY_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def two_sidecars() -> Iterator[tuple[ServiceProcess, ServiceProcess, ServiceProcess]]:
    """The shared node, and two nodes beside engines, which both know it."""
    port = free_port()
    share = ("--shared", f"127.0.0.1:{port}", "--peer-deadline-s", "10")
    with (
        running_service("--peer-port", str(port)) as shared,
        running_service(*share) as first,
        running_service(*share) as second,
    ):
        for sidecar in (first, second):
            wait_for_members(sidecar)
        yield shared, first, second


def told(service: ServiceProcess, verb: str, method: str = "GET") -> dict[str, Any]:
    return ask(f"{service.folder}/kv.sock", method, verb, {}, READY_S)


def wait_for_members(service: ServiceProcess) -> None:
    deadline_s = time.monotonic() + READY_S
    while not any(one["state"] == "live" for one in told(service, "members").get("members", [])):
        assert time.monotonic() < deadline_s, told(service, "members")
        threading.Event().wait(0.1)


def test_an_engine_loads_what_another_host_computed_and_says_the_same(tiny_model: Path) -> None:
    prompts = make_prompts()
    plain = run_leg(tiny_model, prompts)
    with two_sidecars() as (_, first, second):
        filled = run_leg(tiny_model, prompts, connector={"address": first.address, "chunk_tokens": CHUNK})
        told(first, "drain", "POST")
        loaded = run_leg(tiny_model, prompts, connector={"address": second.address, "chunk_tokens": CHUNK})
    assert filled.tokens == loaded.tokens == plain.tokens
    assert loaded.counts["loads_failed"] == loaded.counts["hook_errors"] == 0
    assert loaded.counts["chunks_saved"] == 0
    assert loaded.runs[0]["cached"] == [192] * 4
    assert loaded.leases == 0


def test_a_lossy_engine_says_its_own_and_those_who_load_say_the_same(tiny_model: Path) -> None:
    """What is stored is rounded, the engine's own rows are not; all who load it have the same bits."""
    prompts = make_prompts()
    plain = run_leg(tiny_model, prompts)

    def run(service: ServiceProcess, **more: str) -> Any:
        return run_leg(tiny_model, prompts, connector={"address": service.address, "chunk_tokens": CHUNK, **more})

    with two_sidecars() as (shared, first, second):
        filled = run(first, lossy="int8")
        told(first, "drain", "POST")
        loaded, here = run(second, lossy="int8"), run(shared, lossy="int8")
        exact = run(second)
    assert filled.tokens == exact.tokens == plain.tokens
    assert loaded.tokens == here.tokens
    assert loaded.runs[0]["cached"] == here.runs[0]["cached"] == [192] * 4
    assert loaded.counts["loads_failed"] == loaded.counts["hook_errors"] == filled.counts["hook_errors"] == 0
    assert exact.runs[0]["cached"] == filled.runs[0]["cached"] == plain.runs[0]["cached"], "it found nothing lossy"


def test_the_first_request_of_a_known_round_is_restored_from_the_other_engines_work(tiny_model: Path) -> None:
    words = words_of(SOME)

    def run(service: ServiceProcess) -> Any:
        connector = {"address": service.address, "chunk_tokens": CHUNK}
        return run_leg(tiny_model, PROMPTS, words=words, connector=connector, engine=ENGINE)

    with two_sidecars() as (_, first, second):
        computed = run(first)
        assert computed.counts["mirrors_saved"] == 3 * len(SHARED)
        told(first, "drain", "POST")
        restored = run(second)
    assert restored.tokens == computed.tokens, "the same KV, from the other node"
    assert restored.counts["members_leading"] == 0
    assert restored.counts["rows_restored"] >= 3 * sum(SHARED)
    assert restored.counts["rows_refreshed"] == 0
