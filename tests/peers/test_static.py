"""Addresses: what is one, what is none, and lists of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.model.errors import ConfigError
from kvservice.peers.backoff import Backoff
from kvservice.peers.fence import EPOCHS_MAX, Fence
from kvservice.peers.member import Address, Facts, NodeId
from kvservice.peers.static import StaticSource, parse_addresses
from tests.peers.members import node_id, node_uuid


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.7:50153", Address("10.0.0.7", 50153)),
        ("Node-1.cache.svc:1", Address("node-1.cache.svc", 1)),
        (" [::1]:65535 ", Address("::1", 65535)),
        ("[2001:DB8:0::1]:7000", Address("2001:db8::1", 7000)),
        ("node_1:7000", Address("node_1", 7000)),
    ],
)
def test_an_address_is_read_and_written_the_same(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "host", "host:", ":7000", "host:0", "host:65536", "host:-1", "host:7e3", "host:٣", "::1:7000"),
        *(
            "[::1]",
            "[host]:7000",
            "a b:7000",
            "-a:7000",
            "http://host:7000",
            "host/x:7000",
            "[::1:7000",
            "x" * 300 + ":1",
        ),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        Address.parse(text)


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        address = Address.parse(text)
    except ConfigError:
        return
    assert Address.parse(str(address)) == address


def test_a_list_names_every_node_once() -> None:
    assert [str(one) for one in parse_addresses("a:1, b:2,[::1]:3,")] == ["a:1", "b:2", "[::1]:3"]
    for text, reason in (("", "names no node"), (" , ", "names no node"), ("a:1,A:1", "a:1 stands twice")):
        with pytest.raises(ConfigError, match=reason):
            parse_addresses(text)
    with pytest.raises(ConfigError, match="the limit is 256"):
        parse_addresses(",".join(f"n{number}:1" for number in range(257)))


async def test_a_static_source_says_its_list_once() -> None:
    source = StaticSource(parse_addresses("a:1,b:2"))
    rolls = source.watch()
    assert await anext(rolls) == await source.members()
    await rolls.aclose()
    await source.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0.0},
        {"weight": float("nan")},
        {"weight": 1e19},
        {"empty_s": -1.0},
        {"name": "x" * 129},
        {"name": "a\n"},
    ],
)
def test_facts_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="says what cannot be"):
        Facts(node_id(1), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="says what cannot be"):
        Facts(NodeId(node_uuid(1), 1 << 63))


def test_a_fence_remembers_a_bounded_number_of_boots() -> None:
    fence = Fence()
    for number in range(EPOCHS_MAX + 10):
        fence.admit(node_id(number), "somewhere")
    assert fence.epoch_of(node_uuid(0)) is None
    assert fence.epoch_of(node_uuid(EPOCHS_MAX)) == 1


def test_waits_double_up_to_a_limit_and_are_drawn() -> None:
    backoff = Backoff(lambda: 1.0, first_s=1, max_s=5)
    assert [backoff.next_s() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.next_s() == 1
    assert Backoff(lambda: 0.0, first_s=1, max_s=5).next_s() == 0.5
