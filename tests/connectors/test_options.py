"""Connector options: a wrong one stops the start and says what is right."""

import pytest

from kvservice.client.connectors.vllm.options import ConnectorOptions
from kvservice.model.errors import ConfigError

ADDRESS = "unix:/run/kvservice.sock"


def test_defaults_need_only_the_address() -> None:
    options = ConnectorOptions.of({"address": ADDRESS}, 16)
    assert options.address == ADDRESS
    assert options.chunk_tokens == 256
    assert options.is_async
    assert options.is_shared


@pytest.mark.parametrize(("chunk", "block", "found"), [(256, 32, 256), (1, 128, 128), (100, 32, 128), (256, 544, 544)])
def test_chunks_are_rounded_up_to_whole_blocks(chunk: int, block: int, found: int) -> None:
    assert ConnectorOptions.of({"address": ADDRESS, "chunk_tokens": chunk}, block).chunk_tokens == found


def test_every_option_can_be_given() -> None:
    options = ConnectorOptions.of(
        {
            "address": "127.0.0.1:5000",
            "is_async": False,
            "weights": "abc",
            "tenant": "t",
            "lossy": "int8",
            "load_deadline_s": 3,
            "adapters": {"sql": "1f"},
        },
        16,
    )
    assert (options.is_async, options.weights, options.load_deadline_s) == (False, "abc", 3.0)
    assert type(options.load_deadline_s) is float
    assert options.adapters == {"sql": "1f"}
    assert options.lossy == "int8"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("chunk_token", 256, "did you mean 'chunk_tokens'?"),
        ("adress", ADDRESS, "did you mean 'address'?"),
        ("zzz", 1, "Known are address, token"),
        ("chunk_tokens", "256", "must be a whole number without quotes, it is '256'"),
        ("chunk_tokens", True, "must be a whole number"),
        ("chunk_tokens", 2.5, "must be a whole number"),
        ("chunk_tokens", 0, "must be above 0"),
        ("refresh_tail_rows", -1, "must be 0 or more"),
        ("is_async", 1, "must be true or false"),
        ("is_async", "false", "must be true or false"),
        ("lookup_deadline_s", "1", "must be a number"),
        ("lookup_deadline_s", -1, "must be above 0"),
        ("lookup_deadline_s", float("inf"), "must be above 0 and finite"),
        ("lookup_deadline_s", float("nan"), "must be above 0 and finite"),
        ("weights", 5, "must be a text"),
        ("tenant", "", "tenant must not be empty"),
        ("lossy", "int4", """lossy is 'int4'; leave it out for exact KV, or give "int8\""""),
        ("adapters", ["a"], "must be an object of texts"),
        ("adapters", {"a": 1}, "must be an object of texts"),
        ("address", "/run/kvservice.sock", "neither"),
        ("address", "localhost", "neither"),
        ("address", "", "is missing"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ConnectorOptions.of({"address": ADDRESS, name: value}, 16)
    assert says in str(raised.value)


def test_a_missing_address_says_how_to_find_it() -> None:
    with pytest.raises(ConfigError, match="kvservice serve"):
        ConnectorOptions.of({}, 16)
