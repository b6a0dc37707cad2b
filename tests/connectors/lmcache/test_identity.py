"""Identities of LMCache's objects: whatever decides their bytes is in them; LMCache's hash alone is not enough."""

from pathlib import Path
from typing import Any

import pytest

from kvservice.client.connectors.lmcache.identity import Owner, object_key
from kvservice.model.errors import InvalidIdentityError, InvalidInputError
from kvservice.model.identity import Identity, identity_from_json
from tests.connectors.lmcache.builders import WHERE, make_kind, make_options


def identity(kind: dict[str, Any] | None = None, **options: Any) -> Identity:
    chosen = make_options(**options)
    return Owner.of(chosen, WHERE).identity(make_kind(**(kind or {})))


OTHERS = {
    "weights": identity(weights="r2"),
    "config": identity(config="c2"),
    "format": identity(kv_format="other"),
    "tenant": identity(tenant="u"),
    "scales": identity(kv_scales="checkpoint"),
    "model": identity({"model": "org/other"}),
    "rank": identity({"world_size": 2, "rank": 1}),
    "world": identity({"world_size": 2}),
    "element type": identity({"layout": (("float16", (128,)),)}),
    "shape": identity({"layout": (("bfloat16", (2, 64)),)}),
    "size": identity({"row_bytes": 512}),
    "form": identity({"form": "in-process"}),
}


def test_every_part_changes_the_namespace() -> None:
    namespaces = {one.namespace() for one in OTHERS.values()} | {identity().namespace()}
    assert len(namespaces) == len(OTHERS) + 1


@pytest.mark.parametrize("name", OTHERS)
def test_it_goes_over_the_wire(name: str) -> None:
    assert identity_from_json(OTHERS[name].canonical_json()) == OTHERS[name]


def test_a_rank_outside_its_world_is_in_the_key_all_the_same() -> None:
    one, other = identity({"world_size": 0, "rank": 300}), identity({"world_size": 0, "rank": 301})
    assert one.namespace() != other.namespace()


def test_files_stand_for_weights_and_configuration(tmp_path: Path) -> None:
    def of_files() -> Identity:
        return identity(weights="", config="", model_path=str(tmp_path))

    (tmp_path / "model.bin").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    before = of_files()
    assert before.weights.startswith("files:")
    assert of_files() == before
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    assert of_files().namespace() != before.namespace()


def test_eight_bits_without_scales_are_refused() -> None:
    kind = {"layout": (("float8_e4m3fn", (256,)),)}
    with pytest.raises(InvalidIdentityError, match="kv_scales"):
        identity(kind)
    assert identity(kind, kv_scales="checkpoint").kv_scales == "checkpoint"


def test_a_size_that_the_layout_does_not_say_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="its layout says 256"):
        Owner.of(make_options(), WHERE).identity_of(make_kind())(255)


def test_a_local_folder_is_called_by_its_last_part(tmp_path: Path) -> None:
    assert identity({"model": str(tmp_path)}).model == tmp_path.name
    assert identity({"model": str(tmp_path)}, model="org/model").model == "org/model"


def test_keys_are_made_of_their_parts_and_nothing_is_run_together() -> None:
    keys = {object_key(b"ab", b""), object_key(b"a", b"b"), object_key(b"", b"ab"), object_key(b"ab")}
    assert len(keys) == 4
