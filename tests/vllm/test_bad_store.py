"""Stores that are too small, another model's, or damaged: the engine says what it says without us."""

from pathlib import Path

import pytest

from kvservice.storage.disk import RealDisk
from kvservice.storage.slab import SLAB_NAME, Slab
from kvservice.storage.slab_format import FOOTER_BYTES, FoundRecord
from tests.vllm import models
from tests.vllm.legs import CHUNK, Result, ServiceProcess, make_prompts, run_leg, running_service, with_ssd
from tests.vllm.test_connector import LOADABLE, check_equal

PROMPTS = make_prompts()
BLOCK_BYTES = 4096


def options(service: ServiceProcess) -> dict[str, object]:
    return {"address": service.address, "chunk_tokens": CHUNK}


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Result:
    """What vLLM says without us."""
    return run_leg(tiny_model, PROMPTS)


def test_a_service_without_room_costs_only_what_it_cannot_keep(tiny_model: Path) -> None:
    """25 chunks of 68 KiB for an arena of 1 MiB."""
    prompts = make_prompts(12)
    plain = run_leg(tiny_model, prompts)
    with running_service("--host-bytes", str(1 << 20)) as service:
        for _ in range(2):
            result = run_leg(tiny_model, prompts, connector=options(service))
            check_equal(result, plain)
            assert result.counts["chunks_saved"] > 0
            assert result.counts["tokens_loaded"] < 12 * 192 - 11 * 96


def test_a_service_that_has_room_for_no_chunk_refuses(model_cache: Path) -> None:
    """Records of 1.3 MiB."""
    model, prompts = models.tiny_llama(model_cache, head_size=64, layers=8), make_prompts(3, tokens=330)
    plain = run_leg(model, prompts)
    with running_service("--host-bytes", str(1 << 20)) as service:
        result = run_leg(model, prompts, connector=options(service) | {"chunk_tokens": 320})
    check_equal(result, plain)
    assert result.counts["saves_refused"] == 3
    assert result.counts["chunks_saved"] == result.counts["tokens_loaded"] == 0


def test_another_models_data_is_never_found(tiny_model: Path, model_cache: Path, plain: Result) -> None:
    """Equal in everything but its weights."""
    other = models.tiny_llama(model_cache, seed=1)
    with running_service() as service:
        stored = run_leg(other, PROMPTS, connector=options(service))
        assert stored.tokens != plain.tokens
        result = run_leg(tiny_model, PROMPTS, connector=options(service))
    check_equal(result, plain)
    assert result.counts["tokens_loaded"] == 0
    assert result.counts["chunks_saved"] == stored.counts["chunks_saved"] > 0


@pytest.mark.parametrize("damage", ["cut off", "one bit"])
def test_damaged_records_on_ssd_are_computed(tiny_model: Path, plain: Result, tmp_path: Path, damage: str) -> None:
    without_scrubber = ("--scrub-bytes-per-s", "0")  # it would find them before the engine does
    with running_service(*with_ssd(tmp_path / "ssd"), *without_scrubber) as service:
        run_leg(tiny_model, PROMPTS, connector=options(service))
        service.stop()
        harm(tmp_path / "ssd" / SLAB_NAME, damage)
        service.start()
        result = run_leg(tiny_model, PROMPTS, connector=options(service))
        again = run_leg(tiny_model, PROMPTS, connector=options(service))
    check_equal(result, plain)
    assert result.counts["loads_failed"] > 0
    assert result.counts["tokens_loaded"] < LOADABLE
    check_equal(again, plain)
    assert again.counts["tokens_loaded"] > result.counts["tokens_loaded"], "what was computed was stored anew"


def harm(slab: Path, damage: str) -> None:
    """Damage the payload of every record; heads and footers stay as they are."""
    with slab.open("r+b") as file:
        for start, length in records(slab):
            if damage == "cut off":
                middle = start + length // 2
                file.seek(middle)
                file.write(bytes(length // 2 - BLOCK_BYTES - FOOTER_BYTES))
            else:
                file.seek(start + length // 2)
                byte = file.read(1)[0]
                file.seek(start + length // 2)
                file.write(bytes([byte ^ 1]))


def records(slab: Path) -> list[tuple[int, int]]:
    """(offset, bytes) of what lies on the slab of a service that is stopped."""
    disk = RealDisk(slab.parent)
    try:
        opened = Slab.open(disk, slab.stat().st_size)
        places = [(one.extent.offset, one.extent.length) for one in opened.scan({}) if isinstance(one, FoundRecord)]
        opened.close()
    finally:
        disk.close()
    assert places
    return places
