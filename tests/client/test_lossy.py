"""A lossy identity: what is stored is rounded once, comes back as it was stored, and is never taken for exact KV."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvservice.client import StoreOutcome
from kvservice.kernels import reference
from kvservice.model.identity import INT8, Identity
from kvservice.model.plan import Match
from tests.client.builders import (
    GEOMETRIES,
    POLICY,
    TORCH_DTYPES,
    Engine,
    assert_equal_bits,
    bits_of,
    make_identity,
    make_prompt,
    moved_rows,
)
from tests.client.conftest import Connect
from tests.client.test_store import outcomes, restore_into, store_whole

ROUNDED = [name for name, geometry in GEOMETRIES.items() if geometry.dtype != "float32"]
Rows = list[list[Tensor]]


def lossy_identity(name: str = "gqa-bf16") -> Identity:
    return make_identity(GEOMETRIES[name], lossy=INT8)


def rounded(identity: Identity, rows: Rows) -> Rows:
    """What the reference makes of rows ``[rows, heads, head_size]``."""
    dtype = TORCH_DTYPES[identity.geometry.dtype]
    return [[bits_of(reference.round_to_8_bits(plane.view(dtype))) for plane in layer] for layer in rows]


def rows_at(rows: Rows, where: list[int]) -> Rows:
    return [[plane[where] for plane in layer] for layer in rows]


@pytest.mark.parametrize("name", ROUNDED)
def test_what_comes_back_is_rounded_once(connect: Connect, name: str) -> None:
    identity = lossy_identity(name)
    client, prompt = connect(identity), make_prompt(lossy_identity(name))
    engine, slots = store_whole(client, identity, prompt)
    other = Engine(identity.geometry, seed=1)
    with client.lookup([prompt]) as plans:
        (found,) = restore_into(client, plans, other, [prompt])
    wanted = rounded(identity, engine.rows(slots))
    assert_equal_bits(other.rows(found), wanted)
    assert not torch.equal(wanted[0][0], engine.rows(slots)[0][0])
    assert_equal_bits(rounded(identity, wanted), wanted)


@pytest.mark.parametrize("name", ROUNDED)
def test_rows_of_the_master_stay_clean_and_replaced_ones_are_rounded(local: Connect, name: str) -> None:
    """Else a round of refreshed prompts would be as many dense copies."""
    identity = lossy_identity(name)
    client = local(identity)
    first = make_prompt(identity, private=8, seed=1, policy=POLICY)
    second = make_prompt(identity, private=5, seed=2, policy=POLICY)
    store_whole(client, identity, first)
    engine = Engine(identity.geometry, seed=2)
    with client.lookup([second]) as plans:
        (slots,) = restore_into(client, plans, engine, [second])
        engine.change(slots[[6, 12]])
        result = client.store(second, engine.planes, slots, base=plans[0], is_refreshed=True)
    assert outcomes(result)[2:] == [StoreOutcome.MIRROR] * 2
    again = Engine(identity.geometry, seed=3)
    with client.lookup([second]) as plans:
        assert [span.match for span in plans[0].spans()][2:] == [Match.REFRESHED] * 2
        (found,) = restore_into(client, plans, again, [second])
    ours, theirs = again.rows(found), engine.rows(slots)
    clean, replaced = [row for row in range(5, second.token_count) if row not in (6, 12)], [6, 12]
    assert_equal_bits(rows_at(ours, clean), rows_at(theirs, clean))
    assert_equal_bits(rows_at(ours, replaced), rounded(identity, rows_at(theirs, replaced)))


def test_a_moved_use_moves_what_was_stored(local: Connect) -> None:
    identity = lossy_identity()
    client = local(identity)
    first = make_prompt(identity, private=8, seed=1, policy=POLICY)
    second = make_prompt(identity, private=5, seed=2, policy=POLICY)
    engine, slots = store_whole(client, identity, first)
    other = Engine(identity.geometry, seed=4)
    with client.lookup([second]) as plans:
        (found,) = restore_into(client, plans, other, [second])
    stored = rounded(identity, engine.rows(slots[8:]))
    assert_equal_bits(other.rows(found[5:]), moved_rows(identity, stored, -3))


def test_exact_and_lossy_caches_never_answer_for_each_other(local: Connect) -> None:
    lossy = lossy_identity()
    exact = replace(lossy, lossy="")
    client = local(lossy, exact)
    store_whole(client, lossy, make_prompt(lossy))
    with client.lookup([make_prompt(exact)]) as plans:
        assert plans[0].hit_tokens == 0
    engine, slots = store_whole(client, exact, make_prompt(exact), seed=5)
    other = Engine(exact.geometry, seed=6)
    with client.lookup([make_prompt(exact)]) as plans:
        (found,) = restore_into(client, plans, other, [make_prompt(exact)])
    assert_equal_bits(other.rows(found), engine.rows(slots))
