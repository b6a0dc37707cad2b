"""Texts cut where the tokenizer cuts: the ids are the whole's, and a shared part has the same ones everywhere."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.client import PartKind
from kvservice.client.token_cuts import CutPrompt, MarkedText, cut_parts, split_marked, text_prompt
from kvservice.model.errors import InvalidInputError, TokenCountError
from tests.client.builders import make_identity
from tests.client.tokenizers import LLAMA3_SPLIT, TURN, SmallTokenizer, byte_bpe, marked_bpe

PRIVATE, SHARED, SYSTEM, TOOL = PartKind.PRIVATE, PartKind.SHARED, PartKind.SYSTEM, PartKind.TOOL
NAMESPACE = make_identity().namespace()
TEXT = "Bob said hi.\n\nThe sea was calm.\n\nAda: nothing new, 12 boats; Bob said hi.\n\né 東 🙂\n" * 3 + "\n"
CUT = "<|cut|>"
GPT2, LLAMA3, LLAMA2 = byte_bpe(TEXT), byte_bpe(TEXT, split=LLAMA3_SPLIT), marked_bpe(TEXT)
TOKENIZERS = {
    f"{name}{' slow' * (not is_fast)}": SmallTokenizer(inner, is_fast=is_fast)
    for name, inner in (("gpt2", GPT2), ("llama3", LLAMA3), ("llama2", LLAMA2))
    for is_fast in (True, False)
}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)

words = st.lists(st.sampled_from(["Bob", " said", " hi", ".", "\n", "\n\n", " ", "  ", "12", "é", "東", "🙂", ";"]))
texts = words.map("".join)
parts = st.lists(st.builds(MarkedText, st.sampled_from([*PartKind, None]), texts), min_size=1, max_size=6)


def pieces(prompt: CutPrompt) -> list[tuple[PartKind, list[int]]]:
    ends = list(itertools.accumulate(tokens for _, tokens in prompt.segments))
    together = zip(prompt.segments, [0, *ends], ends, strict=False)
    return [(kind, list(prompt.prompt_token_ids[start:end])) for (kind, _), start, end in together]


def said(tokenizer: SmallTokenizer, prompt: CutPrompt) -> list[tuple[PartKind, str]]:
    return [(kind, tokenizer.inner.decode(ids, skip_special_tokens=False)) for kind, ids in pieces(prompt)]


def cut(tokenizer: SmallTokenizer, *parts: tuple[PartKind | None, str]) -> CutPrompt:
    return cut_parts(tokenizer, [MarkedText(kind, text) for kind, text in parts])


@every_tokenizer
@given(marked=parts)
def test_the_ids_are_those_of_the_whole_text_and_segments_cover_them(name: str, marked: Sequence[MarkedText]) -> None:
    tokenizer, text = TOKENIZERS[name], "".join(part.text for part in marked)
    whole = tokenizer.encode(text, add_special_tokens=False)
    if not whole:
        with pytest.raises(InvalidInputError, match="at least one token"):
            cut_parts(tokenizer, marked)
        return
    prompt = cut_parts(tokenizer, marked)
    assert list(prompt.prompt_token_ids) == whole
    assert sum(tokens for _, tokens in prompt.segments) == len(whole)
    assert all(tokens > 0 for _, tokens in prompt.segments)
    assert len(prompt.notes) <= len([part for part in marked if part.kind is not PRIVATE])


@every_tokenizer
@given(before=texts, content=texts.filter(str.strip), behind=texts)
def test_a_shared_segment_has_the_same_ids_wherever_its_text_is_one(
    name: str, before: str, content: str, behind: str
) -> None:
    tokenizer = TOKENIZERS[name]
    around = [(before, behind), ("Ada:\n", "\nso"), ("said", ""), ("\n\n", "Bob"), ("", "\n\n")]
    found: dict[str, set[tuple[int, ...]]] = {}
    for left, right in around:
        prompt = cut(tokenizer, (PRIVATE, left), (SHARED, content), (PRIVATE, right))
        for kind, ids in pieces(prompt):
            if kind is SHARED:
                text = tokenizer.inner.decode(ids)
                assert text in content
                found.setdefault(text, set()).add(tuple(ids))
    assert all(len(ids) == 1 for ids in found.values())


@every_tokenizer
def test_parts_in_lines_of_their_own_are_cut_where_they_are_marked(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    outputs = ["Bob said hi.\n", "The sea was calm.\n", "Ada: nothing new, 12 boats;\n"]
    found = []
    for history in ("Bob is here.\n", "Ada is here; she has 12 boats.\nThe sea said\n"):
        shared = [(SHARED, text) for text in outputs]
        prompt = cut(tokenizer, (PRIVATE, history), *shared, (PRIVATE, "Ada said"))
        assert prompt.notes == ()
        assert [kind for kind, _ in prompt.segments] == [PRIVATE, SHARED, SHARED, SHARED, PRIVATE]
        found.append([one.id for one in prompt.round_prompt(NAMESPACE).segments if one.kind is SHARED])
    assert found[0] == found[1]


def test_where_a_word_stands_across_an_edge_the_edge_moves_behind_it_and_that_is_said() -> None:
    for is_fast in (True, False):
        tokenizer = SmallTokenizer(GPT2, is_fast=is_fast)
        prompt = cut(tokenizer, (PRIVATE, "Bob sa"), (SHARED, "id hi"), (PRIVATE, "."))
        assert said(tokenizer, prompt) == [(PRIVATE, "Bob said"), (SHARED, " hi"), (PRIVATE, ".")]
        (note,) = prompt.notes
        assert "the shared part 'id hi' is a segment without 'id' at its start and '' at its end" in note


def test_line_breaks_that_are_one_with_a_full_stop_move_the_end() -> None:
    tokenizer = SmallTokenizer(LLAMA3)
    prompt = cut(tokenizer, (PRIVATE, "Ada:\n"), (SHARED, "Bob said hi."), (PRIVATE, "\n\nAda"))
    assert said(tokenizer, prompt) == [(PRIVATE, "Ada:\n"), (SHARED, "Bob said hi"), (PRIVATE, ".\n\nAda")]
    assert "'.' at its end" in prompt.notes[0]
    assert cut(tokenizer, (PRIVATE, "Ada:\n"), (SHARED, "Bob said hi.\n\n"), (PRIVATE, "Ada")).notes == ()


def test_what_is_cut_off_does_not_depend_on_what_stands_beside() -> None:
    """Two line breaks at the end are one token before a turn's end and two before a word: neither is in the segment."""
    tokenizer = SmallTokenizer(GPT2)
    found = [
        said(tokenizer, cut(tokenizer, (PRIVATE, "Ada:\n"), (SHARED, "Bob said hi.\n\n"), (None, behind)))[1]
        for behind in ("Ada", "", TURN)
    ]
    assert found == [(SHARED, "Bob said hi.")] * 3


def test_a_part_without_a_place_is_no_segment_and_that_is_said() -> None:
    tokenizer = SmallTokenizer(GPT2)
    prompt = cut(tokenizer, (PRIVATE, "Bob s"), (SHARED, "ai"), (PRIVATE, "d hi"))
    assert [kind for kind, _ in prompt.segments] == [PRIVATE]
    assert "the shared part 'ai' is no segment" in prompt.notes[0]


def test_a_templates_words_join_system_parts_and_are_private_elsewhere() -> None:
    tokenizer = SmallTokenizer(GPT2)
    prompt = cut(
        tokenizer,
        (None, "Ada:\n"),
        (SYSTEM, "Bob"),
        (None, "\n12\n"),
        (TOOL, "hi"),
        (None, "\n;\n"),
        (PRIVATE, "The sea"),
    )
    assert said(tokenizer, prompt) == [(SYSTEM, "Ada:\nBob\n12\n"), (TOOL, "hi"), (PRIVATE, "\n;\nThe sea")]


def test_separators_cut_and_are_removed() -> None:
    assert split_marked(f"one {CUT}two{CUT} three", CUT) == [
        MarkedText(PRIVATE, "one "),
        MarkedText(SHARED, "two"),
        MarkedText(SHARED, " three"),
    ]
    tokenizer = SmallTokenizer(GPT2)
    prompt = text_prompt(
        tokenizer, f"Ada:\n{CUT}Bob said hi.\n{CUT}{CUT}The sea", CUT, [PRIVATE, SHARED, TOOL, PRIVATE]
    )
    assert said(tokenizer, prompt) == [(PRIVATE, "Ada:\n"), (SHARED, "Bob said hi.\n"), (PRIVATE, "The sea")]
    assert list(prompt.prompt_token_ids) == tokenizer.encode("Ada:\nBob said hi.\nThe sea")


@pytest.mark.parametrize("text", ["har{}bour", "12{}3", "a{}1", "Зи{}мой", "cafe{}\u0301", "अ{}\u093e"])
def test_a_separator_inside_a_word_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="stands inside a word"):
        split_marked("Well " + text.format(CUT), CUT)


@pytest.mark.parametrize(
    "text", ["harbour {}bell", "harbour{} bell", "one.{}Two", "港{}口", "{}bell", "bell{}", "a\n{}b"]
)
def test_a_separator_beside_words_is_none_inside(text: str) -> None:
    assert "".join(part.text for part in split_marked(text.format(CUT), CUT)) == text.format("")


def test_separators_and_kinds_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="empty separator"):
        split_marked("text", "")
    with pytest.raises(TokenCountError, match="1 kinds for 2 parts"):
        split_marked(f"one {CUT}two", CUT, [PRIVATE])


def test_what_the_model_begins_with_is_in_the_prompt_and_in_no_shared_segment() -> None:
    tokenizer = SmallTokenizer(GPT2)
    tokenizer.before = [899]
    prompt = text_prompt(tokenizer, f"{CUT}Bob said hi.\n", CUT)
    assert prompt.prompt_token_ids[0] == 899
    assert [kind for kind, _ in prompt.segments] == [PRIVATE, SHARED]
    assert prompt.segments[0] == (PRIVATE, 1)
    assert text_prompt(tokenizer, f"Ada\n{CUT}Bob", CUT).segments[0][1] == len(tokenizer.encode("Ada\n"))
    assert text_prompt(tokenizer, f"Ada\n{CUT}Bob", CUT, add_special_tokens=False).prompt_token_ids[0] != 899
    tokenizer.behind = [898]
    with pytest.raises(InvalidInputError, match="adds tokens behind a text"):
        text_prompt(tokenizer, "Bob", CUT)


def test_offsets_of_other_ids_are_refused() -> None:
    class Odd(SmallTokenizer):
        def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
            return {"input_ids": [1], "offset_mapping": [0]}

    with pytest.raises(InvalidInputError, match="other ids with offsets"):
        cut(Odd(GPT2), (SHARED, "Bob said hi."))


def test_what_goes_to_the_api_is_the_same_prompt() -> None:
    prompt = cut(SmallTokenizer(GPT2), (PRIVATE, "Ada:\n"), (SHARED, "Bob said hi.\n"))
    params = prompt.kv_transfer_params(round_name="r7", agent="ada", expect=2)
    assert params == {
        "kvservice": {
            "round": "r7",
            "agent": "ada",
            "expect": 2,
            "segments": [[kind.value, tokens] for kind, tokens in prompt.segments],
        }
    }
    assert prompt.round_prompt(NAMESPACE).tokens == prompt.prompt_token_ids
