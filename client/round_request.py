"""What a request says of its round: segments of its prompt and how each kind is reused, as JSON beside the prompt.

    {"kvservice": {"round": "r7", "agent": "ada", "expect": 4,
                   "segments": [["system", 40], ["private", 126], ["shared", 105], ["private", 9]],
                   "modes": {"shared": {"mode": "reuse", "selector": "hkvd", "ratio": 0.05}, "tool": "off"}}}

It travels in ``kv_transfer_params`` of vLLM's API, beside what other connectors put there. Reading is strict: whatever
is not understood is an error that says what to do. Pure: no torch, no engine, no I/O.
"""

import enum
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from typing import Final

from kvservice.client.rounds import PartKind
from kvservice.model.errors import InvalidInputError
from kvservice.model.segment import SEGMENT_TOKENS_MAX

KEY: Final = "kvservice"
SEGMENTS_MAX: Final = 1024
"""Segments of one prompt."""
NAME_CHARS_MAX: Final = 128
"""Characters of a round's or an agent's name."""
PROMPTS_MAX: Final = 1024
"""Prompts of one round."""
ROWS_MAX: Final = 1 << 20
RATIO_DECIMALS_MAX: Final = 6

_FIELDS: Final = ("round", "agent", "expect", "segments", "modes", "opening")
_SELECTORS: Final[dict[str, tuple[str, ...]]] = {
    "hkvd": ("ratio",),
    "blocks": ("ratio", "rows"),
    "mixed": ("ratio", "rows"),
    "head": ("rows",),
    "none": (),
}
_SELECTOR_FORMS: Final = (
    '{"selector": "hkvd", "ratio": 0.05}, {"selector": "blocks", "ratio": 0.05, "rows": 32}, '
    '{"selector": "mixed", "ratio": 0.01, "rows": 4}, '
    '{"selector": "head", "rows": 8} or {"selector": "none"}'
)


class Mistake(enum.Enum):
    """What kind of mistake a request holds, so that each is told once."""

    NOT_AN_OBJECT = "not an object"
    UNKNOWN_NAME = "unknown name"
    MODE = "mode"
    SELECTOR = "selector"
    SEGMENT = "segment"
    LENGTHS = "lengths"
    NAME = "round or agent"


class RoundRequestError(InvalidInputError):
    """A request's words about its round are wrong.

    ``may_reuse``: True if it is certain nevertheless that no segment is to be kept out of the store, so that the prompt
    may be reused like one of which nothing is said.
    """

    def __init__(self, mistake: Mistake, message: str, *, may_reuse: bool = False) -> None:
        super().__init__(f"{KEY}: {message}")
        self.mistake = mistake
        self.may_reuse = may_reuse


class Plain(enum.Enum):
    """Modes without a selector."""

    EXACT = "exact"
    """Reused where everything before it is the same, and nowhere else: for prompts that must not be perturbed."""
    OFF = "off"
    """Neither looked up nor stored. What stands behind it is not either, since its key depends on it."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Reused at other positions and in other contexts too; ``selector`` says which rows are computed again.

    ``ratio``: share of the rows, for hkvd, blocks and mixed. ``rows``: of a block, or of a head.
    Raises RoundRequestError.
    """

    selector: str
    ratio: float | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.selector not in _SELECTORS:
            raise RoundRequestError(
                Mistake.SELECTOR, f"{_unknown('selector', self.selector, _SELECTORS)}; give {_SELECTOR_FORMS}"
            )
        needed = _SELECTORS[self.selector]
        given = [name for name in ("ratio", "rows") if getattr(self, name) is not None]
        if sorted(given) != sorted(needed):
            words = " and ".join(needed) or "nothing else"
            raise RoundRequestError(
                Mistake.SELECTOR, f"selector {self.selector!r} takes {words}; give {_SELECTOR_FORMS}"
            )
        _check_ratio(self.ratio)
        _check_rows(self.rows, least=int(self.selector in ("blocks", "mixed")))

    @property
    def text(self) -> str:
        """The selector's canonical text, such as ``hkvd:0.05``: part of the provenance of what it refreshes."""
        ratio = () if self.ratio is None else (_ratio_text(self.ratio),)
        rows = () if self.rows is None else (str(self.rows),)
        return ":".join((self.selector, *ratio, *rows))


Mode = Plain | Reuse
Segment = tuple[PartKind, int]


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """The words of one request. ``segments``: kind and number of tokens, in the prompt's order, without gaps.

    ``modes``: by kind; a kind that is not there is EXACT. ``round`` and ``agent``: which prompts belong together and
    whose this is, both or neither. ``expect``: how many prompts the round has; 0: nobody knows. ``opening``: how many
    of the last segment's tokens begin what the agent says: later prompts hold them and the output as one segment.
    Immutable; threads may share it. Raises RoundRequestError.
    """

    segments: tuple[Segment, ...]
    modes: Mapping[PartKind, Mode] = field(default_factory=dict)
    round: str = ""
    agent: str = ""
    expect: int = 0
    opening: int = 0

    def __post_init__(self) -> None:
        may_reuse = Plain.OFF not in self.modes.values()
        _check_names(self.round, self.agent, may_reuse=may_reuse)
        _check_expect(self.expect, self.round, may_reuse=may_reuse)
        if not 0 < len(self.segments) <= SEGMENTS_MAX:
            text = f"{len(self.segments)} segments; give 1 to {SEGMENTS_MAX}, joining neighbours of one kind"
            raise RoundRequestError(Mistake.SEGMENT, text, may_reuse=may_reuse)
        for kind, tokens in self.segments:
            if not 0 < tokens <= SEGMENT_TOKENS_MAX:
                text = (
                    f"a {kind.value} segment of {tokens} tokens; give 1 to {SEGMENT_TOKENS_MAX}, leave out empty ones"
                )
                raise RoundRequestError(Mistake.LENGTHS, text, may_reuse=may_reuse)
        if not 0 <= self.opening <= self.segments[-1][1]:
            text = f"an opening of {self.opening} tokens; give 0 to the last segment's {self.segments[-1][1]}"
            raise RoundRequestError(Mistake.LENGTHS, text, may_reuse=may_reuse)

    @classmethod
    def from_params(cls, params: object, prompt_tokens: int) -> "RoundRequest | None":
        """What ``kv_transfer_params`` say of a prompt of so many tokens; None if they say nothing to us.

        Raises RoundRequestError, also when a key is nearly ours.
        """
        if not isinstance(params, Mapping):
            return None
        if KEY not in params:
            near = [name for name in params if isinstance(name, str) and get_close_matches(name, [KEY], 1, 0.8)]
            if near:
                raise RoundRequestError(Mistake.UNKNOWN_NAME, f"kv_transfer_params hold {near[0]!r}; write {KEY!r}")
            return None
        request = cls._read(params[KEY])
        request.check_prompt(prompt_tokens)
        return request

    def to_params(self) -> dict[str, object]:
        """The object for ``kv_transfer_params``; ``from_params`` makes an equal request of it."""
        ours: dict[str, object] = {"segments": [[kind.value, tokens] for kind, tokens in self.segments]}
        if self.round:
            ours |= {"round": self.round, "agent": self.agent}
        if self.expect:
            ours["expect"] = self.expect
        if self.opening:
            ours["opening"] = self.opening
        if self.modes:
            ours["modes"] = {kind.value: _mode_json(mode) for kind, mode in self.modes.items()}
        return {KEY: ours}

    def check_prompt(self, tokens: int) -> None:
        """Raise RoundRequestError unless the segments make a prompt of so many tokens."""
        if self.tokens != tokens:
            text = (
                f"segments of {self.tokens} tokens for a prompt of {tokens}; count them in the token ids sent, "
                "with what the chat template adds"
            )
            raise RoundRequestError(Mistake.LENGTHS, text, may_reuse=self.off_from is None)

    def mode(self, kind: PartKind) -> Mode:
        """How segments of this kind are reused."""
        return self.modes.get(kind, Plain.EXACT)

    @property
    def tokens(self) -> int:
        """Of all segments together."""
        return sum(tokens for _, tokens in self.segments)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Positions between segments, rising; neither 0 nor the prompt's end is one."""
        return tuple(itertools.accumulate(tokens for _, tokens in self.segments))[:-1]

    @property
    def off_from(self) -> int | None:
        """Position of the first token that is neither looked up nor stored; None if there is none."""
        starts = zip(self.segments, (0, *self.boundaries), strict=True)
        return next((start for (kind, _), start in starts if self.mode(kind) is Plain.OFF), None)

    @classmethod
    def _read(cls, given: object) -> "RoundRequest":
        """Names and modes first: only once they are known is it certain what may be reused."""
        ours = _object(given, f'give an object such as {{"{KEY}": {{"segments": [["private", 120], ["shared", 64]]}}}}')
        for name in ours:
            if name not in _FIELDS:
                raise RoundRequestError(Mistake.UNKNOWN_NAME, _unknown("name", name, _FIELDS))
        modes = _read_modes(ours.get("modes", {}))
        may_reuse = Plain.OFF not in modes.values()
        segments = _read_segments(ours.get("segments"), may_reuse=may_reuse)
        names = [ours.get(name, "") for name in ("round", "agent")]
        for name in names:
            if not isinstance(name, str):
                text = f"round and agent are texts, {name!r} is none; write it in quotes"
                raise RoundRequestError(Mistake.NAME, text, may_reuse=may_reuse)
        expect, opening = ours.get("expect", 0), ours.get("opening", 0)
        if type(expect) is not int:
            text = f"expect is {expect!r}; give the number of prompts in the round, without quotes"
            raise RoundRequestError(Mistake.NAME, text, may_reuse=may_reuse)
        if type(opening) is not int:
            text = f"opening is {opening!r}; give a number of tokens, without quotes"
            raise RoundRequestError(Mistake.LENGTHS, text, may_reuse=may_reuse)
        return cls(segments, modes, str(names[0]), str(names[1]), expect, opening)


def part_kind(given: object, mistake: Mistake = Mistake.SEGMENT, *, may_reuse: bool = False) -> PartKind:
    """The kind that a text names. Raises RoundRequestError, with the nearest name."""
    known = {kind.value: kind for kind in PartKind}
    if not isinstance(given, str) or given not in known:
        raise RoundRequestError(mistake, _unknown("kind", given, known), may_reuse=may_reuse)
    return known[given]


def _object(given: object, advice: str) -> Mapping[object, object]:
    if not isinstance(given, Mapping):
        raise RoundRequestError(Mistake.NOT_AN_OBJECT, f"{given!r} is no object; {advice}")
    return given


def _read_modes(given: object) -> dict[PartKind, Mode]:
    modes = _object(given, 'give modes by kind, such as {"shared": "exact"}')
    return {part_kind(kind, Mistake.MODE): _read_mode(kind, mode) for kind, mode in modes.items()}


def _read_mode(kind: object, given: object) -> Mode:
    known = ("exact", "reuse", "off")
    rest = dict(given) if isinstance(given, Mapping) else {"mode": given}
    name = rest.pop("mode", "reuse")
    if name not in known:
        raise RoundRequestError(Mistake.MODE, f"of kind {kind!r}: {_unknown('mode', name, known)}")
    if name == "reuse":
        return _read_reuse(rest)
    if rest:
        raise RoundRequestError(
            Mistake.MODE, f"mode {name!r} of kind {kind!r} takes no {next(iter(rest))!r}; leave it out"
        )
    return Plain(name)


def _read_reuse(given: Mapping[object, object]) -> Reuse:
    for name in given:
        if name not in ("selector", "ratio", "rows"):
            text = _unknown("name", name, ("mode", "selector", "ratio", "rows"))
            raise RoundRequestError(Mistake.SELECTOR, f"in a mode: {text}")
    selector, ratio, rows = given.get("selector"), given.get("ratio"), given.get("rows")
    if not isinstance(selector, str):
        raise RoundRequestError(Mistake.SELECTOR, f"mode 'reuse' needs a selector; give {_SELECTOR_FORMS}")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float | None):
        raise RoundRequestError(Mistake.SELECTOR, f"ratio {ratio!r} is no number; give 0 to 1 without quotes")
    if isinstance(rows, bool) or not isinstance(rows, int | None):
        raise RoundRequestError(Mistake.SELECTOR, f"rows {rows!r} is no whole number; give one without quotes")
    return Reuse(selector, ratio, rows)


def _read_segments(given: object, *, may_reuse: bool) -> tuple[Segment, ...]:
    form = 'give segments as [["private", 120], ["shared", 64]]: a kind and its number of tokens each'
    if not isinstance(given, list | tuple):
        raise RoundRequestError(Mistake.SEGMENT, f"segments are {given!r}; {form}", may_reuse=may_reuse)
    found: list[Segment] = []
    for index, one in enumerate(given):
        if not isinstance(one, list | tuple) or len(one) != 2 or type(one[1]) is not int:
            raise RoundRequestError(Mistake.SEGMENT, f"segment {index} is {one!r}; {form}", may_reuse=may_reuse)
        found.append((part_kind(one[0], Mistake.SEGMENT, may_reuse=may_reuse), one[1]))
    return tuple(found)


def _check_names(round_name: str, agent: str, *, may_reuse: bool) -> None:
    if bool(round_name) != bool(agent):
        text = f"round {round_name!r} and agent {agent!r}: give both, or neither for a prompt that is in no round"
        raise RoundRequestError(Mistake.NAME, text, may_reuse=may_reuse)
    if max(len(round_name), len(agent)) > NAME_CHARS_MAX:
        text = f"a round's or agent's name of more than {NAME_CHARS_MAX} characters; give a shorter one"
        raise RoundRequestError(Mistake.NAME, text, may_reuse=may_reuse)


def _check_expect(expect: int, round_name: str, *, may_reuse: bool) -> None:
    if not 0 <= expect <= PROMPTS_MAX or (expect and not round_name):
        text = f"expect {expect} in round {round_name!r}; give 1 to {PROMPTS_MAX} prompts, and the round's name"
        raise RoundRequestError(Mistake.NAME, text, may_reuse=may_reuse)


def _check_ratio(ratio: float | None) -> None:
    if ratio is None:
        return
    if not 0 <= ratio <= 1:
        raise RoundRequestError(Mistake.SELECTOR, f"ratio {ratio} is not within 0 to 1; 0.05 is five of a hundred")
    if (exact := Decimal(repr(float(ratio)))) != round(exact, RATIO_DECIMALS_MAX):
        raise RoundRequestError(
            Mistake.SELECTOR, f"ratio {ratio} has more than {RATIO_DECIMALS_MAX} decimals; round it"
        )


def _check_rows(rows: int | None, least: int) -> None:
    if rows is not None and not least <= rows <= ROWS_MAX:
        raise RoundRequestError(Mistake.SELECTOR, f"{rows} rows; give {least} to {ROWS_MAX}")


def _ratio_text(ratio: float) -> str:
    exact = Decimal(repr(float(ratio)))
    return format(exact.normalize(), "f") if exact else "0"


def _mode_json(mode: Mode) -> object:
    if isinstance(mode, Plain):
        return mode.value
    given = {"mode": "reuse", "selector": mode.selector, "ratio": mode.ratio, "rows": mode.rows}
    return {name: value for name, value in given.items() if value is not None}


def _unknown(what: str, given: object, known: Iterable[str]) -> str:
    names = list(known)
    nearest = get_close_matches(str(given), names, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown {what} {given!r}; {hint}Known are {', '.join(names)}"
