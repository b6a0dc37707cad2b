"""The question of a plan, from a query or from flags: sizes with units, and the numbers of a what-if. Pure."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from kvservice.config import parse_bytes
from kvservice.model.errors import ConfigError, InvalidInputError
from kvservice.planning.closed_forms import RoundShape, Speed
from kvservice.planning.flags import MODEL_NAMES, NAMES, ROUND_NAMES, SPEED_NAMES
from kvservice.planning.model_config import ModelShape, known_dtype, model_shape

SIZE_BYTES_MAX = 1 << 60
TIMES_MAX = 1e6
RATED_DWPD = 1.0
NUMBER_MAX = 1e30
CURVE_NAMES = ("tenant", "namespace")
"""Parameters of GET /curves."""


DEFAULT_ROUND, UNKNOWN_SPEED = RoundShape(), Speed()


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked. ``host``, ``ssd``: sizes as written, empty: as it is. ``tenant``, ``namespace``: whose
    curve, empty: the node's. ``rated_dwpd``: 0 if it was not said. ``model``: of a what-if."""

    host: str = ""
    ssd: str = ""
    rated_dwpd: float = 0.0
    tenant: str = ""
    namespace: str = ""
    model: ModelShape | None = None
    round: RoundShape = DEFAULT_ROUND
    speed: Speed = UNKNOWN_SPEED


def parse_request(query: Mapping[str, str], names: Sequence[str] = NAMES) -> PlanRequest:
    """The request of a query, of ``names`` alone. Raises InvalidInputError, which names the nearest word, for what is
    not known, and for what would say nothing without more."""
    for name in query:
        if name not in names:
            near = get_close_matches(name, names, 1)
            meant = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(names)}"
            raise InvalidInputError(f"{name!r} is no parameter of a {'plan' if names is NAMES else 'curve'}{meant}")
    if query.get("tenant") and query.get("namespace"):
        raise InvalidInputError("a plan is for a tenant or for a namespace, not for both")
    for name in ("host", "ssd"):
        size_of(query.get(name, ""), 1, name)
    round_, speed, model = round_of(query), speed_of(query), _model(query)
    if model is None:
        _refuse_what_needs_a_model(query)
    return PlanRequest(
        host=query.get("host", ""),
        ssd=query.get("ssd", ""),
        rated_dwpd=number_of(query, "dwpd", 0.0),
        tenant=query.get("tenant", ""),
        namespace=query.get("namespace", "").lower(),
        model=model,
        round=round_,
        speed=speed,
    )


def _refuse_what_needs_a_model(query: Mapping[str, str]) -> None:
    if query.get("dtype"):
        known_dtype(query["dtype"])
    idle = [name for name in ("dtype", *ROUND_NAMES, *SPEED_NAMES) if query.get(name)]
    if idle:
        raise InvalidInputError(
            f"{', '.join(idle)}: that is of a what-if, which needs a model: layers, heads, and head_size or hidden_size"
        )


def round_of(query: Mapping[str, str]) -> RoundShape:
    """The round that is asked about."""
    default = DEFAULT_ROUND
    return RoundShape(
        agents=_whole(query, "agents", default.agents),
        tokens=_whole(query, "tokens", default.tokens),
        private_share=number_of(query, "private_share", default.private_share, at_least=0.0),
        refresh_ratio=number_of(query, "refresh_ratio", default.refresh_ratio, at_least=0.0),
    )


def speed_of(query: Mapping[str, str]) -> Speed:
    """How fast the caller says prefill is."""
    return Speed(*(number_of(query, name, 0.0) for name in SPEED_NAMES))


def _model(query: Mapping[str, str]) -> ModelShape | None:
    given = {there: _whole(query, here, 0) for here, there in MODEL_NAMES.items() if here in query}
    if not given:
        return None
    if "layers" not in query or "heads" not in query or not ("hidden_size" in query or "head_size" in query):
        raise InvalidInputError("a what-if of a model needs layers, heads, and head_size or hidden_size")
    given.setdefault("hidden_size", given["num_attention_heads"] * given.get("head_dim", 0))
    return model_shape(given, query.get("dtype", ""))


def size_of(text: str, present_bytes: int, name: str) -> int:
    """Bytes of ``2x`` (times the present size), ``+64GiB`` (more than it) or ``1TiB``; empty: the present size."""
    text = text.strip()
    times = re.fullmatch(r"(\d+(?:\.\d+)?)[xX]", text)
    try:
        if not text:
            size = float(present_bytes)
        elif times:
            size = min(float(times[1]), TIMES_MAX) * present_bytes
        elif text.startswith("+"):
            size = float(present_bytes + parse_bytes(text[1:]))
        else:
            size = float(parse_bytes(text))
    except ConfigError as error:
        raise InvalidInputError(f"{name} = {text!r}: write a size such as 64GiB, +64GiB or 2x") from error
    if not 0 <= size <= SIZE_BYTES_MAX:
        raise InvalidInputError(f"{name} = {text!r}: at most 1024 PiB")
    return int(size)


def number_of(query: Mapping[str, str], name: str, default: float, *, at_least: float = 1e-9) -> float:
    """A number of a query, so bounded that nothing worked out of it overflows."""
    text = query.get(name)
    if text is None or text == "":
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not at_least <= value <= NUMBER_MAX:
        least = "from 0 on" if at_least == 0 else "above 0"
        raise InvalidInputError(f"{name} = {text!r}: it must be a number {least} and at most {NUMBER_MAX:g}")
    return value


def _whole(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"\d{1,12}", text) or int(text) < 1:
        raise InvalidInputError(f"{name} = {text!r}: it must be a whole number above 0")
    return int(text)
