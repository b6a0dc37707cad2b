"""`kvservice explain` beside real engines: their identity files, and a prompt that one of them stored."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.__main__ import main
from tests.vllm.legs import BLOCK, CHUNK, ServiceProcess, make_prompts, run_leg, running_service

PROMPTS = make_prompts(2)
"""Of 200 tokens: three chunks, and 8 tokens that are no block."""


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service() as service:
        yield service


@pytest.fixture(scope="module")
def files(tiny_model: Path, service: ServiceProcess, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Identity files of an engine that stored the first prompt, and of one with other types that stored none."""
    folder = tmp_path_factory.mktemp("identities")
    found = [str(folder / name) for name in ("first.json", "second.json")]
    for file, dtype in zip(found, ("bfloat16", "float32"), strict=True):
        connector = {"address": service.address, "chunk_tokens": CHUNK, "identity_file": file}
        prompts = PROMPTS[:1] if dtype == "bfloat16" else make_prompts(1, tokens=BLOCK, shared=0, seed=1)
        result = run_leg(tiny_model, prompts, connector=connector, engine={"dtype": dtype})
        assert result.counts["hook_errors"] == 0
    return found


def ask(service: ServiceProcess, identity: str, prompt: list[int], folder: Path, *more: str) -> int:
    tokens = folder / "tokens.json"
    tokens.write_text(json.dumps(prompt))
    where = ["--socket", service.address.removeprefix("unix:"), "--identity", identity, "--tokens", str(tokens)]
    return main(["explain", *where, "--chunk-tokens", str(CHUNK), "--block-size", str(BLOCK), *more])


def test_what_an_engine_stored_is_found_by_its_identity_file(
    service: ServiceProcess, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(service, files[0], PROMPTS[0], tmp_path) == 0
    assert "exact reuse along the prompt: 192 of 192 tokens" in capsys.readouterr().out
    assert ask(service, files[0], PROMPTS[1], tmp_path) == 1
    printed = capsys.readouterr().out
    assert "segment 0, tokens 0-64: found exact" in printed
    assert "segments 1-2, tokens 64-192: never stored for this identity" in printed
    assert "64 of 192 tokens; it ends before segment 1" in printed
    assert ask(service, files[0], PROMPTS[0], tmp_path, "--salt", "mine") == 1
    assert "what differs is no token, but a cache salt" in capsys.readouterr().out


def test_why_two_engines_do_not_share_is_said_by_either_form(
    service: ServiceProcess, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *files]) == 1
    printed = capsys.readouterr().out
    assert f'geometry.dtype: "bfloat16" in {files[0]}, "float32" in {files[1]}; ' in printed
    assert f'salt: dtype: "bfloat16" in {files[0]}, "float32" in {files[1]}; ' in printed
    assert len(printed.splitlines()) == 3
    assert ask(service, files[1], PROMPTS[0], tmp_path) == 1
    printed = capsys.readouterr().out
    assert "3 of this prompt's 3 would be found; what differs:" in printed
    assert 'geometry.dtype: "float32" in yours, "bfloat16" in that one' in printed
