"""How all three doors are told who they are: what is wrong stops the start, is named, and gives no secret away."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvservice.client.connectors.lmcache.options import LMCacheOptions, options_of_url, without_query
from kvservice.client.connectors.service_options import ServiceOptions
from kvservice.client.connectors.vllm.options import ConnectorOptions
from kvservice.client.connectors.vllm_tier.options import TierOptions
from kvservice.model.errors import ConfigError
from tests.access.certificates import Authority, openssl

SECRET = "s3cret-of-acme"
PORT = "localhost:50151"
Read = Callable[[dict[str, Any]], ServiceOptions]
DOORS: dict[str, Read] = {
    "vllm": lambda given: ConnectorOptions.of(given, 16),
    "tier": TierOptions.of,
    "lmcache": lambda given: LMCacheOptions.of({"is_shared": False, **given}, "extra_config"),
}


@pytest.fixture(params=DOORS)
def read(request: pytest.FixtureRequest) -> Read:
    """One door's way of reading options."""
    return DOORS[request.param]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    return path


def refusal(read: Read, **given: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        read({"address": PORT, **given})
    return str(raised.value)


def test_everything_that_a_client_can_show_can_be_given(read: Read, authority: Authority, token: Path) -> None:
    own = authority.issue("engine", is_client=True)
    given = {
        "token": f"file:{token}",
        "tls_ca": str(authority.cert),
        "client_cert": str(own.cert),
        "client_key": str(own.key),
    }
    options = read({"address": PORT, **given})
    assert options.security.metadata() == (("authorization", f"Bearer {SECRET}"),)
    assert options.security.tls_ca == given["tls_ca"]
    assert (options.security.client_cert, options.security.client_key) == (given["client_cert"], given["client_key"])
    read({"address": PORT, "tls_ca": given["tls_ca"], "client_cert": str(own.both)})


def test_options_hold_no_token_that_a_log_could_show(read: Read, token: Path) -> None:
    options = read({"address": PORT, "token": f"file:{token}"})
    assert SECRET not in repr(options)


def test_a_literal_token_is_refused_with_the_reason_and_not_repeated(read: Read) -> None:
    text = refusal(read, token=SECRET)
    assert "file:/path" in text
    assert "logged" in text
    assert SECRET not in text


@pytest.mark.parametrize("value", [1234567, [SECRET], {"token": SECRET}])
def test_a_token_of_a_wrong_type_is_not_repeated(read: Read, value: object) -> None:
    text = refusal(read, token=value)
    assert "token must be a text in quotes" in text
    assert SECRET not in text
    assert "1234567" not in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        ("", "is empty"),
        (" \n", "is empty"),
        ("two\nlines", "one line"),
        (b"\xff\xfe", "one line"),
        ("größe", "one line"),
    ],
)
def test_a_token_file_that_cannot_serve_stops_the_start(
    read: Read, tmp_path: Path, content: str | bytes | None, says: str
) -> None:
    path = tmp_path / "given"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = refusal(read, token=f"file:{path}")
    assert str(path) in text
    assert says in text


@pytest.mark.parametrize("name", ["tls_ca", "client_cert", "client_key"])
def test_a_file_that_is_not_there_stops_the_start(read: Read, authority: Authority, tmp_path: Path, name: str) -> None:
    own = authority.issue("engine", is_client=True)
    files = {"tls_ca": authority.cert, "client_cert": own.cert, "client_key": own.key, name: tmp_path / "gone.pem"}
    text = refusal(read, **{key: str(path) for key, path in files.items()})
    assert "gone.pem" in text
    assert "No such file" in text


def test_a_file_that_holds_no_certificate_stops_the_start(read: Read, token: Path) -> None:
    text = refusal(read, tls_ca=str(token))
    assert f"tls_ca {token}" in text
    assert SECRET not in text


def test_a_key_of_another_certificate_stops_the_start(read: Read, authority: Authority) -> None:
    one, other = (authority.issue(name, is_client=True) for name in ("one", "other"))
    files = {"tls_ca": str(authority.cert), "client_cert": str(one.cert), "client_key": str(other.key)}
    assert f"client_cert {one.cert}" in refusal(read, **files)
    assert f"client_cert {one.cert}" in refusal(read, **(files | {"client_key": ""}))  # nor a key beside it


def test_a_key_with_a_password_stops_the_start_and_asks_nobody_for_it(
    read: Read, authority: Authority, tmp_path: Path
) -> None:
    own, locked = authority.issue("engine", is_client=True), tmp_path / "locked.key"
    openssl("pkey", "-in", own.key, "-aes256", "-passout", "pass:word", "-out", locked)
    files = {"tls_ca": str(authority.cert), "client_cert": str(own.cert), "client_key": str(locked)}
    assert "has no password" in refusal(read, **files)


def test_what_needs_something_else_says_so(read: Read, authority: Authority) -> None:
    own = authority.issue("engine", is_client=True)
    assert "give tls_ca too" in refusal(read, client_cert=str(own.both))
    assert "client_key without client_cert" in refusal(read, tls_ca=str(authority.cert), client_key=str(own.key))


def test_a_token_is_never_meant_to_cross_a_network_in_the_clear(read: Read, token: Path) -> None:
    assert "in the clear" in refusal(read, address="cache.example:50151", token=f"file:{token}")


@pytest.mark.parametrize("name", ["token", "tls_ca"])
def test_what_a_unix_socket_does_not_ask_for_is_refused(
    read: Read, authority: Authority, token: Path, name: str
) -> None:
    value = {"token": f"file:{token}", "tls_ca": str(authority.cert)}[name]
    text = refusal(read, address="unix:/run/kv.sock", **{name: value})
    assert name in text
    assert "[local]" in text


def test_a_misspelt_name_is_named_and_its_value_is_not(read: Read) -> None:
    text = refusal(read, tokn=SECRET)
    assert "did you mean 'token'?" in text
    assert SECRET not in text


def test_a_url_of_lmcache_may_hold_them_and_is_never_shown_whole(token: Path) -> None:
    url = f"kvservice://{PORT}?is_shared=false&token=file:{token}"
    assert LMCacheOptions.of(options_of_url(url), without_query(url)).token == f"file:{token}"
    wrong = f"kvservice://{PORT}?is_shared=false&token={SECRET}"
    with pytest.raises(ConfigError) as raised:
        LMCacheOptions.of(options_of_url(wrong), without_query(wrong))
    assert SECRET not in str(raised.value)
    with pytest.raises(ConfigError, match="'token' is there twice") as raised:
        options_of_url(f"{wrong}&token={SECRET}")
    assert SECRET not in str(raised.value)
