"""What was stored before a restart is restored after it, while it is still read; wrong layers are never reported."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvservice.app import LocalNode, Service
from kvservice.client import Client, RoundPrompt
from kvservice.client.session import Session
from kvservice.model.cache import Tier
from kvservice.model.errors import CorruptError, KVServiceError, SlotError, UnavailableError
from kvservice.model.geometry import attention_geometry
from kvservice.storage.slab import PIECE_BYTES, SLAB_NAME, Slab
from tests.client.builders import Engine, assert_equal_bits, bits_of, make_identity, make_prompt, make_settings

IDENTITY = make_identity(attention_geometry(layers=8, heads=2, head_size=64, dtype="bfloat16"))
TOKENS = 1200
MIB = 1 << 20


def settings(folder: Path) -> object:
    return make_settings(
        folder, host_bytes=64 * MIB, ssd_folder=str(folder / "ssd"), ssd_bytes=64 * MIB, ssd_free_floor_bytes=0
    )


@contextmanager
def connected(folder: Path, *, is_local: bool) -> Iterator[Client]:
    """A client of a node that was just started on the folder."""
    if is_local:
        with LocalNode(settings(folder)) as node, Client.in_process(node, IDENTITY) as client:  # type: ignore[arg-type]
            yield client
        return
    with Service(settings(folder)), Client.connect(f"unix:{folder}/kv.sock", IDENTITY) as client:  # type: ignore[arg-type]
        yield client


def stored_before(folder: Path) -> tuple[RoundPrompt, list[list[torch.Tensor]]]:
    """A prompt of one private and one shared segment, of several pieces each, stored by a node that has stopped."""
    prompt = make_prompt(IDENTITY, private=TOKENS, shared=(TOKENS,), chunk_tokens=TOKENS)
    engine = Engine(IDENTITY.geometry, blocks=1000)
    slots = engine.allocate(prompt.token_count)
    with connected(folder, is_local=True) as client:
        client.store(prompt, engine.planes, slots)
    return prompt, engine.rows(slots)


def restored(client: Client, prompt: RoundPrompt) -> list[list[torch.Tensor]]:
    engine = Engine(IDENTITY.geometry, blocks=1000, seed=3)
    slots = engine.allocate(prompt.token_count)
    with client.lookup([prompt]) as plans:
        assert plans.hit_tokens == prompt.token_count
        assert {one.record.tier for one in plans[0].plan.segments if one.record} == {Tier.SSD}
        restore = client.restore(plans, engine.planes, [slots])
        for layer in range(restore.layers):
            restore.wait_for_layer(layer)
    return engine.rows(slots)


def gate_reads(monkeypatch: pytest.MonkeyPatch, behind: int = 0) -> threading.Event:
    """Pieces of records from byte ``behind`` on are read from SSD once this is set."""
    may_go_on, read_piece = threading.Event(), Slab.read_piece

    def gated(slab: Slab, extent: object, start: int, end: int, target: object) -> None:
        if start >= behind:
            assert may_go_on.wait(30)
        read_piece(slab, extent, start, end, target)  # type: ignore[arg-type]

    monkeypatch.setattr(Slab, "read_piece", gated)
    return may_go_on


@pytest.mark.parametrize("is_local", [True, False])
def test_a_restart_loses_nothing(tmp_path: Path, is_local: bool) -> None:
    prompt, rows = stored_before(tmp_path)
    with connected(tmp_path, is_local=is_local) as client:
        assert_equal_bits(restored(client, prompt), rows)
        document = client.stats()
        assert document["lookups"]["from_ssd"] == 2  # type: ignore[index]
        assert document["recovery"]["kind"] == "clean"  # type: ignore[index]
        assert document["handles"]["leases"] == 0  # type: ignore[index]


def test_the_first_layers_are_in_place_while_the_last_ones_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, rows = stored_before(tmp_path)
    may_go_on = gate_reads(monkeypatch, PIECE_BYTES)
    engine = Engine(IDENTITY.geometry, blocks=1000, seed=3)
    slots = engine.allocate(prompt.token_count)
    with connected(tmp_path, is_local=True) as client, client.lookup([prompt]) as plans:
        restore = client.restore(plans, engine.planes, [slots])
        restore.wait_for_layer(1)
        assert not restore.is_done
        may_go_on.set()
        restore.wait()
    assert_equal_bits(engine.rows(slots), rows)


def test_a_record_that_went_wrong_on_ssd_fails_the_restore_by_name_and_is_a_miss_from_then_on(tmp_path: Path) -> None:
    prompt, _ = stored_before(tmp_path)
    slab = tmp_path / "ssd" / SLAB_NAME
    content = bytearray(slab.read_bytes())
    for at in range(MIB, len(content) - 4096, MIB):  # in every record
        content[at] ^= 1
    slab.write_bytes(content)
    engine = Engine(IDENTITY.geometry, blocks=1000, seed=3)
    slots = engine.allocate(prompt.token_count)
    with connected(tmp_path, is_local=False) as client:
        with client.lookup([prompt]) as plans, pytest.raises(CorruptError):
            client.restore(plans, engine.planes, [slots]).wait()
        with client.lookup([prompt]) as plans:
            assert plans.hit_tokens == 0
        assert client.stats()["integrity"]["corrupt"]["ssd"] == 2  # type: ignore[index]


def test_a_node_that_stops_while_a_record_is_read_fails_the_restore_by_name_or_it_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, rows = stored_before(tmp_path)
    may_go_on = gate_reads(monkeypatch, PIECE_BYTES)
    engine = Engine(IDENTITY.geometry, blocks=1000, seed=3)
    slots = engine.allocate(prompt.token_count)
    service = Service(settings(tmp_path)).__enter__()  # type: ignore[arg-type]
    with Client.connect(f"unix:{tmp_path}/kv.sock", IDENTITY) as client:
        restore = client.restore(client.lookup([prompt]), engine.planes, [slots])
        restore.wait_for_layer(0)
        threading.Timer(0.1, may_go_on.set).start()
        service.__exit__(None, None, None)
        try:
            restore.wait()
        except KVServiceError:
            return
        assert_equal_bits(engine.rows(slots), rows)


def test_wrong_slots_are_told_before_anything_has_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way is asked for first, but slots are checked while it comes; the question is then given up."""
    prompt, rows = stored_before(tmp_path)
    may_go_on = gate_reads(monkeypatch)
    engine = Engine(IDENTITY.geometry, blocks=1000, seed=3)
    slots = engine.allocate(prompt.token_count)
    wrong = slots.clone()
    wrong[-1] = engine.slot_count
    before = [[bits_of(plane).clone() for plane in layer] for layer in engine.planes]
    with connected(tmp_path, is_local=False) as client, client.lookup([prompt]) as plans:
        calls = client.session._transport._open().calls  # type: ignore[attr-defined]
        with pytest.raises(SlotError, match="nothing was written"):
            client.restore(plans, engine.planes, [wrong])
        assert not may_go_on.is_set()
        assert not calls._busy, "nobody waits for that answer any more"
        assert_equal_bits([[bits_of(plane) for plane in layer] for layer in engine.planes], before)
        may_go_on.set()
        client.restore(plans, engine.planes, [slots]).wait()
    assert_equal_bits(engine.rows(slots), rows)


@pytest.mark.parametrize("are_slots_wrong", [True, False])
def test_wrong_slots_win_over_a_node_that_does_not_answer_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_slots_wrong: bool
) -> None:
    prompt, _ = stored_before(tmp_path)
    engine = Engine(IDENTITY.geometry, blocks=1000, seed=3)
    slots = engine.allocate(prompt.token_count)
    if are_slots_wrong:
        slots[0] = slots[1]
    before = [[bits_of(plane).clone() for plane in layer] for layer in engine.planes]

    def fail(*_: object) -> None:
        raise UnavailableError("the node is gone")

    with connected(tmp_path, is_local=False) as client, client.lookup([prompt]) as plans:
        monkeypatch.setattr(Session, "begin_await", fail)
        monkeypatch.setattr(Session, "await_arrivals", fail)
        with pytest.raises(SlotError if are_slots_wrong else UnavailableError):
            client.restore(plans, engine.planes, [slots])
    assert_equal_bits([[bits_of(plane) for plane in layer] for layer in engine.planes], before)


def test_a_question_sent_ahead_goes_with_the_plans_that_were_never_restored(tmp_path: Path) -> None:
    prompt, _ = stored_before(tmp_path)
    with connected(tmp_path, is_local=False) as client:
        calls = client.session._transport._open().calls  # type: ignore[attr-defined]
        with client.lookup([prompt]) as plans:
            plans.ask_ahead()
            plans.ask_ahead()
            assert len(calls._busy) == 1
        assert not calls._busy
        assert client.stats()["handles"]["leases"] == 0  # type: ignore[index]


def test_segments_that_need_no_rows_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, _ = stored_before(tmp_path)
    may_go_on = gate_reads(monkeypatch)
    engine = Engine(IDENTITY.geometry, blocks=1000, seed=3)
    none = torch.full((prompt.token_count,), -1)
    with connected(tmp_path, is_local=False) as client, client.lookup([prompt]) as plans:
        calls = client.session._transport._open().calls  # type: ignore[attr-defined]
        client.restore(plans, engine.planes, [none]).wait()
        assert not calls._busy
        may_go_on.set()
