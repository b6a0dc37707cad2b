"""Arrow Flight under TLS: certificates of both sides, and what does not fit them."""

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvservice.access.principal import Credentials, Principal, Role
from kvservice.access.tls import Certificates, PemFiles
from kvservice.model.errors import ConfigError, UnauthenticatedError, UnavailableError
from kvservice.peers.flight_client import FlightLink
from kvservice.store import WriteRequest
from tests.access.certificates import Authority, Pair
from tests.peers.flight_world import fetch_verified, find_record, flight_node, flight_to
from tests.peers.stream_world import BIG, BIG_TOKENS, HASTY, make_caller, make_record, settled
from tests.server.builders import make_identity, make_meta, make_planes


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def pem_of(authority: Authority, pair: Pair | None) -> PemFiles:
    """What a node's settings name, as the ports read it; without a pair: of a caller that shows no certificate."""
    if pair is None:
        return PemFiles(b"", b"", authority.cert.read_bytes())
    return Certificates(pair.cert, pair.key, authority.cert).pem_files()


def by_certificate(credentials: Credentials) -> Principal:
    if "node-b" not in credentials.certificate_names:
        raise UnauthenticatedError("no certificate of a node")
    return Principal("node-b", Role.NODE)


async def test_records_come_and_go_under_tls(authority: Authority) -> None:
    server, client = (
        pem_of(authority, authority.issue(name, is_client=name != "owner")) for name in ("owner", "node-b")
    )
    async with (
        flight_node(tls=server, authorize=by_certificate) as owner,
        flight_to(owner.flight_address, pem=client) as link,
    ):
        meta = await owner.store("one")
        got = await fetch_verified(link, await find_record(link, owner.identity, meta))
        assert bytes(got) == bytes(owner.bytes_of(meta))
        new = make_meta(make_identity(BIG), "new", tokens=BIG_TOKENS)
        view, checksum = make_record(new, make_planes(BIG, BIG_TOKENS))
        request = WriteRequest(new.namespace, new.key, len(view), None, 0.25)
        assert await link.give(request, view, checksum, owner.identity.canonical_json())


async def test_a_token_is_enough_where_callers_show_no_certificate(authority: Authority) -> None:
    def by_token(credentials: Credentials) -> Principal:
        assert not credentials.certificate_names
        if credentials.token != "right":
            raise UnauthenticatedError("not a caller that this node knows")
        return Principal("peer", Role.NODE)

    pair = authority.issue("owner")
    server = PemFiles(pair.cert.read_bytes(), pair.key.read_bytes())
    async with flight_node(tls=server, authorize=by_token) as owner:
        for token in ("right", "wrong"):
            caller = make_caller(token=token)
            async with flight_to(owner.flight_address, pem=pem_of(authority, None), caller=caller) as link:
                if token == "right":
                    await link.ping()
                else:
                    with pytest.raises(UnauthenticatedError):
                        await link.ping()


@pytest.mark.parametrize("what", ["unknown authority", "expired", "another name", "no tls"])
async def test_a_node_with_a_wrong_certificate_is_not_believed(what: str, authority: Authority, tmp_path: Path) -> None:
    pair = authority.issue("late", is_expired=True, file="late") if what == "expired" else authority.issue("owner")
    believed = Authority(tmp_path / "other") if what == "unknown authority" else authority
    caller = make_caller(server_name="elsewhere" if what == "another name" else "")
    server = None if what == "no tls" else PemFiles(pair.cert.read_bytes(), pair.key.read_bytes())
    async with (
        flight_node(tls=server) as owner,
        flight_to(owner.flight_address, pem=pem_of(believed, None), caller=caller, limits=HASTY) as link,
    ):
        with pytest.raises(UnavailableError):
            await link.ping()


@pytest.mark.parametrize("who", ["nobody", "another node", "a stranger", "expired"])
async def test_a_caller_without_its_certificate_is_refused(who: str, authority: Authority, tmp_path: Path) -> None:
    server = pem_of(authority, authority.issue("owner"))
    if who == "a stranger":
        pair = Authority(tmp_path / "other").issue("node-b", is_client=True)
        client = PemFiles(pair.cert.read_bytes(), pair.key.read_bytes(), authority.cert.read_bytes())
    elif who == "nobody":
        client = pem_of(authority, None)
    else:
        name = "node-c" if who == "another node" else "node-b"
        client = pem_of(authority, authority.issue(name, is_client=True, is_expired=who == "expired", file=who[:4]))
    kind = UnauthenticatedError if who == "another node" else UnavailableError
    async with (
        flight_node(tls=server, authorize=by_certificate) as owner,
        flight_to(owner.flight_address, pem=client, limits=HASTY) as link,
    ):
        with pytest.raises(kind):
            await link.ping()
        assert owner.flight.sessions.count == 0


async def test_a_caller_without_tls_is_not_understood(authority: Authority) -> None:
    server = pem_of(authority, authority.issue("owner"))
    async with flight_node(tls=server) as owner, flight_to(owner.flight_address, limits=HASTY) as link:
        with pytest.raises(UnavailableError):
            await link.ping()


def test_certificates_that_are_gone_are_named_and_those_read_before_stay(authority: Authority) -> None:
    pair = authority.issue("short", file="short")
    certificates = Certificates(pair.cert, pair.key)
    before = certificates.pem_files()
    assert "PRIVATE" not in repr(before)
    pair.cert.unlink()
    with pytest.raises(ConfigError, match=r"short\.pem"):
        Certificates(pair.cert, pair.key)
    assert not certificates.reload()
    assert certificates.pem_files() is before


class Files:
    """What certificates a side has, until they are exchanged."""

    def __init__(self, pem: PemFiles) -> None:
        self.pem = pem

    def __call__(self) -> PemFiles:
        return self.pem


async def test_a_new_certificate_is_shown_to_who_comes_and_what_runs_goes_on(
    authority: Authority, tmp_path: Path
) -> None:
    new = Authority(tmp_path / "new")
    files = Files(server_pem(authority))
    begun, goes_on = threading.Event(), threading.Event()
    async with flight_node(tls=files) as owner, flight_to(owner.flight_address, pem=pem_of(authority, None)) as old:
        meta = await owner.store("one")
        record = await find_record(old, owner.identity, meta)
        target = np.zeros(record.record_bytes, np.uint8)

        def on_piece(_: int, __: int) -> None:
            begun.set()
            goes_on.wait(30.0)

        running = asyncio.create_task(old.fetch(record, target, on_piece))
        await asyncio.to_thread(begun.wait, 30.0)
        files.pem = server_pem(new)
        async with flight_to(owner.flight_address, pem=pem_of(new, None)) as link:
            await until_answered(link)
            goes_on.set()
            await running
            assert bytes(target) == bytes(owner.bytes_of(meta))
            got = await fetch_verified(link, await find_record(link, owner.identity, meta))
            assert bytes(got) == bytes(target)
        with pytest.raises(UnavailableError):
            await old.ping()  # it does not believe the new one


async def test_sessions_and_leases_outlive_an_exchange(authority: Authority) -> None:
    files = Files(server_pem(authority))
    async with flight_node(tls=files) as owner, flight_to(owner.flight_address, pem=pem_of(authority, None)) as link:
        record = await find_record(link, owner.identity, await owner.store("one"))
        before = owner.flight._shown
        files.pem = server_pem(authority)
        await settled(lambda: owner.flight._shown is not before)
        await until_answered(link)
        assert bytes(await fetch_verified(link, record))
        assert owner.flight.sessions.count == 1


async def test_an_exchange_of_the_same_files_disturbs_nobody(authority: Authority) -> None:
    pem = server_pem(authority)
    files = Files(pem)
    async with flight_node(tls=files) as owner, flight_to(owner.flight_address, pem=pem_of(authority, None)) as link:
        await link.ping()
        endpoint = owner.flight._shut
        files.pem = PemFiles(bytes(bytearray(pem.cert)), bytes(bytearray(pem.key)))
        await link.ping()
        await asyncio.to_thread(threading.Event().wait, 0.2)
        assert owner.flight._shut is endpoint


async def test_a_callers_new_certificate_is_shown_with_its_next_call(authority: Authority) -> None:
    server = pem_of(authority, authority.issue("owner"))
    wrong, right = (pem_of(authority, authority.issue(name, is_client=True)) for name in ("node-c", "node-b"))
    files = Files(wrong)
    async with (
        flight_node(tls=server, authorize=by_certificate) as owner,
        flight_to(owner.flight_address, pem=files) as link,
    ):
        with pytest.raises(UnauthenticatedError):
            await link.ping()
        files.pem = right
        await until_answered(link)


def server_pem(authority: Authority) -> PemFiles:
    pair = authority.issue("owner")
    return PemFiles(pair.cert.read_bytes(), pair.key.read_bytes())


async def until_answered(link: FlightLink) -> None:
    """A port that is being opened anew refuses calls for a moment."""
    for _ in range(300):
        with suppress(UnavailableError):
            await link.ping()
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it does not answer")
