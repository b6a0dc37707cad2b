"""What requests say of their rounds: boundaries cut chunks, mistakes cost reuse and nothing else, all of it counted."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvservice.app import Service
from kvservice.client.connectors.vllm.chunks import ChunkChain
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.request_extras import ExtrasReader
from kvservice.client.connectors.vllm.requests import ChainMaker
from kvservice.client.connectors.vllm.round_params import RoundParamsReader, RoundWords
from kvservice.client.connectors.vllm.tracked import Tracked
from kvservice.client.rounds import PartKind
from kvservice.model.identity import Namespace
from tests.client.builders import make_settings
from tests.connectors.mini_engine import BLOCK, FakePaged, FakeRequest, MiniEngine, Sides, engine_identity

CHUNK = 8
HEAD, ONE, TWO = list(range(100, 114)), list(range(200, 216)), list(range(300, 316))
WORDS: dict[str, Any] = {"segments": [["shared", 14], ["private", 16]], "round": "r7", "agent": "ada"}
WRONG = {"kvservice": {"segments": [["shared", 14], ["private", 17]]}}
UNSURE = {"kvservice": {**WORDS, "modes": {"private": "of"}}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


def make_request(params: Any = None, tokens: list[int] | None = None, name: str = "a") -> FakeRequest:
    return FakeRequest(name, tokens or HEAD + ONE, kv_transfer_params=params)


def words_of(params: Any, counts: Counts | None = None) -> RoundWords:
    return RoundParamsReader(counts or Counts()).of(make_request(params))


def chain_of(params: Any, **options: Any) -> ChunkChain:
    maker = ChainMaker([Namespace(b"1" * 32)], CHUNK, BLOCK, ExtrasReader({}), Counts())
    chain = maker(make_request(params, **options))
    assert chain is not None
    return chain


def ends_of(params: Any) -> list[int]:
    tracked = Tracked(make_request(params), chain_of(params), BLOCK)
    return [chunk.end for chunk in tracked.chunks_to_ask()]


def test_without_words_everything_is_as_before() -> None:
    for params in (None, {}, {"do_remote_decode": True}, {"kvservice_other_connector_of_a_long_name": 1}):
        assert words_of(params) == RoundWords()
        assert ends_of(params) == [8, 16, 24, 28]


def test_chunks_end_at_segment_boundaries_too() -> None:
    assert ends_of({"kvservice": WORDS}) == [8, 12, 20, 28]


def test_the_words_stay_with_the_tracked_request() -> None:
    tracked = Tracked(make_request(), chain_of({"kvservice": WORDS}), BLOCK)
    assert tracked.asked is not None
    assert (tracked.asked.round, tracked.asked.agent) == ("r7", "ada")
    assert tracked.asked.segments == ((PartKind.SHARED, 14), (PartKind.PRIVATE, 16))
    assert Tracked(make_request(), chain_of(None), BLOCK).asked is None


def test_what_is_off_is_in_no_chunk() -> None:
    assert ends_of({"kvservice": {**WORDS, "modes": {"private": "off"}}}) == [8, 12]
    assert ends_of({"kvservice": {**WORDS, "modes": {"shared": "off"}}}) == []
    later = {"kvservice": {"segments": [["private", 21], ["tool", 9]], "modes": {"tool": "off"}}}
    assert ends_of(later) == [8, 16, 20]
    chain = chain_of(later)
    chain.extend([1] * 100)
    assert chain.end == 20
    assert chain.tail(24) is None
    assert chain.tail(20) is None


def test_mistakes_get_exact_reuse_or_none_and_are_counted_and_told_once_a_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts = Counts()
    reader = RoundParamsReader(counts)
    with caplog.at_level(logging.WARNING, "vllm.kvservice"):
        for _ in range(3):
            assert reader.of(make_request(WRONG)) == RoundWords(None, None)
            assert reader.of(make_request(UNSURE)) == RoundWords(None, 0)
            assert reader.of(make_request({"kvservise": WORDS})) == RoundWords(None, 0)
    assert counts.total("round_params_refused") == 9
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert "gets plain exact reuse: kvservice: segments of 31 tokens for a prompt of 30; count them" in told[0]
    assert "gets no reuse: kvservice: of kind 'private': unknown mode 'of'; did you mean 'off'?" in told[1]
    assert "write 'kvservice'" in told[2]


@pytest.mark.parametrize("value", [5, "x", [], {"segments": [[]]}, {"modes": [1]}, {"segments": {"a": 1}}])
def test_nothing_that_a_user_writes_is_raised(value: Any) -> None:
    counts = Counts()
    assert words_of({"kvservice": value}, counts).request is None
    assert counts.total("round_params_refused") == 1


def run(service: Service, model: str, *asked: FakeRequest) -> Sides:
    """A new engine runs the requests one after the other; it checks every row."""
    paged = FakePaged(64)
    sides = Sides(f"unix:{service.addresses.socket}", paged, identity=engine_identity(model))
    engine = MiniEngine(sides, paged, blocks=64)
    for request in asked:
        engine.add(request)
        engine.run()
    assert sides.scheduler.leases_held == 0
    sides.close()
    assert sides.counts.total("hook_errors") == 0
    return sides


def test_prompts_that_agree_up_to_a_boundary_share_up_to_it(service: Service) -> None:
    words = {"kvservice": WORDS}
    run(service, "boundary", make_request(words))
    assert run(service, "boundary", make_request(words, HEAD + TWO)).counts.total("tokens_loaded") == 12
    run(service, "plain", make_request())
    assert run(service, "plain", make_request(None, HEAD + TWO)).counts.total("tokens_loaded") == 8


def test_what_is_off_is_neither_stored_nor_loaded(service: Service) -> None:
    off = {"kvservice": {**WORDS, "modes": {"private": "off"}}}
    first = run(service, "off", make_request(off), make_request(UNSURE, name="b"))
    assert first.counts.total("chunks_saved") == 2
    assert first.counts.total("round_params_refused") == 1
    second = run(service, "off", make_request(off))
    assert second.counts.total("tokens_loaded") == 12
    assert second.counts.total("chunks_saved") == 0


def test_wrong_lengths_get_what_no_words_get(service: Service) -> None:
    run(service, "wrong", make_request())
    second = run(service, "wrong", make_request(WRONG))
    assert second.counts.total("tokens_loaded") == 28
    assert second.counts.total("round_params_refused") == 1
