"""Opening a place: whatever is wrong stops the boot with a text that says what to do, and never shows a password."""

import sys
from pathlib import Path

import pytest

from kvservice.model.errors import ConfigError
from kvservice.storage.remote.opening import open_remote
from kvservice.storage.remote.place_url import parse_place_url
from kvservice.storage.remote.unreachable import UnreachableError
from tests.remote.records import fetch, find_one, make_record, same, wanted
from tests.remote.servers import free_port, redis_server, require_module, require_program, running, s3_server


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s4://bucket", "known are s3, gs"),
        ("mooncak://host", "did you mean 'mooncake'"),
        ("http://host/x", "unknown storage"),
        ("bucket/prefix", "scheme://place"),
        ("", "scheme://place"),
        ("s3://bucket#part", "scheme://place"),
        ("redis://host:port/0", "cannot be read"),
        ("redis://host/0?prefix", "cannot be read"),
        ("redis://127.0.0.1/0?prefix=a&prefix=b", "given twice"),
        ("redis://" + "h" * 5000, "characters"),
    ],
)
async def test_a_url_that_names_no_storage_is_refused(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        await open_remote(url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://bucket?endpont=http://127.0.0.1", "did you mean 'endpoint'"),
        ("s3://bucket?endpoint=127.0.0.1:9000", "must start with https://"),
        ("s3://bucket?endpoint=http://storage.example", "without encryption"),
        ("s3://bucket?endpoint=http://storage.example&insecure_plaintext=maybe", "neither yes nor no"),
        ("s3://bucket?ca=/no/such/file", "cannot be read"),
        ("s3://key:secret@bucket", "not taken from the URL"),
        ("s3:///prefix", "no bucket"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/../b", "prefix"),
        ("file:///no/such/folder", "a folder that exists"),
        ("file://host/folder", "a folder that exists"),
        ("file:///tmp?prefix=x", "unknown option"),
    ],
)
async def test_a_wrong_object_storage_is_refused(request: pytest.FixtureRequest, url: str, text: str) -> None:
    require_module(request, "obstore", "pip install 'kvservice[s3]'")
    with pytest.raises(ConfigError, match=text) as refusal:
        await open_remote(url)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://cache.example/0", "rediss://"),
        ("redis://127.0.0.1/zero", "is no number"),
        ("redis://127.0.0.1/0?object_bytes_max=12", "no whole number"),
        ("redis://127.0.0.1/0?ca=/x", "unknown option"),
        ("rediss://127.0.0.1/0?ca=/x", "is no file"),
        ("redis://:word@127.0.0.1/0?password_file=/x", "give one"),
        ("redis://127.0.0.1/0?password_file=/no/such/file", "cannot be read"),
        ("redis:///0", "no server"),
    ],
)
async def test_a_wrong_redis_is_refused(request: pytest.FixtureRequest, url: str, text: str) -> None:
    require_module(request, "redis", "pip install 'kvservice[redis]'")
    with pytest.raises(ConfigError, match=text):
        await open_remote(url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("mooncake://master.example", "no TLS"),
        ("mooncake://user@127.0.0.1", "no credentials"),
        ("mooncake:///prefix", "no master"),
        ("mooncake://127.0.0.1?protocl=tcp", "did you mean 'protocol'"),
    ],
)
async def test_a_wrong_pool_is_refused(request: pytest.FixtureRequest, url: str, text: str) -> None:
    require_module(request, "mooncake", "pip install 'kvservice[mooncake]'")
    with pytest.raises(ConfigError, match=text):
        await open_remote(url)


@pytest.mark.parametrize(
    ("module", "url", "extra"),
    [
        ("obstore", "s3://bucket", "s3"),
        ("redis.asyncio", "redis://127.0.0.1", "redis"),
        ("mooncake.store", "mooncake://127.0.0.1", "mooncake"),
    ],
)
async def test_a_library_that_is_missing_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, url: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'kvservice\[{extra}\]'"):
        await open_remote(url)


@pytest.mark.parametrize("kind", ["s3", "redis", "mooncake"])
async def test_a_server_that_is_not_there_may_be_tried_again(
    request: pytest.FixtureRequest, credentials: None, kind: str
) -> None:
    module = {"s3": "obstore"}.get(kind, kind)
    require_module(request, module, f"pip install 'kvservice[{kind}]'")
    port = free_port()
    url = {
        "s3": f"s3://bucket?endpoint=http://127.0.0.1:{port}",
        "redis": f"redis://:password@127.0.0.1:{port}/0",
        "mooncake": f"mooncake://127.0.0.1:{port}",
    }[kind]
    with pytest.raises(UnreachableError) as refusal:
        await open_remote(url, deadline_s=5.0)
    assert "password" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["s3", "redis", "mooncake"])
async def test_a_server_that_says_nothing_is_given_up(
    request: pytest.FixtureRequest, credentials: None, tmp_path: Path, kind: str
) -> None:
    module = {"s3": "obstore"}.get(kind, kind)
    require_module(request, module, f"pip install 'kvservice[{kind}]'")
    if kind == "mooncake":
        pytest.skip("the library itself decides how long it takes to set up")
    with running(redis_server(request, tmp_path)) as server:
        server.stop()
        url = {
            "s3": f"s3://bucket?endpoint=http://127.0.0.1:{server.port}",
            "redis": f"redis://127.0.0.1:{server.port}/0",
        }[kind]
        with pytest.raises(UnreachableError, match="no answer"):
            await open_remote(url, deadline_s=0.3)


async def test_a_bucket_that_does_not_exist_is_named(
    request: pytest.FixtureRequest, credentials: None, tmp_path: Path
) -> None:
    require_module(request, "obstore", "pip install 'kvservice[s3]'")
    with (
        running(s3_server(request, tmp_path)) as server,
        pytest.raises(ConfigError, match="'nobody' does not exist") as refusal,
    ):
        await open_remote(f"s3://nobody/p?endpoint=http://127.0.0.1:{server.port}", deadline_s=10.0)
    assert not isinstance(refusal.value, UnreachableError)


async def test_credentials_that_s3_does_not_know_are_refused(
    request: pytest.FixtureRequest, credentials: None, tmp_path: Path
) -> None:
    require_module(request, "obstore", "pip install 'kvservice[s3]'")
    with (
        running(s3_server(request, tmp_path, INITIAL_NO_AUTH_ACTION_COUNT="0")) as server,
        pytest.raises(ConfigError, match="credentials are refused") as refusal,
    ):
        await open_remote(f"s3://bucket/p?endpoint=http://127.0.0.1:{server.port}", deadline_s=10.0)
    assert "secret" not in str(refusal.value)


async def test_s3_without_any_credentials_says_so(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_module(request, "obstore", "pip install 'kvservice[s3]'")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with running(s3_server(request, tmp_path)) as server, pytest.raises(ConfigError, match="credentials"):
        await open_remote(f"s3://bucket/p?endpoint=http://127.0.0.1:{server.port}", deadline_s=10.0)


async def test_redis_asks_for_a_password(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    require_module(request, "redis", "pip install 'kvservice[redis]'")
    (tmp_path / "password").write_text("tr&ue:@/%\n")
    with running(redis_server(request, tmp_path, "--requirepass", "tr&ue:@/%")) as server:
        place = f"127.0.0.1:{server.port}/0"
        with pytest.raises(ConfigError, match="credentials are missing"):
            await open_remote(f"redis://{place}", deadline_s=5.0)
        with pytest.raises(ConfigError, match="credentials are refused") as refusal:
            await open_remote(f"redis://:wrong@{place}", deadline_s=5.0)
        assert "wrong" not in str(refusal.value)
        for url in (f"redis://{place}?password_file={tmp_path}/password", f"redis://:tr%26ue%3A%40%2F%25@{place}"):
            tier = await open_remote(url, deadline_s=5.0)
            assert await find_one(tier, make_record()[0]) is None
            assert "tr&ue" not in repr(parse_place_url(url))
            assert tier.place == f"redis://{place}"
            await tier.close()


async def test_redis_users_see_what_their_rights_say(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    require_module(request, "redis", "pip install 'kvservice[redis]'")
    rights = "+getrange +strlen +set +del +zadd +zrevrange +zrem +zremrangebyrank +scan"
    (tmp_path / "users").write_text(f"user default off\nuser engine on >word ~ours:* {rights}\n")
    with running(redis_server(request, tmp_path, "--aclfile", str(tmp_path / "users"))) as server:
        place = f"redis://engine:word@127.0.0.1:{server.port}/0"
        tier = await open_remote(f"{place}?prefix=ours", deadline_s=5.0)
        name, record = make_record()
        assert await tier.store(name, record, 0.0)
        (found,) = await tier.find([wanted(make_record(context=1)[0], others_max=1)])
        assert same((await fetch(tier, found[0])).bytes, record)
        assert await tier.delete(name)
        assert await tier.delete_all(name.namespace) == 0
        await tier.close()
        with pytest.raises(ConfigError, match="refused"):
            await open_remote(f"{place}?prefix=theirs", deadline_s=5.0)


async def test_redis_over_tls_checks_who_it_speaks_to(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    require_module(request, "redis", "pip install 'kvservice[redis]'")
    right, wrong = certificate(request, tmp_path, "right"), certificate(request, tmp_path, "wrong")
    port = free_port()
    tls = ["--tls-port", str(port), "--tls-cert-file", f"{right}.pem", "--tls-key-file", f"{right}.key"]
    server = redis_server(request, tmp_path, *tls, "--tls-auth-clients", "no", "--port", "0", port=port)
    with running(server):
        tier = await open_remote(f"rediss://localhost:{port}/0?ca={right}.pem", deadline_s=5.0)
        assert await tier.store(*make_record(), 0.0)
        await tier.close()
        for url in (f"rediss://localhost:{port}/0?ca={wrong}.pem", f"rediss://localhost:{port}/0"):
            with pytest.raises(ConfigError, match="certificate"):
                await open_remote(url, deadline_s=5.0)


def certificate(request: pytest.FixtureRequest, folder: Path, name: str) -> Path:
    """``name.pem`` and ``name.key``, good for localhost."""
    import subprocess

    openssl = require_program(request, "openssl", "apt-get install openssl")
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem"]
    subprocess.run([*command, *files, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    return folder / name
