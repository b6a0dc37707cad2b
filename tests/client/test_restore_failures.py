"""Restores that cannot begin or go on: whoever waits is told, and nothing is written behind its back."""

import threading

import pytest

from kvservice.client import Client, PartKind, RoundPrompt
from kvservice.client.client import RESTORE_THREADS
from kvservice.client.paged import CpuPaged
from kvservice.client.restore import RestoreWork
from kvservice.model.errors import InvalidInputError, LeaseExpiredError, UnavailableError
from tests.client.builders import (
    POLICY,
    Engine,
    assert_equal_bits,
    bits_of,
    make_identity,
    make_prompt,
    make_tokens,
    short_sighted_identity,
)
from tests.client.conftest import Connect

IDENTITY = make_identity()


def store(client: Client, prompt: RoundPrompt) -> None:
    engine = Engine(client.session.identity.geometry)
    client.store(prompt, engine.planes, engine.allocate(prompt.token_count))


def test_closing_the_client_ends_queued_restores(local: Connect) -> None:
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    store(client, prompt)
    engine = Engine(IDENTITY.geometry)
    slots = [engine.allocate(prompt.token_count)]
    plans = client.lookup([prompt])
    may_go_on = threading.Event()

    def on_progress(*_: int) -> None:
        may_go_on.wait(5)

    running = [client.restore(plans, engine.planes, slots, on_progress=on_progress) for _ in range(RESTORE_THREADS)]
    queued = client.restore(plans, engine.planes, slots)
    closing = threading.Thread(target=client.close)
    closing.start()
    with pytest.raises(UnavailableError, match="the client was closed"):
        queued.wait(5)
    assert queued.is_done
    may_go_on.set()
    closing.join(5)
    for restore in running:
        restore.wait(5)


def test_a_closed_client_takes_no_restores(local: Connect) -> None:
    client = local(IDENTITY)
    plans = client.lookup([])
    client.close()
    with pytest.raises(UnavailableError, match="closed"):
        client.restore(plans, Engine(IDENTITY.geometry).planes, [])


def test_a_failure_is_told_only_when_nothing_more_is_written(local: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU copies and kernels of the last layers are queued still; here the settling itself is what is watched."""
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    store(client, prompt)
    engine = Engine(IDENTITY.geometry)
    is_settling, may_settle = threading.Event(), threading.Event()

    def settle(_: CpuPaged) -> None:
        is_settling.set()
        may_settle.wait(5)

    monkeypatch.setattr(CpuPaged, "settle", settle)
    with client.lookup([prompt]) as plans:
        restore = client.restore(
            plans, engine.planes, [engine.allocate(prompt.token_count)], on_progress=lambda *_: plans.close()
        )
        assert is_settling.wait(5)
        assert not restore.is_done
        may_settle.set()
        with pytest.raises(LeaseExpiredError):
            restore.wait(5)
        assert restore.is_done


def test_a_failure_to_settle_does_not_hide_the_first(local: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    store(client, prompt)
    engine = Engine(IDENTITY.geometry)

    def settle(_: CpuPaged) -> None:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(CpuPaged, "settle", settle)
    with client.lookup([prompt]) as plans:
        restore = client.restore(
            plans, engine.planes, [engine.allocate(prompt.token_count)], on_progress=lambda *_: plans.close()
        )
        with pytest.raises(LeaseExpiredError) as caught:
            restore.wait(5)
    assert "the GPU is gone" in caught.value.__notes__[0]


def test_a_restore_too_far_away_writes_nothing(local: Connect) -> None:
    """A master within reach whose mirror is not, and a master out of reach; the kernels find the former at a layer."""
    identity = short_sighted_identity(reach=40)
    client = local(identity)
    first, second = (
        make_prompt(identity, private=private, shared=(12,), seed=private, policy=POLICY) for private in (16, 4)
    )
    store(client, first)
    engine = Engine(identity.geometry, seed=2, blocks=64)
    slots = engine.allocate(second.token_count)
    with client.lookup([second]) as plans:
        client.restore(plans, engine.planes, [slots]).wait()
        assert client.store(second, engine.planes, slots, base=plans[0], is_refreshed=True).segments[-1].generation
    shared = (PartKind.SHARED, second.tokens[4:])
    near = [(PartKind.PRIVATE, make_tokens(44, 5)), (PartKind.PRIVATE, second.tokens[:4]), shared]  # 32 and 44 away
    far = [(PartKind.PRIVATE, make_tokens(60, 5)), shared]  # 44 and 56 away
    before = [[bits_of(plane).clone() for plane in layer] for layer in engine.planes]
    for parts in (near, far):
        prompt = RoundPrompt.from_parts(identity.namespace(), parts, policy=POLICY, chunk_tokens=4)
        target = engine.allocate(prompt.token_count)
        with client.lookup([prompt]) as plans:
            assert [planned.reference is None for _, planned in plans[0].hits] == [parts is far]
            with pytest.raises(InvalidInputError, match=r"compute them.*nothing was written"):
                client.restore(plans, engine.planes, [target])
    assert_equal_bits([[bits_of(plane) for plane in layer] for layer in engine.planes], before)


def test_a_small_first_layer_is_in_place_at_once_and_the_rest_comes_from_a_thread(
    local: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    store(client, prompt)
    engine, may_go_on, honest = Engine(IDENTITY.geometry, seed=2), threading.Event(), RestoreWork.restore_layers
    writers: list[tuple[int, bool]] = []

    def restore_layers(work: RestoreWork, first: int, end: int, *, verify: bool) -> int:
        writers.append((first, threading.current_thread() is threading.main_thread()))
        assert first == 0 or may_go_on.wait(5)
        return honest(work, first, end, verify=verify)

    monkeypatch.setattr(RestoreWork, "restore_layers", restore_layers)
    with client.lookup([prompt]) as plans:
        restore = client.restore(plans, engine.planes, [engine.allocate(prompt.token_count)])
        restore.wait_for_layer(0, 0.0)
        assert not restore.is_layer_over(1)
        with pytest.raises(UnavailableError, match="layer 1 was not restored within 0 s"):
            restore.wait_for_layer(1, 0.0)
        assert not restore._waiting, "who gave up is forgotten"
        may_go_on.set()
        restore.wait()
    assert writers == [(0, True), (1, False)]


@pytest.mark.parametrize("has_progress", [True, False])
def test_a_lease_lost_before_the_first_layer_is_never_reported_done(
    local: Connect, monkeypatch: pytest.MonkeyPatch, has_progress: bool
) -> None:
    """On the caller's thread too: nothing is raised by ``restore``, and nothing more is written."""
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    store(client, prompt)
    engine, honest = Engine(IDENTITY.geometry, seed=2), RestoreWork.restore_layers
    written: list[int] = []

    def restore_layers(work: RestoreWork, first: int, end: int, *, verify: bool) -> int:
        written.append(first)
        done_layers = honest(work, first, end, verify=verify)
        plans.close()
        return done_layers

    monkeypatch.setattr(RestoreWork, "restore_layers", restore_layers)
    plans = client.lookup([prompt])
    restore = client.restore(
        plans,
        engine.planes,
        [engine.allocate(prompt.token_count)],
        on_progress=(lambda *_: None) if has_progress else None,
    )
    for layer in range(restore.layers):
        with pytest.raises(LeaseExpiredError):
            restore.wait_for_layer(layer, 5)
    client.close()
    assert written == [0]
