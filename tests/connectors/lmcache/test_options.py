"""Options of the doors to LMCache: what is wrong or missing stops the start, and is named."""

from pathlib import Path

import pytest

from kvservice.client.connectors.lmcache.identity import Owner
from kvservice.client.connectors.lmcache.options import LMCacheOptions, options_of_url
from kvservice.model.errors import ConfigError
from tests.connectors.lmcache.builders import WHERE, make_kind, make_options

ADDRESS = {"address": "unix:/run/kv.sock"}


def test_a_misspelt_option_is_fatal_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'weights'"):
        LMCacheOptions.of({**ADDRESS, "wieghts": "r1"}, WHERE)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "weights, config, kv_format"),
        ({"weights": "r1"}, "config, kv_format"),
        ({"weights": "r1", "config": "c"}, "kv_format"),
        ({"model_path": "/models/m"}, "kv_format"),
    ],
)
def test_a_shared_cache_says_what_is_missing_and_how_to_give_it(given: dict[str, object], missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"do not say {missing}\. Give .*model_path.*is_shared"):
        LMCacheOptions.of({**ADDRESS, **given}, WHERE)


def test_what_is_not_shared_needs_nothing_and_meets_nobody() -> None:
    options = LMCacheOptions.of({**ADDRESS, "is_shared": False}, WHERE)
    first, second = (Owner.of(options, WHERE).identity(make_kind()) for _ in range(2))
    assert first.namespace() != second.namespace()


def test_an_address_is_needed() -> None:
    with pytest.raises(ConfigError, match='"address" is missing'):
        LMCacheOptions.of({"is_shared": False}, WHERE)


def test_files_that_are_not_there_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_path: .* holds no weights"):
        Owner.of(make_options(weights="", config="", model_path=str(tmp_path)), WHERE)


def test_a_url_is_read_as_options() -> None:
    given = options_of_url("kvservice:///run/kv.sock?weights=r1&config=c&kv_format=a%20b&load_threads=4&prefill_s=0.5")
    options = LMCacheOptions.of(given, WHERE)
    assert (options.address, options.kv_format) == ("unix:/run/kv.sock", "a b")
    assert (options.load_threads, options.prefill_s) == (4, 0.5)


def test_a_url_may_name_a_port() -> None:
    options = LMCacheOptions.of(options_of_url("kvservice://127.0.0.1:7000?is_shared=false"), WHERE)
    assert (options.address, options.is_shared) == ("127.0.0.1:7000", False)


@pytest.mark.parametrize("query", ["load_threads=many", "is_shared=perhaps", "lock_s=-1", "tenant=", "colour=red"])
def test_what_a_url_says_wrongly_is_fatal(query: str) -> None:
    with pytest.raises(ConfigError):
        LMCacheOptions.of(options_of_url(f"kvservice:///run/kv.sock?weights=r&config=c&kv_format=f&{query}"), WHERE)


def test_a_url_that_says_a_thing_twice_is_fatal() -> None:
    with pytest.raises(ConfigError, match="twice"):
        options_of_url("kvservice:///run/kv.sock?tenant=a&tenant=b")
