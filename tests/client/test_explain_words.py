"""`kvservice explain --request`: a round's words cut a prompt, and let it be reused, as they do in the connector."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.__main__ import main
from kvservice.app import Service
from kvservice.client import Client, PartKind, ReusePolicy, RoundPrompt
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.request_extras import ExtrasReader
from kvservice.client.connectors.vllm.requests import ChainMaker
from kvservice.client.explain_command import Question, read_words
from kvservice.model.errors import InvalidInputError
from tests.client.builders import Engine, make_identity, make_settings, make_tokens

IDENTITY = make_identity()
TOKENS = make_tokens(40)
REUSE = {"mode": "reuse", "selector": "hkvd", "ratio": 0.05}
EXACT_WORDS = {"segments": [["private", 13], ["shared", 20], ["private", 7]]}
REUSE_WORDS = EXACT_WORDS | {"modes": {"shared": REUSE}}
OFF_WORDS = EXACT_WORDS | {"modes": {"shared": "off"}}


def words_file(folder: Path, words: Any, **around: Any) -> str:
    (folder / "request.json").write_text(json.dumps({"kvservice": words} | around))
    return str(folder / "request.json")


def question(folder: Path, words: Any, **changes: Any) -> Question:
    asked = read_words(words_file(folder, words), len(TOKENS))
    return Question(IDENTITY, TOKENS, **({"chunk_tokens": 8, "block_size": 4, "words": asked} | changes))


def cuts(question: Question, index: int = 0) -> list[tuple[int, int]]:
    query = question.queries()[index](IDENTITY.namespace())
    return [(one.position, one.tokens) for one in query.segments]


@pytest.mark.parametrize("words", [EXACT_WORDS, REUSE_WORDS, OFF_WORDS])
@pytest.mark.parametrize("salt", ["", "pepper"])
def test_chunks_are_those_that_the_connector_asks_for(words: Any, salt: str, tmp_path: Path) -> None:
    maker = ChainMaker([IDENTITY.namespace()], 8, 4, ExtrasReader({}), Counts())
    request = SimpleNamespace(
        request_id="r", prompt_token_ids=TOKENS, kv_transfer_params={"kvservice": words}, cache_salt=salt or None
    )
    chain = maker(request)
    assert chain is not None
    chunks = chain.extend(TOKENS)
    tail = chain.tail(len(TOKENS))
    query = question(tmp_path, words, salt=salt).queries()[0](IDENTITY.namespace())
    expected = [*chunks, *([] if tail is None else [tail])]
    assert [one.segment for one in query.segments] == [one.keys[0].segment for one in expected]
    assert [one.accepted_contexts[0] for one in query.segments] == [one.keys[0].context for one in expected]


def test_chunks_end_at_boundaries_rounded_down_to_blocks(tmp_path: Path) -> None:
    assert cuts(question(tmp_path, EXACT_WORDS)) == [(0, 8), (8, 4), (12, 8), (20, 8), (28, 4), (32, 8)]
    assert cuts(Question(IDENTITY, TOKENS, 8, 4)) == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8)]
    assert cuts(question(tmp_path, OFF_WORDS)) == [(0, 8), (8, 4)]


def test_segments_that_may_come_from_elsewhere_are_asked_for_too(tmp_path: Path) -> None:
    asked = question(tmp_path, REUSE_WORDS)
    assert cuts(asked) == [(0, 8), (8, 4)]
    assert cuts(asked, 1) == [(0, 13), (13, 20), (33, 7)]
    (_, shared, _) = asked.queries()[1](IDENTITY.namespace()).segments
    assert shared.may_shift
    assert len(question(tmp_path, REUSE_WORDS, salt="pepper").queries()) == 1, "who has a salt is not reused"


def test_a_prompt_of_one_shared_segment_has_no_chunks(tmp_path: Path) -> None:
    words = {"segments": [["shared", 40]], "modes": {"shared": REUSE}}
    assert len(question(tmp_path, words).queries()) == 1
    assert cuts(question(tmp_path, words)) == [(0, 40)]


def test_words_are_read_from_a_whole_request_and_wrong_ones_are_told(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"model": "m", "kv_transfer_params": {"kvservice": EXACT_WORDS}}))
    found = read_words(str(body), 40)
    assert found is not None
    assert found.boundaries == (13, 33)
    body.write_text('{"model": "m"}')
    assert read_words(str(body), 40) is None
    for text, words in (("[1]", "JSON object"), ("{", "no JSON"), ('{"kvservice": {"segments": []}}', "segments")):
        body.write_text(text)
        with pytest.raises(InvalidInputError, match=words):
            read_words(str(body), 40)
    with pytest.raises(InvalidInputError, match="prompt of 41"):
        read_words(words_file(tmp_path, EXACT_WORDS), 41)


def test_both_answers_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = make_settings(tmp_path)
    (tmp_path / "identity").write_text(IDENTITY.canonical_json())
    (tmp_path / "tokens").write_text(json.dumps(TOKENS))
    with Service(settings):
        with Client.connect(f"unix:{settings.socket}", IDENTITY) as client:
            parts = [(PartKind.PRIVATE, make_tokens(5, 9)), (PartKind.SHARED, TOKENS[13:33])]
            prompt = RoundPrompt.from_parts(IDENTITY.namespace(), parts, policy=ReusePolicy("hkvd:0.05", 1))
            engine = Engine(IDENTITY.geometry)
            client.store(prompt, engine.planes, engine.allocate(prompt.token_count))
        command = ["explain", "--socket", settings.socket, "--identity", str(tmp_path / "identity"), "--tokens",
                   str(tmp_path / "tokens"), "--chunk-tokens", "8", "--block-size", "4", "--request",
                   words_file(tmp_path, REUSE_WORDS)]  # fmt: skip
        assert main(command) == 1
        printed = capsys.readouterr().out
        assert main([*command, "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
    exact, _, reused = printed.partition("its segments, which may come from other contexts:")
    assert "of 12 tokens; it ends before segment 0" in exact
    assert "segment 1, tokens 13-33: found behind other tokens, from position 5" in reused
    assert [one["reason"] for one in document["reused"][0]["segments"]][1] == "FOUND"
