"""What keeps two identities apart is named, field by field, and nothing is named of equal ones."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.model.differences import VALUE_CHARS_MAX, Difference, differences
from kvservice.model.geometry import Geometry, Plane, attention_geometry, latent_geometry
from kvservice.model.identity import Adapter, Identity, Shard, identity_from_json
from kvservice.model.rope import Rope, pinned, rope_from_parameters

LAYERS = 6
GEOMETRY = attention_geometry(layers=LAYERS, heads=2, head_size=16, dtype="bfloat16")
ROPE = rope_from_parameters({"rope_theta": 10000.0}, head_size=16, max_positions=4096)
SALT = "dtype=bfloat16;quantization=None;positions=abc"
IDENTITY = Identity("acme", "llama", "r1", GEOMETRY, (ROPE,) * LAYERS, adapter=Adapter("sql", "1f"), salt=SALT)

Change = Callable[[Identity], Identity]


def with_rope(*layers: int, **changes: object) -> Change:
    def change(one: Identity) -> Identity:
        ropes = [replace(rope, **changes) if layer in layers else rope for layer, rope in enumerate(one.rope)]  # type: ignore[arg-type]
        return replace(one, rope=tuple(ropes))

    return change


def with_plane(index: int, **changes: int) -> Change:
    def change(one: Identity) -> Identity:
        planes = [
            replace(plane, **changes) if at == index else plane  # type: ignore[arg-type]
            for at, plane in enumerate(one.geometry.planes)
        ]
        return replace(one, geometry=replace(one.geometry, planes=tuple(planes)))

    return change


def with_field(**changes: object) -> Change:
    return lambda one: replace(one, **changes)  # type: ignore[arg-type]


CHANGES: dict[str, Change] = {
    "tenant": with_field(tenant="other"),
    "model": with_field(model="qwen"),
    "weights": with_field(weights="r2"),
    "kv_scales": with_field(kv_scales="per-head:1f"),
    "lossy": with_field(lossy="int8"),
    "adapter.name": with_field(adapter=Adapter("text", "1f")),
    "adapter.digest": with_field(adapter=Adapter("sql", "2e")),
    "adapter": with_field(adapter=None),
    "shard.tp_rank": with_field(shard=Shard(0, 1)),
    "salt: dtype": with_field(salt=SALT.replace("bfloat16", "float16")),
    "salt": with_field(salt="another caller's own"),
    "geometry.dtype": with_field(geometry=replace(GEOMETRY, dtype="float16")),
    "geometry.planes.k.heads": with_plane(0, heads=4),
    "geometry.planes.v.head_size": with_plane(1, head_size=32),
    "rope of layer 3: frequencies": with_rope(3, frequencies=(*ROPE.frequencies[:-1], 0.5)),
    "rope of layers 0-2, 5: is_interleaved": with_rope(0, 1, 2, 5, is_interleaved=True),
    "rope of layers 1, 4: attention_factor": with_rope(1, 4, attention_factor=1.5),
    "rope of layers 0-5: kind": with_rope(*range(LAYERS), kind="linear"),
    "rope of layer 0: pinned_reason": with_rope(0, pinned_reason="for a test"),
}
BASES = {"shard.tp_rank": replace(IDENTITY, shard=Shard(1, 2))}
ALSO = {"shard.tp_rank": ["shard.tp_size"]}


def names(found: tuple[Difference, ...]) -> list[str]:
    return [one.field for one in found]


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_is_named_alone_with_both_values_and_advice(name: str) -> None:
    base = BASES.get(name, IDENTITY)
    changed = CHANGES[name](base)
    found = differences(base, changed)
    assert names(found) == [name, *ALSO.get(name, [])]
    assert found[0].left != found[0].right
    assert len(found[0].advice) > 20
    back = differences(changed, base)
    assert names(back) == names(found)
    if "frequencies" not in name:
        assert [(one.left, one.right) for one in back] == [(one.right, one.left) for one in found]


def test_equal_identities_have_no_differences() -> None:
    assert differences(IDENTITY, identity_from_json(IDENTITY.canonical_json())) == ()


def test_every_field_of_an_identity_can_differ() -> None:
    """A field that is added and forgotten here would be called the canonical JSON's."""
    known = {name.partition(".")[0].partition(":")[0].partition(" of ")[0] for name in CHANGES}
    assert {spec.name for spec in fields(Identity)} - known == {"format_version"}, "of which there is one only"


def test_every_field_of_the_parts_is_named() -> None:
    rope, plane = pinned("kind", "reason", rotary_size=4), Plane("k", 2, 16, 2, 4)
    ropes = {"kind": "other", "is_interleaved": True, "rotary_size": 6, "frequencies": (1.0,), "pinned_reason": "other"}
    planes = {"name": "v", "heads": 4, "head_size": 32, "rotary_offset": 4, "rotary_size": 6}
    shards = {"tp_rank": 1, "tp_size": 3, "pp_rank": 1, "pp_size": 3}
    for kind, changes in ((Rope, ropes | {"attention_factor": 2.0}), (Plane, planes), (Shard, shards)):
        assert {spec.name for spec in fields(kind)} == changes.keys()
    base = replace(IDENTITY, geometry=Geometry(1, "bfloat16", (plane,)), rope=(rope,), shard=Shard(0, 2, 0, 2))
    for name, value in (ropes | {"attention_factor": 2.0}).items():
        assert names(differences(base, with_rope(0, **{name: value})(base))) == [f"rope of layer 0: {name}"]
    for name, value in planes.items():
        geometry = Geometry(1, "bfloat16", (replace(plane, **{name: value}),))  # type: ignore[arg-type]
        expected = "geometry.planes" if name == "name" else f"geometry.planes.k.{name}"
        assert names(differences(base, replace(base, geometry=geometry))) == [expected]
    for name, number in shards.items():
        changed = replace(base, shard=replace(base.shard, **{name: number}))
        assert names(differences(base, changed)) == [f"shard.{name}"]


@given(st.sets(st.sampled_from(sorted(CHANGES))))
def test_what_differs_is_the_namespace_and_nothing_else(chosen: set[str]) -> None:
    changed = IDENTITY
    for name in sorted(chosen):
        changed = CHANGES[name](changed)
    found = differences(IDENTITY, changed)
    assert bool(found) == (IDENTITY.namespace() != changed.namespace())
    assert len(set(names(found))) == len(found), "a line a field"
    assert "canonical JSON" not in names(found)


def test_what_only_json_tells_apart_is_found_too() -> None:
    zero, minus = (replace(IDENTITY, rope=(replace(ROPE, attention_factor=one),) * LAYERS) for one in (0.0, -0.0))
    assert zero == minus
    assert zero.namespace() != minus.namespace()
    (found,) = differences(zero, minus)
    assert found.field == "canonical JSON"
    assert ("0.0" in found.left, "-0.0" in found.right) == (True, True)


def test_frequencies_say_where_they_differ_first_and_how_many_do() -> None:
    other = rope_from_parameters({"rope_theta": 500000.0}, head_size=16, max_positions=4096)
    (found,) = differences(IDENTITY, replace(IDENTITY, rope=(other,) * LAYERS))
    assert found.field == "rope of layers 0-5: frequencies"
    assert found.left == f"{ROPE.frequencies[1]!r} in pair 1"
    assert found.right == f"{other.frequencies[1]!r} in pair 1 (7 of 8 pairs differ)"
    assert "rope_theta" in found.advice


def test_numbers_of_layers_and_kinds_of_attention() -> None:
    fewer = replace(IDENTITY, geometry=replace(GEOMETRY, layers=4), rope=(ROPE,) * 4)
    assert names(differences(IDENTITY, fewer)) == ["geometry.layers"]
    geometry = latent_geometry(layers=LAYERS, latent_size=32, rotary_size=16, dtype="bfloat16")
    assert names(differences(IDENTITY, replace(IDENTITY, geometry=geometry))) == ["geometry.planes"]
    dtype = Geometry(LAYERS, "uint8", (Plane("rows", 1, 100),))
    opaque = replace(IDENTITY, geometry=dtype, rope=(pinned("opaque", "for a test"),) * LAYERS)
    assert {"geometry.dtype", "geometry.planes", "rope of layers 0-5: frequencies"} <= set(
        names(differences(IDENTITY, opaque))
    )


@pytest.mark.parametrize(
    ("left", "right", "says"),
    [
        ("private:1", "r1", "is_shared"),
        ("files:aa", "files:bb", "the files of the weights differ"),
        ("r1", "r2", "the same `weights` option"),
    ],
)
def test_advice_on_weights_depends_on_how_they_are_named(left: str, right: str, says: str) -> None:
    (found,) = differences(replace(IDENTITY, weights=left), replace(IDENTITY, weights=right))
    assert says in found.advice


@pytest.mark.parametrize(
    ("left", "right", "named"),
    [
        ("a=1;b=2", "a=1", ["salt: b"]),
        ("a=1;b=2", "b=2;a=1", ["salt"]),
        ("a=1;a=2", "a=2", ["salt"]),
        ("", "free text", ["salt"]),
        ("a=1", "a=2;layers=0-3", ["salt: a", "salt: layers"]),
    ],
)
def test_salts_made_of_parts_are_compared_part_by_part(left: str, right: str, named: list[str]) -> None:
    found = differences(replace(IDENTITY, salt=left), replace(IDENTITY, salt=right))
    assert names(found) == named


def test_long_values_are_cut_in_the_middle() -> None:
    (found,) = differences(replace(IDENTITY, weights="a" * 500 + "b"), replace(IDENTITY, weights="a" * 500 + "c"))
    assert len(found.left) < VALUE_CHARS_MAX + 10
    assert (found.left[-2], found.right[-2]) == ("b", "c")


def test_differences_can_be_written_as_json() -> None:
    (found,) = differences(IDENTITY, CHANGES["weights"](IDENTITY))
    assert json.loads(json.dumps(asdict(found)))["field"] == "weights"
