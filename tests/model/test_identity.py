"""Identity: every part of it is in the key, in every process."""

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.config import process_environment
from kvservice.model.errors import InvalidIdentityError
from kvservice.model.geometry import DTYPE_BYTES, Geometry, Plane, attention_geometry, latent_geometry, opaque_geometry
from kvservice.model.identity import Adapter, Identity, Shard, identity_from_json
from kvservice.model.rope import opaque_rope, pinned, rope_from_parameters

ROPE = rope_from_parameters({"rope_theta": 10000.0}, head_size=32, max_positions=2048)


def make_identity(**changes: object) -> Identity:
    geometry = attention_geometry(layers=2, heads=2, head_size=32, dtype="bfloat16")
    plain = Identity(tenant="t", model="m", weights="w", geometry=geometry, rope=(ROPE, ROPE))
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


OTHERS = {
    "tenant": make_identity(tenant="u"),
    "model": make_identity(model="n"),
    "weights": make_identity(weights="w2"),
    "adapter": make_identity(adapter=Adapter("a", "d")),
    "adapter digest": make_identity(adapter=Adapter("a", "e")),
    "scales": make_identity(kv_scales="static:abc"),
    "shard": make_identity(shard=Shard(1, 2)),
    "pipeline": make_identity(shard=Shard(0, 1, 1, 2)),
    "salt": make_identity(salt="s"),
    "lossy": make_identity(lossy="int8"),
    "dtype": make_identity(geometry=attention_geometry(layers=2, heads=2, head_size=32, dtype="float16")),
    "heads": make_identity(geometry=attention_geometry(layers=2, heads=4, head_size=32, dtype="bfloat16")),
    "one layer's rope": make_identity(
        rope=(ROPE, rope_from_parameters({"rope_theta": 1e6}, head_size=32, max_positions=2048))
    ),
    "pair style": make_identity(rope=(dataclasses.replace(ROPE, is_interleaved=True),) * 2),
}


def test_every_part_changes_the_namespace() -> None:
    namespaces = {name: identity.namespace() for name, identity in OTHERS.items()}
    assert len({*namespaces.values(), make_identity().namespace()}) == len(namespaces) + 1


@pytest.mark.parametrize("name", OTHERS)
def test_json_round_trip_keeps_identity_and_namespace(name: str) -> None:
    back = identity_from_json(OTHERS[name].canonical_json())
    assert back == OTHERS[name]
    assert back.namespace() == OTHERS[name].namespace()


def test_namespace_does_not_depend_on_the_process() -> None:
    text = make_identity().canonical_json()
    script = (
        "import sys; from kvservice.model.identity import identity_from_json\n"
        "print(identity_from_json(sys.stdin.read()).namespace().hex())"
    )
    seen = set()
    for seed in ("0", "1"):
        environment = process_environment({"PYTHONHASHSEED": seed})
        done = subprocess.run(
            [sys.executable, "-P", "-c", script],
            input=text,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        seen.add(done.stdout.strip())
    assert seen == {make_identity().namespace().hex()}


@pytest.mark.parametrize("field", ["tenant", "model", "weights", "geometry", "rope"])
def test_missing_field_is_named(field: str) -> None:
    raw = json.loads(make_identity().canonical_json())
    del raw[field]
    with pytest.raises(InvalidIdentityError, match=field):
        identity_from_json(json.dumps(raw))


@pytest.mark.parametrize("field", ["tenant", "model", "weights", "kv_scales"])
def test_empty_field_is_named(field: str) -> None:
    with pytest.raises(InvalidIdentityError, match=field):
        make_identity(**{field: ""})


def test_unknown_field_is_named() -> None:
    raw = json.loads(make_identity().canonical_json()) | {"quantum": 1}
    with pytest.raises(InvalidIdentityError, match="quantum"):
        identity_from_json(json.dumps(raw))


def test_rope_descriptors_must_match_layers_and_rotary_size() -> None:
    with pytest.raises(InvalidIdentityError, match="3 RoPE descriptors for 2 layers"):
        make_identity(rope=(ROPE,) * 3)
    narrow = rope_from_parameters({"partial_rotary_factor": 0.5}, head_size=32, max_positions=2048)
    with pytest.raises(InvalidIdentityError, match="rotates 16"):
        make_identity(rope=(narrow, narrow))


def test_pinned_reason_is_the_first_pinned_layers() -> None:
    assert make_identity().pinned_reason == ""
    assert make_identity(rope=(ROPE, pinned("odd", "because"))).pinned_reason == "because"


def test_latent_geometry_rotates_its_tail() -> None:
    geometry = latent_geometry(layers=1, latent_size=512, rotary_size=64, dtype="bfloat16")
    assert geometry.token_bytes == 1152
    assert geometry.planes[0].rotary_offset == 512


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "9" * 5000,
        make_identity().canonical_json().replace('"frequencies":[1.0', f'"frequencies":[{HUGE}'),
        make_identity().canonical_json().replace('"attention_factor":1.0', '"attention_factor":NaN'),
        make_identity().canonical_json().replace('"attention_factor":1.0', '"attention_factor":1e999'),
        make_identity().canonical_json().replace('"frequencies":[1.0', '"frequencies":[NaN'),
        '{"tenant": "\\ud800"}',
    ],
    ids=[
        "too deep",
        "too many digits",
        "huge frequency",
        "NaN factor",
        "infinite factor",
        "NaN frequency",
        "surrogate",
    ],
)
def test_hostile_json_is_an_identity_error_and_nothing_else(text: str) -> None:
    with pytest.raises(InvalidIdentityError):
        identity_from_json(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.sampled_from(sorted(json.loads(make_identity().canonical_json()))), json_values)
def test_any_wrong_value_is_an_identity_error_and_nothing_else(field: str, value: object) -> None:
    raw = json.loads(make_identity().canonical_json())
    raw[field] = value
    try:
        identity = identity_from_json(json.dumps(raw))
    except InvalidIdentityError:
        return
    assert identity_from_json(identity.canonical_json()) == identity


def test_opaque_rows_have_a_size_and_cannot_be_moved() -> None:
    geometry = opaque_geometry(777)
    assert (geometry.layers, geometry.token_bytes, geometry.element_bytes) == (1, 777, 1)
    assert geometry.is_opaque
    identity = make_identity(geometry=geometry, rope=(opaque_rope(),))
    assert "another program" in identity.pinned_reason
    assert identity_from_json(identity.canonical_json()) == identity
    assert identity.namespace() != make_identity(geometry=opaque_geometry(778), rope=(opaque_rope(),)).namespace()


def test_opaque_rows_are_no_type_that_kernels_know() -> None:
    assert "uint8" not in DTYPE_BYTES
    assert not attention_geometry(layers=1, heads=1, head_size=8, dtype="bfloat16").is_opaque


def test_opaque_rows_are_at_least_one_byte_and_do_not_rotate() -> None:
    with pytest.raises(InvalidIdentityError, match="positive"):
        opaque_geometry(0)
    with pytest.raises(InvalidIdentityError, match="rotates"):
        Geometry(1, "uint8", (Plane("rows", 1, 8, rotary_size=4),))


# Lossy storage


def test_an_exact_identity_does_not_speak_of_loss_so_that_its_namespace_stays() -> None:
    assert "lossy" not in json.loads(make_identity().canonical_json())
    assert not make_identity().is_lossy
    assert json.loads(make_identity(lossy="int8").canonical_json())["lossy"] == "int8"
    assert make_identity(lossy="int8").is_lossy


FLOAT32 = attention_geometry(layers=2, heads=2, head_size=32, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lossy": "int4"}, "lossy is 'int4'; leave it empty, or use 'int8'"),
        ({"lossy": "int8", "geometry": FLOAT32}, "float32"),
        ({"lossy": "int8", "geometry": opaque_geometry(64), "rope": (opaque_rope(),)}, "the KV is uint8"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidIdentityError, match=says):
        make_identity(**changes)


def test_a_loss_must_be_a_text() -> None:
    raw = json.loads(make_identity().canonical_json()) | {"lossy": 8}
    with pytest.raises(InvalidIdentityError, match="lossy must be a str"):
        identity_from_json(json.dumps(raw))
