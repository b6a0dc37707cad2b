"""Gemma 3, most of whose layers see a window only: the same tokens as without us, and a wrong block would be seen."""

from pathlib import Path

from tests.vllm import models
from tests.vllm.legs import CHUNK, make_prompts, run_leg, running_service
from tests.vllm.test_connector import check_equal, check_loaded


def test_a_model_with_sliding_windows_says_the_same(model_cache: Path) -> None:
    model, prompts = models.tiny_gemma3(model_cache), make_prompts()
    plain = run_leg(model, prompts)
    assert len({tuple(tokens) for tokens in plain.tokens}) == len(prompts)
    with running_service() as service:
        options = {"address": service.address, "chunk_tokens": CHUNK}
        stored = run_leg(model, prompts, connector=options)
        loaded = run_leg(model, prompts, connector=options)
        zeros = run_leg(model, prompts, connector=options, sabotage=["zeros"])
    check_equal(stored, plain)
    check_equal(loaded, plain)
    check_loaded(loaded)
    assert zeros.tokens != plain.tokens
