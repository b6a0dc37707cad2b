"""What keeps two identities apart: every field that differs, in the field's words, and what to do about it.

Two identities have one namespace if and only if nothing is found here: what only their JSON tells apart, such as 0.0
and -0.0, is found too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

from kvservice.model.geometry import Geometry, Plane
from kvservice.model.identity import Adapter, Identity, Shard
from kvservice.model.rope import Rope

VALUE_CHARS_MAX = 120
"""Longer values are cut in the middle: digests stay comparable by both ends."""
NONE = "none"
TEXT_BEFORE = 40
"""Characters of an identity's JSON before the place where two differ."""

_ADVICE = {
    "tenant": "tenants never share; if both engines are one tenant's, give them the same `tenant` option",
    "model": "give both engines the same `model` option if it is one model under two names, else they cannot share",
    "weights": "give both engines the same `weights` option if their weights are equal, else they cannot share",
    "kv_scales": 'give both engines the same KV scales; without scales it is "none"',
    "lossy": "what one stores is rounded, the other wants exact KV: give both engines the same `lossy` option",
    "format_version": "run the same version of kvservice on both sides",
    "salt": "what else changes KV differs: start both engines with the same types, quantisation and overrides",
    "adapter": "caches of an adapter are found only with that adapter; use the same name and the same files in both",
    "adapter.name": "give the adapter the same name in both engines",
    "adapter.digest": "the adapter's weights differ; if they are equal, give both the same digest by option `adapters`",
    "shard.tp_rank": "ranks of one engine hold different heads; compare the same rank of both engines",
    "shard.tp_size": "start both engines with the same --tensor-parallel-size",
    "shard.pp_rank": "ranks of one engine hold different layers; compare the same rank of both engines",
    "shard.pp_size": "start both engines with the same --pipeline-parallel-size",
    "geometry.layers": "another model, or another split of its layers over pipeline ranks",
    "geometry.dtype": "start both engines with the same --kv-cache-dtype, and with auto the same --dtype",
    "geometry.planes": "another kind of attention: the models differ",
    "heads": "the models, or the tensor parallel sizes, differ: KV heads are split over ranks",
    "head_size": "the models differ: compare their config.json",
    "rotary_offset": "the models differ: compare their config.json",
    "rotary_size": "the models differ: compare partial_rotary_factor in config.json",
    "kind": "compare rope_parameters (rope_scaling) in config.json and --hf-overrides of both engines",
    "is_interleaved": "the models rotate other pairs of elements: compare model_type in config.json",
    "frequencies": "compare rope_theta and rope_parameters (rope_scaling) in config.json and --hf-overrides",
    "attention_factor": "compare attention_factor and mscale in config.json and --hf-overrides",
    "pinned_reason": "compare sliding_window, layer_types and rope_parameters in config.json",
}
_PRIVATE_WEIGHTS = 'an engine with "is_shared": false shares with nobody: set it to true in both and give `weights`'
_FILES_WEIGHTS = "the files of the weights differ; if only their form does, give both engines the same `weights` option"
_SALT_ADVICE = {
    "dtype": "start both engines with the same --dtype",
    "quantization": "start both engines with the same --quantization",
    "positions": "compare rope_parameters, sliding_window, max_position_embeddings in config.json and --hf-overrides",
    "overrides": "start both engines with the same --hf-overrides",
    "layers": "the pipeline ranks hold other layers: split them alike, see --pipeline-parallel-size",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs: its name, both values as text, and what to do. Like layers share one."""

    field: str
    left: str
    right: str
    advice: str

    def __str__(self) -> str:
        return f"{self.field}: {self.left} | {self.right}: {self.advice}"


def differences(left: Identity, right: Identity) -> tuple[Difference, ...]:
    """All fields that differ, in the order of an identity's fields; empty if both have the same namespace."""
    found = tuple(_of_identity(left, right))
    return found or tuple(_of_texts(left.canonical_json(), right.canonical_json()))


def _of_texts(left: str, right: str) -> Iterator[Difference]:
    """What equal values may hide: 1 and 1.0, 0.0 and -0.0."""
    if left != right:
        start = max(next(at for at, (a, b) in enumerate(zip_longest(left, right)) if a != b) - TEXT_BEFORE, 0)
        ours, theirs = (text[start : start + VALUE_CHARS_MAX] for text in (left, right))
        yield Difference("canonical JSON", ours, theirs, "numbers are equal and written differently: use one form")


def _of_identity(left: Identity, right: Identity) -> Iterator[Difference]:
    for spec in fields(Identity):
        ours, theirs = getattr(left, spec.name), getattr(right, spec.name)
        if spec.name == "geometry":
            yield from _of_geometry(ours, theirs)
        elif spec.name == "rope":
            yield from _of_rope(ours, theirs)
        elif spec.name == "shard":
            yield from _of_fields(Shard, ours, theirs, "shard.")
        elif spec.name == "adapter" and ours is not None and theirs is not None:
            yield from _of_fields(Adapter, ours, theirs, "adapter.")
        elif spec.name == "salt":
            yield from _of_salt(ours, theirs)
        elif ours != theirs:
            yield Difference(spec.name, _text(ours), _text(theirs), _identity_advice(spec.name, ours, theirs))


def _identity_advice(name: str, left: object, right: object) -> str:
    if name == "weights":
        kinds = [str(one).partition(":")[0] for one in (left, right)]
        if "private" in kinds:
            return _PRIVATE_WEIGHTS
        if kinds == ["files", "files"]:
            return _FILES_WEIGHTS
    return _ADVICE[name]


def _of_fields(kind: type, left: object, right: object, prefix: str, label: str = "") -> Iterator[Difference]:
    """The fields of two dataclass objects of one ``kind`` that differ; advice by ``prefix`` and name."""
    for spec in fields(kind):
        ours, theirs = getattr(left, spec.name), getattr(right, spec.name)
        if ours != theirs:
            yield Difference((label or prefix) + spec.name, _text(ours), _text(theirs), _ADVICE[prefix + spec.name])


def _of_salt(left: str, right: str) -> Iterator[Difference]:
    """Salts that are lists of ``name=value`` are compared part by part; others as a whole."""
    if left == right:
        return
    parts = [dict(part.split("=", 1) for part in salt.split(";") if "=" in part) for salt in (left, right)]
    is_list = all(len(found) == salt.count(";") + 1 for found, salt in zip(parts, (left, right), strict=True))
    names = [name for name in dict.fromkeys((*parts[0], *parts[1])) if parts[0].get(name) != parts[1].get(name)]
    if not is_list or not names:  # names that come twice, or in another order
        yield Difference("salt", _text(left), _text(right), _ADVICE["salt"])
        return
    for name in names:
        ours, theirs = (_text(found.get(name)) for found in parts)
        yield Difference(f"salt: {name}", ours, theirs, _SALT_ADVICE.get(name, _ADVICE["salt"]))


# Geometry


def _of_geometry(left: Geometry, right: Geometry) -> Iterator[Difference]:
    for spec in fields(Geometry):
        ours, theirs = getattr(left, spec.name), getattr(right, spec.name)
        if spec.name == "planes":
            yield from _of_planes(ours, theirs)
        elif ours != theirs:
            name = f"geometry.{spec.name}"
            yield Difference(name, _text(ours), _text(theirs), _ADVICE[name])


def _of_planes(left: Sequence[Plane], right: Sequence[Plane]) -> Iterator[Difference]:
    names = [[plane.name for plane in planes] for planes in (left, right)]
    if names[0] != names[1]:
        yield Difference("geometry.planes", _text(names[0]), _text(names[1]), _ADVICE["geometry.planes"])
        return
    for ours, theirs in zip(left, right, strict=True):
        yield from _of_fields(Plane, ours, theirs, "", f"geometry.planes.{ours.name}.")


# RoPE, layer by layer


def _of_rope(left: Sequence[Rope], right: Sequence[Rope]) -> Iterator[Difference]:
    """Layers that differ alike share a line. A layer that only one has is the geometry's to tell."""
    layers: dict[tuple[str, str, str], list[int]] = {}
    told: dict[tuple[Rope, Rope], tuple[tuple[str, str, str], ...]] = {}  # most layers are alike
    for layer, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if (ours, theirs) not in told:
            told[ours, theirs] = tuple(_of_layer(ours, theirs))
        for found in told[ours, theirs]:
            layers.setdefault(found, []).append(layer)
    for (name, ours_text, theirs_text), numbers in layers.items():
        yield Difference(f"rope of {_layers_text(numbers)}: {name}", ours_text, theirs_text, _ADVICE[name])


def _of_layer(left: Rope, right: Rope) -> Iterator[tuple[str, str, str]]:
    for spec in fields(Rope):
        ours, theirs = getattr(left, spec.name), getattr(right, spec.name)
        if ours == theirs:
            continue
        if spec.name == "frequencies":
            yield (spec.name, *_frequency_texts(ours, theirs))
        else:
            yield spec.name, _text(ours), _text(theirs)


def _frequency_texts(left: Sequence[float], right: Sequence[float]) -> tuple[str, str]:
    """Where the first pair differs, and how many do."""
    differ = [pair for pair, (a, b) in enumerate(zip_longest(left, right)) if a != b]
    first = differ[0]
    texts = [
        f"{values[first]!r} in pair {first}" if first < len(values) else f"{len(values)} pairs"
        for values in (left, right)
    ]
    return texts[0], f"{texts[1]} ({len(differ)} of {max(len(left), len(right))} pairs differ)"


def _layers_text(numbers: Sequence[int]) -> str:
    """``layer 3``, or ``layers 0-3, 7``; ``numbers`` ascend."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"layer {text}" if len(numbers) == 1 else f"layers {text}"


def _text(value: object) -> str:
    """A value for people: as JSON, cut in the middle if it is long."""
    if value is None or value == "":
        return NONE
    text = f"{value.name} ({value.digest})" if isinstance(value, Adapter) else json.dumps(value)
    half = VALUE_CHARS_MAX // 2
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:half]}...{text[-half:]}"
