"""Members from DNS: by the system's resolver, and SRV records from a real server on loopback (needs dnspython)."""

import asyncio
import importlib
import socket
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from kvservice.model.errors import ConfigError, UnavailableError
from kvservice.peers.directory import Directory
from kvservice.peers.dns import DnsSource, HostResolver, ServiceResolver, parse_resolver
from kvservice.peers.member import Address, SourceState
from tests.peers.members import LIMITS, ManualClock, facts, place, roll


class ScriptedResolver:
    """Answers in turn; the last one again and again."""

    name = "scripted.test"

    def __init__(self, *answers: list[Address] | UnavailableError) -> None:
        self._answers = list(answers)

    async def resolve(self, deadline_s: float) -> list[Address]:
        assert deadline_s > 0
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, UnavailableError):
            raise answer
        return answer

    def close(self) -> None:
        self._answers.clear()


class Naps:
    """Sleeps of no time, that are remembered."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0)


async def test_rolls_come_when_something_changed_in_any_order() -> None:
    naps, away = Naps(), UnavailableError("no server answers")
    resolver = ScriptedResolver([place(2), place(1)], [place(1), place(2)], away, [], [place(1)])
    source = DnsSource(resolver, poll_s=10, sleep=naps, draw=lambda: 0.0)
    seen = []
    async with aclosing(source.watch()) as rolls:
        async for one in rolls:
            seen.append(one)
            if len(seen) == 4:
                break
    assert seen[0] == roll(1, 2)
    assert [one.state for one in seen[1:]] == [SourceState.UNREACHABLE, SourceState.EMPTY, SourceState.LISTED]
    assert "scripted.test" in seen[2].reason
    assert naps.seconds == [8.0] * 4
    await source.close()


async def test_dns_that_returns_nothing_leaves_the_last_known_members_for_a_grace_time() -> None:
    clock = ManualClock()
    source = DnsSource(ScriptedResolver([place(1)], []))
    directory = Directory(clock, knows_liveness=source.knows_liveness, limits=LIMITS)
    directory.apply(await source.members())
    directory.heard(place(1), facts(1))
    directory.apply(await source.members())
    assert directory.source_state is SourceState.EMPTY
    assert len(directory.owners(b"x" * 32).read) == 1
    clock.pass_(LIMITS.grace_s)
    directory.apply(await source.members())
    assert directory.members == []


async def test_the_systems_resolver_finds_loopback() -> None:
    resolver = parse_resolver("dns:localhost:7000")
    found = await resolver.resolve(5)
    assert Address("127.0.0.1", 7000) in found
    assert len(set(found)) == len(found)
    resolver.close()


@pytest.mark.parametrize("number", [socket.EAI_NONAME, socket.EAI_NODATA])
async def test_a_name_without_addresses_is_nobody(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", failing(socket.gaierror(number, "no such name")))
    resolver = HostResolver(Address("nobody.invalid", 7000))
    assert await resolver.resolve(5) == []
    resolver.close()


@pytest.mark.parametrize(
    "error",
    [socket.gaierror(socket.EAI_AGAIN, "try again"), OSError("no network"), UnicodeError("label too long")],
)
async def test_a_resolver_that_fails_is_unreachable_not_nobody(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", failing(error))
    source = DnsSource(HostResolver(Address("node.test", 7000)))
    found = await source.members()
    assert found.state is SourceState.UNREACHABLE
    assert "node.test" in found.reason
    await source.close()


async def test_a_resolver_that_hangs_is_given_up_and_not_asked_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, asked = threading.Event(), []

    def hang(*_: object, **__: object) -> list[Any]:
        asked.append(1)
        gate.wait(20)
        return [(0, 0, 0, "", ("127.0.0.9", 7000))]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    resolver = HostResolver(Address("slow.test", 7000))
    for _ in range(3):
        with pytest.raises(UnavailableError, match=r"did not answer for slow\.test within 0\.01 s"):
            await resolver.resolve(0.01)
    gate.set()
    assert await resolver.resolve(5) == [Address("127.0.0.9", 7000)]
    assert len(asked) == 1
    resolver.close()


def failing(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> list[Any]:
        raise error

    return fail


@pytest.mark.parametrize("text", ["dns:", "dns:name", "dns:name:0", "srv:", "a:1", "", "txt:name"])
def test_what_names_no_records_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_resolver(text)


def test_srv_without_dnspython_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=r"pip install 'kvservice\[dns\]'"):
        parse_resolver("srv:_kvservice._tcp.cache.test")


# SRV, with a real server


class DnsServer:
    """Answers SRV questions over UDP from a table; ``is_silent``: never."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[str, int]] | None] = {}
        self.is_silent = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = Address(*self._socket.getsockname())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        message: Any = importlib.import_module("dns.message")
        rrset: Any = importlib.import_module("dns.rrset")
        while True:
            data, sender = self._socket.recvfrom(4096)
            if not data:
                return
            if self.is_silent:
                continue
            query = message.from_wire(data)
            reply, name = message.make_response(query), query.question[0].name
            found = self.records.get(str(name).rstrip("."))
            if found is None:
                reply.set_rcode(3)
            elif found:
                texts = [f"0 5 {port} {host}." for host, port in found]
                reply.answer.append(rrset.from_text(name, 0, "IN", "SRV", *texts))
            self._socket.sendto(reply.to_wire(), sender)

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", tuple(self.address))
        self._thread.join()
        self._socket.close()


@pytest.fixture
def server() -> Iterator[DnsServer]:
    pytest.importorskip("dns", reason="dnspython is not installed: pip install 'kvservice[dns]'")
    server = DnsServer()
    yield server
    server.close()


NAME = "_kvservice._tcp.cache.test"


async def test_srv_records_name_hosts_and_ports(server: DnsServer) -> None:
    server.records = {NAME: [("Node-0.cache.test", 7000), ("node-1.cache.test", 7001)], "empty.test": []}
    resolver = ServiceResolver(NAME, server.address)
    assert sorted(await resolver.resolve(5)) == [Address("node-0.cache.test", 7000), Address("node-1.cache.test", 7001)]
    resolver.close()


async def test_srv_names_that_are_empty_or_absent_are_nobody(server: DnsServer) -> None:
    server.records = {"empty.test": [], "none.test": [("", 0)]}
    for name in ("empty.test", "absent.test", "none.test"):
        assert (await DnsSource(ServiceResolver(name, server.address)).members()).state is SourceState.EMPTY


async def test_an_srv_server_that_is_silent_is_unreachable_within_the_deadline(server: DnsServer) -> None:
    server.is_silent = True
    found = await DnsSource(ServiceResolver(NAME, server.address), deadline_s=0.2).members()
    assert found.state is SourceState.UNREACHABLE
    assert NAME in found.reason
