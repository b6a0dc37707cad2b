"""Marked text into token ids and segments: cut only where the model's own tokenizer cuts. Pure: no torch, no I/O.

The ids are always those of the whole text, so the model sees what it would see without us. A part that other prompts
hold too becomes a segment only if its ids in there are those that it has by itself and between other neighbours: so it
has the same segment id behind every history. Where that fails at an edge, the edge moves inwards to the nearest place
where it holds.
"""

import itertools
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

from kvservice.client.round_request import Mode, RoundRequest, Segment
from kvservice.client.rounds import CHUNK_TOKENS, PartKind, ReusePolicy, RoundPrompt
from kvservice.model.errors import InvalidInputError, TokenCountError
from kvservice.model.identity import Namespace

EDGE_MOVES_MAX: Final = 6
"""Places tried at each edge of a part before it is no segment. One is enough for a merged word or line break."""
EDGE_CHARS_MAX: Final = 96
"""How far from an edge places are looked for."""
TEXT_TOLD: Final = 24
"""Characters of a part that a note quotes."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer. ``is_fast`` and calling it for offsets are used where it has them."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Token ids of a text."""
        ...


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A part of a prompt's text and what it is to the other agents. ``kind`` None: words of a template, nobody's."""

    kind: PartKind | None
    text: str


@dataclass(frozen=True, slots=True)
class CutPrompt:
    """A prompt ready to be sent: its token ids, and its segments without gaps.

    ``notes``: what could not be cut where the caller said, one sentence each; empty if all could.
    """

    prompt_token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    notes: tuple[str, ...] = ()

    def round_prompt(
        self, namespace: Namespace, *, policy: ReusePolicy | None = None, chunk_tokens: int = CHUNK_TOKENS
    ) -> RoundPrompt:
        """The prompt in segments with ids, for a client that looks up and stores by itself."""
        return RoundPrompt.from_lengths(
            namespace, self.prompt_token_ids, self.segments, policy=policy, chunk_tokens=chunk_tokens
        )

    def kv_transfer_params(
        self,
        *,
        modes: Mapping[PartKind, Mode] | None = None,
        round_name: str = "",
        agent: str = "",
        expect: int = 0,
    ) -> dict[str, object]:
        """The object that goes to the API beside ``prompt_token_ids``. Raises RoundRequestError."""
        return RoundRequest(self.segments, modes or {}, round_name, agent, expect).to_params()


def split_marked(text: str, separator: str, kinds: Sequence[PartKind] | None = None) -> list[MarkedText]:
    """The parts between separators, which are removed. ``kinds``: one for every part, empty parts too; left out, the
    first part is PRIVATE and the rest SHARED.

    Raises InvalidInputError for an empty separator or one inside a word, TokenCountError when ``kinds`` do not fit.
    """
    if not separator:
        raise InvalidInputError("an empty separator would cut everywhere; give one that no text holds, such as <|cut|>")
    parts = text.split(separator)
    end = 0
    for before, after in itertools.pairwise(parts):
        end += len(before)
        if before and after and _is_inside_word(before[-1], after[0]):
            raise InvalidInputError(
                f"the separator at character {end} stands inside a word, {before[-12:] + separator + after[:12]!r}; "
                "put it beside a space or a line break"
            )
        end += len(separator)
    if kinds is None:
        kinds = [PartKind.PRIVATE, *[PartKind.SHARED] * (len(parts) - 1)]
    if len(kinds) != len(parts):
        raise TokenCountError(f"{len(kinds)} kinds for {len(parts)} parts; give one for each, empty ones too")
    return [MarkedText(kind, part) for kind, part in zip(kinds, parts, strict=True)]


def text_prompt(
    tokenizer: Tokenizer,
    text: str,
    separator: str,
    kinds: Sequence[PartKind] | None = None,
    *,
    add_special_tokens: bool = True,
) -> CutPrompt:
    """A prompt of plain text, cut at every ``separator`` (see ``split_marked``).

    ``add_special_tokens``: begin as the model's prompts begin; vLLM does the same to a text. Raises InvalidInputError.
    """
    return cut_parts(tokenizer, split_marked(text, separator, kinds), add_special_tokens=add_special_tokens)


def cut_parts(tokenizer: Tokenizer, parts: Sequence[MarkedText], *, add_special_tokens: bool = False) -> CutPrompt:
    """The parts' text as one prompt. Parts that could not be segments are part of the PRIVATE ones around them.

    Raises InvalidInputError for an empty text, or a tokenizer that adds tokens behind a text.
    """
    spans = _spans(parts)
    text = "".join(part.text for part in parts)
    ids = encode(tokenizer, text)
    before = _special_prefix(tokenizer, text, ids) if add_special_tokens else []
    if not ids and not before:
        raise InvalidInputError("a prompt needs at least one token; this text has none")
    cutter = _Cutter(tokenizer, text, ids)
    found = [(span.kind, place) for span in spans if (place := cutter.place(span)) is not None]
    segments = _without_gaps(found, len(ids))
    if before:
        segments = _prefixed(segments, len(before))
    return CutPrompt((*before, *ids), tuple(segments), tuple(cutter.notes))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text, without what the tokenizer would put around it."""
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


@dataclass(frozen=True, slots=True)
class _Span:
    """Characters of the text that are to be a segment."""

    kind: PartKind
    start: int
    end: int


def _spans(parts: Sequence[MarkedText]) -> list[_Span]:
    """What is to be a segment. PRIVATE parts need no place of their own: they are what remains.

    SYSTEM parts side by side are one: a record less.
    """
    spans: list[_Span] = []
    start = 0
    for kind, text in _without_glue([part for part in parts if part.text]):
        end = start + len(text)
        if kind is PartKind.SYSTEM and spans and spans[-1].kind is kind and spans[-1].end == start:
            spans[-1] = _Span(kind, spans[-1].start, end)
        elif kind is not PartKind.PRIVATE:
            spans.append(_Span(kind, start, end))
        start = end
    return spans


def _without_glue(parts: Sequence[MarkedText]) -> Iterator[tuple[PartKind, str]]:
    """A template's words join a SYSTEM part beside them, since they are as general; else they are PRIVATE."""
    for index, part in enumerate(parts):
        beside = [one.kind for one in parts[max(index - 1, 0) : index + 2]]
        glue = PartKind.SYSTEM if PartKind.SYSTEM in beside else PartKind.PRIVATE
        yield part.kind or glue, part.text


class _Cutter:
    """Finds the tokens of parts. ``notes`` grow as parts are found whose edges had to move."""

    def __init__(self, tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> None:
        self._text, self._ids = text, ids
        self._tokenizer = tokenizer
        self._token_at = token_places(tokenizer, text, ids)
        self._lefts = left_neighbours(tokenizer)
        self.notes: list[str] = []

    def place(self, span: _Span) -> tuple[int, int] | None:
        """First token of a part and the one behind its last; None if no place was found near its edges."""
        text = self._text[span.start : span.end]
        for run in settled_runs(self._tokenizer, text, self._lefts):
            first, last = self._token_at(span.start + run.start), self._token_at(span.start + run.end)
            if first is not None and last is not None and tuple(self._ids[first:last]) == run.ids:
                self._note_moves(span, run)
                return first, last
        self.notes.append(
            f"{self._name(span)} is no segment: its tokens depend on what stands around it; begin it with a word, and "
            "end it with one line break"
        )
        return None

    def _note_moves(self, span: _Span, run: "Run") -> None:
        text = self._text[span.start : span.end]
        before, behind = text[: run.start], text[run.end :]
        if before or behind:
            self.notes.append(
                f"{self._name(span)} is a segment without {before!r} at its start and {behind!r} at its end: their "
                "tokens depend on what stands beside; begin it with a word, and end it with one line break"
            )

    def _name(self, span: _Span) -> str:
        text = self._text[span.start : span.end]
        return f"the {span.kind.value} part {text[:TEXT_TOLD] + '...' * (len(text) > TEXT_TOLD)!r}"


@dataclass(frozen=True, slots=True)
class Run:
    """Characters ``[start, end)`` of a text, and their ids."""

    start: int
    end: int
    ids: tuple[int, ...]


def settled_runs(tokenizer: Tokenizer, text: str, lefts: Sequence[str]) -> Iterator[Run]:
    """What of a text has the same ids whatever may stand beside it; those that lose least first.

    They are found from the text alone, so that the first one is the same in every prompt. Beside it may stand: a turn's
    end, a line break, and a word if the text ends with a space or line break.
    """
    rights = ("", "A") if text[-1:].isspace() else ("", "\n")
    readings = [_Reading(tokenizer, left, text, right) for left in lefts for right in rights]
    starts = _cuttable(readings, range(len(text)))
    ends = _cuttable(readings, range(len(text), 0, -1))
    pairs = [(start, end) for start in starts for end in ends if start < end]
    for start, end in sorted(pairs, key=lambda pair: (pair[0] + len(text) - pair[1], pair[0])):
        found = {one.ids(start, end) for one in readings}
        if len(found) == 1 and (ids := found.pop()):
            yield Run(start, end, ids)


def left_neighbours(tokenizer: Tokenizer) -> tuple[str, ...]:
    """What may stand before a part. Some tokenizers put a mark before a text's first word: for them never nothing."""
    probe = encode(tokenizer, "a")
    return ("", "\n") if encode(tokenizer, "\na")[-len(probe) :] == probe else ("\n",)


class _Reading:
    """How a text is tokenised between two neighbours."""

    def __init__(self, tokenizer: Tokenizer, left: str, text: str, right: str) -> None:
        self._whole = encode(tokenizer, left + text + right)
        self._left = len(left)
        self._token_at = token_places(tokenizer, left + text + right, self._whole)

    def is_cuttable(self, place: int) -> bool:
        """True if a token begins or ends at a character of the text."""
        return self._token_at(self._left + place) is not None

    def ids(self, start: int, end: int) -> tuple[int, ...]:
        """Of the characters between two cuttable places."""
        return tuple(self._whole[self._token_at(self._left + start) : self._token_at(self._left + end)])


def _cuttable(readings: Sequence[_Reading], places: range) -> list[int]:
    near = places[:EDGE_CHARS_MAX]
    found = (place for place in near if all(one.is_cuttable(place) for one in readings))
    return list(itertools.islice(found, EDGE_MOVES_MAX))


def token_places(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> Callable[[int], int | None]:
    """What gives the index of the token that begins at a character; None where a token stands across it."""
    if getattr(tokenizer, "is_fast", False):
        return _places_by_offsets(tokenizer, text, ids)
    return _places_by_prefixes(tokenizer, text, ids)


def _places_by_offsets(tokenizer: Any, text: str, ids: Sequence[int]) -> Callable[[int], int | None]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if [int(token) for token in encoded["input_ids"]] != list(ids):
        raise InvalidInputError("the tokenizer gives other ids with offsets than without; give it with is_fast False")
    places: dict[int, int] = {0: 0}
    reached = 0
    for index, (start, end) in enumerate(encoded["offset_mapping"]):
        if start >= reached:  # characters without a token, trimmed ones say, belong to either side
            places.update(dict.fromkeys(range(reached, start + 1), index))
        reached = max(reached, end)
    places.update(dict.fromkeys(range(reached, len(text) + 1), len(ids)))
    return places.get


def _places_by_prefixes(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> Callable[[int], int | None]:
    """For every tokenizer, slow: what stands before the character has tokens of its own, and the whole has them.

    It finds fewer places: two line breaks before it may be one token only when nothing follows.
    """

    @lru_cache(maxsize=1024)
    def token_at(place: int) -> int | None:
        prefix = encode(tokenizer, text[:place])
        return len(prefix) if list(ids[: len(prefix)]) == prefix else None

    return token_at


def _special_prefix(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> list[int]:
    whole = [int(token) for token in tokenizer.encode(text, add_special_tokens=True)]
    count = len(whole) - len(ids)
    if count < 0 or whole[count:] != list(ids):
        raise InvalidInputError(
            "the tokenizer adds tokens behind a text, where an answer should begin; give add_special_tokens=False"
        )
    return whole[:count]


def _without_gaps(found: Sequence[tuple[PartKind, tuple[int, int]]], tokens: int) -> list[Segment]:
    """Segments in order, PRIVATE ones between them."""
    return [(kind, end - start) for kind, start, end in _filled(found, tokens) if end > start]


def _filled(found: Sequence[tuple[PartKind, tuple[int, int]]], tokens: int) -> Iterator[tuple[PartKind, int, int]]:
    at = 0
    for kind, (start, end) in found:
        yield PartKind.PRIVATE, at, start
        yield kind, start, end
        at = end
    yield PartKind.PRIVATE, at, tokens


def _prefixed(segments: Sequence[Segment], tokens: int) -> list[Segment]:
    """With so many tokens before them, in the first segment unless its id is to depend on its content alone."""
    if segments and segments[0][0] in (PartKind.PRIVATE, PartKind.SYSTEM):
        return [(segments[0][0], segments[0][1] + tokens), *segments[1:]]
    return [(PartKind.PRIVATE, tokens), *segments]


def _is_inside_word(before: str, after: str) -> bool:
    """Letters or digits on both sides, of a script with spaces between its words; or an accent behind the cut."""
    if unicodedata.category(after).startswith("M") or after == "\u200d":
        return True
    return all(one.isalnum() and unicodedata.category(one) != "Lo" for one in (before, after))
