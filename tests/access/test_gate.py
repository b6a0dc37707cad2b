"""Who a caller is: tokens, certificates, expiry, rotation, and files that become wrong."""

import logging
from pathlib import Path

import pytest

from kvservice.access.authorization import token_of
from kvservice.access.gate import TOKEN_CHARS_MAX, Gate
from kvservice.access.principal import INTERNAL, LOCAL, Credentials
from kvservice.model.errors import ConfigError, UnauthenticatedError
from tests.access.files import EVERYBODY, TOKENS, digest, section, write
from tests.server.builders import FakeClock

NOW_S = 1_798_761_600.0  # 2027-01-01


class Calendar(FakeClock):
    """The time of day, at 2027-01-01."""

    def __init__(self) -> None:
        self.now_s = NOW_S


def gate_of(path: Path, text: str, clock: FakeClock | None = None) -> Gate:
    return Gate(write(path / "access.toml", text), wall_clock=clock or Calendar())


def test_without_a_file_everybody_who_is_let_in_is_local() -> None:
    assert Gate().authorize(Credentials()) is LOCAL
    assert Gate().authorize(Credentials("anything")) is LOCAL


def test_a_token_proves_its_principal_and_no_other(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, EVERYBODY)
    found = {name: gate.authorize(Credentials(token)) for name, token in TOKENS.items()}
    assert {name: one.name for name, one in found.items()} == {name: name for name in TOKENS}
    assert found["acme"].may("acme")
    assert not found["acme"].may("rival")
    assert found["boss"].may("anybody")
    assert not found["acme"].sees_all
    assert found["eyes"].sees_all
    assert not found["eyes"].may_open_sessions


@pytest.mark.parametrize("token", ["", "wrong", "token of acm", "x" * (TOKEN_CHARS_MAX + 1), "t\udc80"])
def test_nothing_else_proves_anybody(tmp_path: Path, token: str) -> None:
    gate = gate_of(tmp_path, EVERYBODY)
    with pytest.raises(UnauthenticatedError, match="not a caller that this node knows"):
        gate.authorize(Credentials(token))
    assert gate.refused == 1


def test_sha256_digests_work_too(tmp_path: Path) -> None:
    import hashlib

    text = section("acme", '"acme"').replace("blake3", "sha256").replace(digest(TOKENS["acme"]), "")
    text = text.replace('sha256 = ""', f'sha256 = "{hashlib.sha256(b"s3cret").hexdigest()}"')
    assert gate_of(tmp_path, text).authorize(Credentials("s3cret")).name == "acme"


def test_a_token_that_has_expired_says_so_to_who_has_it(tmp_path: Path) -> None:
    clock = Calendar()
    gate = gate_of(tmp_path, section("acme", '"acme"', expires="2027-01-01T00:01:00Z"), clock)
    principal = gate.authorize(Credentials(TOKENS["acme"]))
    assert gate.is_current(principal)
    clock.now_s += 60
    assert not gate.is_current(principal)
    with pytest.raises(UnauthenticatedError, match="has expired"):
        gate.authorize(Credentials(TOKENS["acme"]))


def test_a_certificates_name_proves_its_principal(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, section("acme", '"acme"', more='certificates = ["a.example"]'))
    assert gate.authorize(Credentials(certificate_names=("b.example", "a.example"))).name == "acme"
    with pytest.raises(UnauthenticatedError):
        gate.authorize(Credentials(certificate_names=("b.example",)))


def test_a_wrong_token_is_not_saved_by_a_certificate_or_by_being_local(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, section("acme", '"acme"', more='certificates = ["a.example"]'))
    with pytest.raises(UnauthenticatedError):
        gate.authorize(Credentials("wrong", ("a.example",), is_local=True))
    assert gate.authorize(Credentials(is_local=True)) is LOCAL


def test_what_is_local_may_be_narrowed(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, '[local]\nrole = "engine"\ntenants = ["own"]\n')
    local = gate.authorize(Credentials(is_local=True))
    assert gate.local is local
    assert local.may("own")
    assert not local.may("acme")
    assert not local.is_admin
    assert gate.is_current(local)
    assert gate.is_current(INTERNAL)
    assert not gate.is_current(LOCAL)


def test_tokens_are_exchanged_while_both_work(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, section("acme", '"acme"'))
    old = gate.authorize(Credentials(TOKENS["acme"]))
    both = section("acme", '"acme"').replace("}]", f'}}, {{ blake3 = "{digest("new")}" }}]')
    write(tmp_path / "access.toml", both)
    assert gate.reload_if_changed()
    assert not gate.reload_if_changed()
    new = gate.authorize(Credentials("new"))
    assert gate.is_current(old)
    assert new.name == old.name
    write(tmp_path / "access.toml", section("acme", '"acme"', token="new"))
    assert gate.reload_if_changed()
    assert not gate.is_current(old)
    assert gate.is_current(new)
    with pytest.raises(UnauthenticatedError):
        gate.authorize(Credentials(TOKENS["acme"]))


def test_a_principal_that_loses_a_tenant_is_current_no_more(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, section("acme", '"acme", "two"'))
    before = gate.authorize(Credentials(TOKENS["acme"]))
    write(tmp_path / "access.toml", section("acme", '"acme"'))
    gate.reload()
    assert not gate.is_current(before)


def test_a_bad_file_changes_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = gate_of(tmp_path, section("acme", '"acme"') + "[tenant.acme]\nhost_bytes = 5\n")
    told: list[str] = []
    gate.on_change.append(lambda: told.append("changed"))
    write(tmp_path / "access.toml", "[[principal]]\nname = 5")
    with caplog.at_level(logging.ERROR):
        assert not gate.reload_if_changed()
    assert "the old access rules stay in force" in caplog.text
    assert "name" in gate.problem
    assert gate.authorize(Credentials(TOKENS["acme"])).name == "acme"
    assert gate.quotas.of("acme").host_bytes == 5
    (tmp_path / "access.toml").unlink()
    assert not gate.reload_if_changed()
    assert "cannot read" in gate.problem
    assert not told
    write(tmp_path / "access.toml", EVERYBODY)
    assert gate.reload_if_changed()
    assert not gate.problem
    assert told == ["changed"]
    assert gate.quotas.of("acme").host_bytes is None


def test_a_bad_file_stops_a_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        gate_of(tmp_path, "x = 1")


def test_every_token_is_compared_with_every_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, seen = gate_of(tmp_path, EVERYBODY), list[bytes]()

    def compare(ours: bytes, theirs: bytes) -> bool:
        seen.append(theirs)
        return ours == theirs

    monkeypatch.setattr("kvservice.access.gate.hmac.compare_digest", compare)
    counts = []
    for token in (TOKENS["acme"], TOKENS["eyes"], "wrong"):
        seen.clear()
        try:
            gate.authorize(Credentials(token))
        except UnauthenticatedError:
            assert token == "wrong"
        counts.append(len(seen))
    assert counts == [4, 4, 4]


def test_no_text_of_credentials_holds_the_token() -> None:
    assert "secret" not in repr(Credentials("secret"))


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic YW55OmFiYw==", "abc"),
        ("Basic YW55", ""),
        ("Basic ###", ""),
        ("Basic /w==", ""),
        ("abc", ""),
        ("", ""),
        ("Bearer", ""),
    ],
)
def test_headers(header: str, token: str) -> None:
    assert token_of(header) == token
