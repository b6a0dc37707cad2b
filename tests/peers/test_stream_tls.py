"""The same streams under TLS: certificates of both sides, and what does not fit them."""

import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvservice.access.principal import Credentials, Principal, Role
from kvservice.model.errors import UnauthenticatedError, UnavailableError
from kvservice.peers.streams_client_dialler import Caller
from tests.access.certificates import Authority, Pair
from tests.peers.stream_world import (
    HASTY,
    fetch_verified,
    find_record,
    give_new,
    link_to,
    make_caller,
    make_facts,
    owner_node,
    settled,
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def server_tls(authority: Authority) -> Callable[..., ssl.SSLContext]:
    def make(pair: Pair | None = None) -> ssl.SSLContext:
        found = pair or authority.issue("owner")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(found.cert, found.key)
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_verify_locations(authority.cert)
        return context

    return make


def client_tls(ca: Path, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


def by_certificate(credentials: Credentials) -> Principal:
    if "node-b" not in credentials.certificate_names:
        raise UnauthenticatedError("no certificate of a node")
    return Principal("node-b", Role.NODE)


def caller_with(context: ssl.SSLContext, server_name: str = "") -> Caller:
    return make_caller(tls=context, server_name=server_name)


async def test_records_come_and_go_under_tls(authority: Authority, server_tls: Callable[..., ssl.SSLContext]) -> None:
    caller = caller_with(client_tls(authority.cert, authority.issue("node-b")))
    async with (
        owner_node(tls=server_tls(), authorize=by_certificate) as owner,
        link_to(owner.address, caller=caller) as link,
    ):
        meta = await owner.store("one")
        got = await fetch_verified(link, await find_record(link, owner, meta))
        assert bytes(got) == bytes(owner.bytes_of(meta))
        await give_new(owner, link)


@pytest.mark.parametrize("what", ["unknown authority", "expired", "another name", "no tls"])
async def test_a_node_with_a_wrong_certificate_is_not_believed(
    what: str, authority: Authority, server_tls: Callable[..., ssl.SSLContext], tmp_path: Path
) -> None:
    pair = authority.issue("late", is_expired=True, file="late") if what == "expired" else None
    ca = Authority(tmp_path / "other").cert if what == "unknown authority" else authority.cert
    caller = caller_with(client_tls(ca), server_name="elsewhere" if what == "another name" else "")
    tls = None if what == "no tls" else server_tls(pair)
    async with owner_node(tls=tls) as owner, link_to(owner.address, caller=caller) as link:
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await link.ping()


async def test_a_caller_without_its_certificate_is_refused(
    authority: Authority, server_tls: Callable[..., ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    async with owner_node(tls=server_tls(), authorize=by_certificate) as owner:
        for pair in (None, authority.issue("node-c")):
            async with link_to(owner.address, caller=caller_with(client_tls(authority.cert, pair))) as link:
                with pytest.raises(UnauthenticatedError):
                    await link.ping()
        assert caplog.text.count("is refused") == 2


async def test_a_caller_with_an_expired_certificate_or_of_a_stranger_is_refused(
    authority: Authority,
    server_tls: Callable[..., ssl.SSLContext],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    strangers = (authority.issue("late2", is_expired=True), Authority(tmp_path / "other").issue("node-b"))
    async with owner_node(tls=server_tls(), authorize=by_certificate) as owner:
        for pair in strangers:
            async with link_to(owner.address, caller=caller_with(client_tls(authority.cert, pair))) as link:
                with pytest.raises(UnavailableError):
                    await link.ping()
        await settled(lambda: caplog.text.count("broke") >= 2)


async def test_a_caller_without_tls_is_not_understood(
    server_tls: Callable[..., ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    async with owner_node(tls=server_tls()) as owner, link_to(owner.address, limits=HASTY) as link:
        with pytest.raises(UnavailableError):
            await link.ping()
        await settled(lambda: "broke" in caplog.text)


@pytest.mark.parametrize("token", ["", "shown"])
async def test_who_shows_nothing_but_a_certificate_is_not_told_of_a_socket_without_certificates(
    token: str, authority: Authority, server_tls: Callable[..., ssl.SSLContext]
) -> None:
    facts = replace(make_facts("owner"), boot_id="b", local_path="/run/kv.sock.peers")
    caller = make_caller(tls=client_tls(authority.cert, authority.issue("node-b")), token=token)
    async with (
        owner_node(tls=server_tls(), authorize=by_certificate, facts=facts) as owner,
        link_to(owner.address, caller=caller) as link,
    ):
        await link.ping()
        assert link.facts is not None
        assert bool(link.facts.local_path) is bool(token)
