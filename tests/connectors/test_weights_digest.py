"""Digests of weights on disk: content decides, and every tensor counts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvservice.client.connectors.vllm.weights_digest import weights_digest
from kvservice.model.errors import InvalidInputError


def make_folder(folder: Path, *, changed: str = "", by: float = 1.0) -> Path:
    folder.mkdir()
    tensors = {f"layers.{index}": torch.arange(5000.0) + index for index in range(8)}
    tensors |= {"norm": torch.ones(3), "empty": torch.empty(0)}
    if changed:
        tensors[changed] = tensors[changed] * 1.01 + by
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_copies_have_the_same_digest(tmp_path: Path) -> None:
    one, other = make_folder(tmp_path / "a"), make_folder(tmp_path / "b")
    (other / "tokenizer.json").write_text("{}")
    (other / "pytorch_model.bin").write_bytes(b"the same in another format")
    assert weights_digest(one) == weights_digest(other)


@pytest.mark.parametrize("name", ["layers.0", "layers.7", "norm"])
def test_one_changed_tensor_changes_it(tmp_path: Path, name: str) -> None:
    assert weights_digest(make_folder(tmp_path / "a")) != weights_digest(make_folder(tmp_path / "b", changed=name))


def test_the_configuration_counts(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a")
    before = weights_digest(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "rms_norm_eps": 1}')
    assert weights_digest(folder) != before


@pytest.mark.parametrize("place", [0, 1_000_000, 2_999_999])
def test_other_formats_are_sampled_from_first_to_last(tmp_path: Path, place: int) -> None:
    content = bytearray(3_000_000)
    (tmp_path / "model.gguf").write_bytes(content)
    before = weights_digest(tmp_path / "model.gguf")
    content[place] = 1
    (tmp_path / "model.gguf").write_bytes(content)
    assert weights_digest(tmp_path / "model.gguf") != before


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 100, b"\x02" + b"\0" * 7 + b"{]", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_broken_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidInputError, match="safetensors"):
        weights_digest(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no weights"):
        weights_digest(tmp_path)
    with pytest.raises(InvalidInputError, match="no weights"):
        weights_digest(tmp_path / "nowhere.bin")
