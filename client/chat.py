"""Chat messages into token ids and segments, with the model's own chat template and tokenizer. Imports neither.

Where a part lies in the rendered text is found by marks in its place: the template is rendered twice, with marks and
without, and what is sent is the text without. A template whose words change with the marks is refused.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvservice.client.outputs import Output, canonical_order
from kvservice.client.round_request import part_kind
from kvservice.client.rounds import PartKind
from kvservice.client.token_cuts import (
    CutPrompt,
    MarkedText,
    Tokenizer,
    cut_parts,
    split_marked,
    text_prompt,
)
from kvservice.model.errors import InvalidInputError

__all__ = [
    "ChatTokenizer",
    "CutPrompt",
    "MarkedText",
    "Message",
    "Output",
    "canonical_order",
    "chat_prompt",
    "split_marked",
    "text_prompt",
]

_MARKS: Final = range(0xF0000, 0xF0100)
"""Characters for private use; the first two that no text holds become marks."""
_KIND_OF_ROLE: Final = {"system": PartKind.SYSTEM, "developer": PartKind.SYSTEM, "tool": PartKind.TOOL}


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer with a chat template."""

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any:
        """The messages as the model reads them: a text, with ``tokenize`` False."""
        ...


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``parts``: its content in order, nothing between them. ``extra``: other fields, such as ``name``."""

    role: str
    parts: tuple[MarkedText, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("role", "content"):
            if name in self.extra:
                raise InvalidInputError(f"a message's extra fields hold {name!r}; give it as role or parts instead")

    @classmethod
    def of(cls, given: Mapping[str, object]) -> "Message":
        """A message as the OpenAI API has it; a text part may say its kind: ``{"type": "text", "text": ..., "kind":
        "shared"}``. What says none is SYSTEM or TOOL in messages of that role, and PRIVATE in others.

        Raises InvalidInputError for parts other than text, and for unknown kinds.
        """
        role, content = given.get("role"), given.get("content")
        if not isinstance(role, str):
            raise InvalidInputError(f"a message has role {role!r}; give a text such as 'user'")
        usual = _KIND_OF_ROLE.get(role, PartKind.PRIVATE)
        extra = {name: value for name, value in given.items() if name not in ("role", "content")}
        if content is None or isinstance(content, str):
            return cls(role, (MarkedText(usual, content),) if content else (), extra)
        if not isinstance(content, list | tuple):
            raise InvalidInputError(f"a message's content is {type(content).__name__}; give a text or a list of parts")
        return cls(role, tuple(_part(one, usual) for one in content), extra)


def chat_prompt(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **template_options: object,
) -> CutPrompt:
    """The prompt of a chat. The template's own words belong to the SYSTEM part beside them, or to nobody (PRIVATE).

    ``template_options``: for ``apply_chat_template``, such as ``tools``. Raises InvalidInputError when the template
    leaves out, repeats or changes a part.
    """
    options = {**template_options, "tokenize": False, "add_generation_prompt": add_generation_prompt}
    opening, closing = _free_marks(messages)
    plain = _render(tokenizer, messages, None, options)
    for is_inside in (False, True):
        marked = _render(tokenizer, messages, _Marks(opening, closing, is_inside), options)
        parts = list(_parts_of(marked, messages, opening, closing))
        if "".join(part.text for part in parts) == plain:
            return cut_parts(tokenizer, parts)
    raise InvalidInputError(
        "the chat template changes the messages' text, so that parts cannot be found in it; render it yourself, and "
        "give its pieces to kvservice.client.token_cuts.cut_parts"
    )


@dataclass(frozen=True, slots=True)
class _Marks:
    """Put around parts: ``<opening>3<closing>text<closing>3<opening>``.

    ``is_inside``: at a message's edges inside its spaces, for templates that trim those away.
    """

    opening: str
    closing: str
    is_inside: bool

    def around(self, index: int, text: str, *, is_first: bool, is_last: bool) -> str:
        """The part with its marks."""
        start = len(text) - len(text.lstrip()) if self.is_inside and is_first else 0
        end = len(text.rstrip()) if self.is_inside and is_last else len(text)
        before, after = f"{self.opening}{index}{self.closing}", f"{self.closing}{index}{self.opening}"
        return text[:start] + before + text[start:end] + after + text[end:]


def _render(
    tokenizer: ChatTokenizer, messages: Sequence[Message], marks: _Marks | None, options: Mapping[str, Any]
) -> str:
    numbers = itertools.count()
    conversation = [
        {"role": message.role, "content": _content(message, marks, numbers), **message.extra} for message in messages
    ]
    rendered = tokenizer.apply_chat_template(conversation, **options)
    if not isinstance(rendered, str):
        raise InvalidInputError(f"the chat template gave {type(rendered).__name__} where a text was asked for")
    return rendered


def _content(message: Message, marks: _Marks | None, numbers: Iterator[int]) -> str:
    parts = _marked(message)
    if marks is None or not parts:
        return "".join(part.text for part in message.parts)
    last = len(parts) - 1
    return "".join(
        marks.around(next(numbers), part.text, is_first=index == 0, is_last=index == last)
        for index, part in enumerate(parts)
    )


def _marked(message: Message) -> list[MarkedText]:
    """The parts to be found again; none of a message of spaces only, which templates may trim to nothing."""
    is_blank = not any(part.text.strip() for part in message.parts)
    return [] if is_blank else [part for part in message.parts if part.text]


def _parts_of(rendered: str, messages: Sequence[Message], opening: str, closing: str) -> Iterator[MarkedText]:
    """The rendered text in parts, marks removed: the template's words between the messages' parts."""
    asked = [part for message in messages for part in _marked(message)]
    found = list(re.finditer(f"{opening}(\\d+){closing}(.*?){closing}\\1{opening}", rendered, re.DOTALL))
    if sorted(int(one[1]) for one in found) != list(range(len(asked))):
        lost = set(range(len(asked))) - {int(one[1]) for one in found}
        what = f"leaves out {asked[min(lost)].text[:40]!r}" if lost else "repeats a part"
        raise InvalidInputError(f"the chat template {what}; leave it out of the messages, or cut the rendered text")
    at = 0
    for one in found:
        yield MarkedText(None, rendered[at : one.start()])
        yield MarkedText(asked[int(one[1])].kind, one[2])
        at = one.end()
    yield MarkedText(None, rendered[at:])


def _free_marks(messages: Sequence[Message]) -> tuple[str, str]:
    held = {letter for message in messages for part in message.parts for letter in part.text}
    free = [mark for mark in map(chr, _MARKS) if mark not in held]
    if len(free) < 2:
        raise InvalidInputError("the messages hold all private characters U+F0000 to U+F00FF; leave one pair out")
    return free[0], free[1]


def _part(given: object, usual: PartKind) -> MarkedText:
    if not isinstance(given, Mapping) or given.get("type", "text") != "text" or not isinstance(given.get("text"), str):
        raise InvalidInputError(f"a part is {given!r}; only texts can be cut: {{'type': 'text', 'text': '...'}}")
    unknown = sorted(set(given) - {"type", "text", "kind"})
    if unknown:
        raise InvalidInputError(f"a text part holds {unknown[0]!r}; it takes type, text and kind")
    return MarkedText(part_kind(given.get("kind", usual.value)), given["text"])
