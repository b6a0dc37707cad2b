"""The demo from end to end, with its own node in a process of its own, on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo")
    output = folder / "out" / "demo.json"
    command = [sys.executable, "-P", "-m", "kvservice", "demo", "--tiny", "--agents=4", "--ratio=0.05"]
    command += [f"--cache={folder / 'cache'}", f"--output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every bit of every agent" in done.stdout
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_the_file_holds_what_it_promises(facts: dict[str, Any]) -> None:
    promised = "agents prompt_tokens shared_tokens selector ratio bytes_dense bytes_stored mirror_ratio shared_ratio "
    promised += "round_ratio restore_gb_s memcpy_gb_s restore_over_memcpy exact agreement_full "
    promised += "agreement_reuse_restored stats"
    assert set(promised.split()) <= set(facts)
    assert (facts["agents"], facts["selector"], facts["ratio"]) == (4, "hkvd:0.05", 0.05)


def test_every_restored_bit_is_what_was_stored(facts: dict[str, Any]) -> None:
    assert facts["exact"] is True
    assert facts["agreement_reuse_restored"] == 1.0


def test_all_but_the_leader_are_stored_as_mirrors(facts: dict[str, Any]) -> None:
    assert facts["mirrors"] == 3 * 4
    assert facts["mirror_ratio"] > 10
    assert facts["stats"]["caches"]["mirror"]["count"] == facts["mirrors"]
    assert facts["round_ratio"] == facts["bytes_dense"] / facts["bytes_stored"]


def test_no_lease_is_left(facts: dict[str, Any]) -> None:
    assert facts["stats"]["handles"]["leases"] == 0
    assert facts["stats"]["handles"]["reservations"] == 0


def test_too_many_agents_are_refused_with_the_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "kvservice", "demo", "--tiny", "--agents=99", f"--cache={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert done.returncode == 1
    assert "parts for 2 to 8" in done.stderr


def test_a_node_without_torch_says_what_the_demo_needs() -> None:
    script = "import sys; sys.modules['torch'] = None; from kvservice.__main__ import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "the demo needs torch: pip install 'kvservice[demo]'" in done.stderr
