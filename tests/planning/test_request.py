"""Questions: sizes with units, and clear words for what is none."""

import pytest

from kvservice.model.errors import InvalidInputError
from kvservice.planning.request import CURVE_NAMES, DEFAULT_ROUND, PlanRequest, parse_request, size_of

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 8 * GIB), ("2x", 16 * GIB), ("0.5X", 4 * GIB), ("+64GiB", 72 * GIB), ("1TiB", 1024 * GIB), ("0", 0)],
)
def test_sizes_are_absolute_or_of_what_there_is(text: str, size: int) -> None:
    assert size_of(text, 8 * GIB, "host") == size


@pytest.mark.parametrize("text", ["2", "-1GiB", "twice", "1GB", "x", "nan", "1e9x", "99999999TiB", "+", "1TiB;"])
def test_nonsense_is_no_size(text: str) -> None:
    if text == "2":
        assert size_of(text, GIB, "host") == 2  # bytes, as in every setting
        return
    with pytest.raises(InvalidInputError, match="host = "):
        size_of(text, GIB, "host")


def test_an_empty_question_is_how_things_stand() -> None:
    assert parse_request({}) == PlanRequest()


def test_a_what_if_takes_a_models_numbers() -> None:
    found = parse_request({"layers": "28", "heads": "28", "kv_heads": "4", "head_size": "128", "agents": "32"})
    assert found.model is not None
    assert found.model.token_bytes == 57344
    assert found.round.agents == 32
    assert found.round.tokens == DEFAULT_ROUND.tokens


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"hots": "2x"}, "did you mean host"),
        ({"qqqq": "1"}, "known are"),
        ({"host": "much"}, "64GiB"),
        ({"agents": "-3"}, "whole number"),
        ({"agents": "0"}, "above 0"),
        ({"dwpd": "0"}, "above 0"),
        ({"flops": "inf"}, "a number"),
        ({"private_share": "nan"}, "a number"),
        ({"private_share": "7"}, "0 to 1"),
        ({"layers": "28"}, "heads"),
        ({"layers": "2", "heads": "2", "head_size": "8", "dtype": "int9"}, "int9"),
        ({"tenant": "a", "namespace": "b"}, "not for both"),
        ({"agents": "9" * 5000}, "whole number"),
        ({"host": "9" * 400}, "64GiB"),
        ({"prefill_tokens_per_s": "1e308"}, "at most"),
        ({"layers": "1", "heads": "100", "hidden_size": "10"}, "head_size"),
        ({"layers": "1", "heads": "1", "kv_heads": "", "head_size": "9" * 13}, "whole number"),
        ({"agents": "20"}, "agents.*layers, heads"),
        ({"flops": "1e14"}, "flops.*layers, heads"),
        ({"dtype": "foo"}, "foo.*use one of"),
        ({"dtype": "fp8"}, "dtype.*layers, heads"),
    ],
)
def test_bad_questions_are_refused_with_what_to_write(query: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse_request(query)


def test_a_curve_has_fewer_parameters_than_a_plan() -> None:
    assert parse_request({"tenant": "a"}, CURVE_NAMES).tenant == "a"
    with pytest.raises(InvalidInputError, match=r"'ssd' is no parameter.*tenant, namespace"):
        parse_request({"ssd": "3x"}, CURVE_NAMES)
