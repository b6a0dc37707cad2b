"""What requests hold besides tokens: each part of it separates keys, and what is not known is not reused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvservice.client.connectors.vllm.request_extras import ExtrasReader


def make_request(**changes: Any) -> Any:
    values = {"prompt_token_ids": [1], "prompt_embeds": None, "lora_request": None, "cache_salt": None}
    return SimpleNamespace(**{**values, "mm_features": [], **changes})


def make_adapter(folder: Path, *, name: str = "sql", number: int = 1, value: float = 1.0) -> Any:
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.full((8, 8), value)}, folder / "adapter_model.safetensors")
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder), load_inplace=False)


def make_image(identifier: str, *, offset: int = 3, length: int = 5) -> Any:
    return SimpleNamespace(
        modality="image", identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def extra(**changes: Any) -> bytes:
    found = ExtrasReader({}).of(make_request(**changes))
    assert not found.refusal
    return found.extra


def test_a_plain_request_has_none() -> None:
    found = ExtrasReader({}).of(make_request())
    assert (found.extra, found.items, found.refusal) == (b"", (), "")
    assert extra(cache_salt="") == b""


def test_salt_and_adapter_separate_and_never_stand_for_each_other(tmp_path: Path) -> None:
    one, two = make_adapter(tmp_path / "1"), make_adapter(tmp_path / "2", value=2.0)
    other_name = make_adapter(tmp_path / "3", name="css")
    found = [
        extra(),
        extra(cache_salt="a"),
        extra(cache_salt="b"),
        extra(cache_salt="sql"),
        extra(lora_request=one),
        extra(lora_request=two),
        extra(lora_request=other_name),
        extra(lora_request=one, cache_salt="a"),
    ]
    assert len(set(found)) == len(found)


def test_an_adapter_is_the_same_in_every_folder_and_under_every_number(tmp_path: Path) -> None:
    one, two = make_adapter(tmp_path / "1"), make_adapter(tmp_path / "2", number=7)
    assert extra(lora_request=one) == extra(lora_request=two)


def test_files_that_changed_under_an_adapters_name_are_refused_until_loaded_anew(tmp_path: Path) -> None:
    """vLLM may still compute with what it has loaded: neither digest would be right."""
    reader, adapter = ExtrasReader({}), make_adapter(tmp_path / "1")
    before = reader.of(make_request(lora_request=adapter))
    make_adapter(tmp_path / "1", value=3.0)
    (tmp_path / "1" / "adapter_config.json").write_text("{}")
    assert "changed under its name" in reader.of(make_request(lora_request=adapter)).refusal
    adapter.load_inplace = True
    after = reader.of(make_request(lora_request=adapter))
    assert after.refusal == ""
    assert after.extra != before.extra


def test_a_given_digest_needs_no_files() -> None:
    adapter = SimpleNamespace(lora_name="sql", lora_int_id=1, lora_path="org/hub-name")
    assert "adapters" in ExtrasReader({}).of(make_request(lora_request=adapter)).refusal
    one, two = (ExtrasReader({"sql": digest}).of(make_request(lora_request=adapter)) for digest in ("1", "2"))
    assert one.refusal == two.refusal == ""
    assert one.extra != two.extra


def test_images_are_items_at_their_places() -> None:
    images = [make_image("cat"), make_image("dog", offset=20)]
    items = ExtrasReader({}).of(make_request(mm_features=images)).items
    assert [item.position for item in items] == [3, 20]
    assert items[0].digest != items[1].digest
    longer = ExtrasReader({}).of(make_request(mm_features=[make_image("cat", length=6)])).items
    assert longer[0].digest != items[0].digest


@pytest.mark.parametrize("changes", [{"prompt_embeds": object()}, {"prompt_token_ids": None}])
def test_prompts_without_token_ids_are_refused(changes: dict[str, Any]) -> None:
    assert "embeddings" in ExtrasReader({}).of(make_request(**changes)).refusal
