"""How nodes learn of each other's Flight ports: in greetings, in etcd, and from the settings."""

import json
from dataclasses import replace

import pytest

from kvservice.model.errors import ConfigError, InvalidInputError
from kvservice.peers.etcd import decode_member, encode_member
from kvservice.peers.member import Address, Facts, FlightAddress, parse_address
from kvservice.peers.static import parse_addresses
from kvservice.peers.streams_messages import decode_facts, encode_facts
from kvservice.wire.v1 import peer_pb2 as wire
from tests.peers.stream_world import make_facts

FACTS = replace(make_facts("a"), flight_port=50154, empty_s=3.0)


@pytest.mark.parametrize("facts", [FACTS, replace(FACTS, flight_port=0)])
def test_a_greeting_says_the_flight_port(facts: Facts) -> None:
    assert decode_facts(wire.PeerFacts.FromString(encode_facts(facts).SerializeToString())) == facts


def test_a_port_that_cannot_be_is_refused() -> None:
    said = encode_facts(FACTS)
    said.flight_port = 65536
    with pytest.raises(InvalidInputError, match="65536"):
        decode_facts(said)


@pytest.mark.parametrize("address", [Address("10.0.0.1", 50153), FlightAddress("10.0.0.1", 50154)])
def test_etcd_keeps_it_and_nodes_without_one_write_what_they_always_wrote(address: Address) -> None:
    listing = decode_member(str(FACTS.node.uuid), encode_member(address, FACTS, 100.0), 100.0)
    assert (listing.address, type(listing.address), listing.facts) == (address, type(address), FACTS)
    fields = json.loads(encode_member(address, replace(FACTS, flight_port=0), 100.0))
    assert "flight" not in fields
    for wrong in ("50154", -1, 65536, True):
        value = json.dumps(fields | {"flight": wrong}).encode()
        with pytest.raises(ConfigError):
            decode_member(str(FACTS.node.uuid), value, 100.0)


def test_addresses_in_the_settings_may_be_of_flight_ports() -> None:
    plain, flight = parse_addresses("a.example:1, flight://[::1]:50154")
    assert (type(plain), type(flight)) == (Address, FlightAddress)
    assert (str(plain), str(flight)) == ("a.example:1", "flight://[::1]:50154")
    assert parse_address(str(flight)) == flight
    for wrong in ("flight://a", "flight://", "flight://flight://a:1", "grpc://a:1"):
        with pytest.raises(ConfigError):
            parse_address(wrong)
    with pytest.raises(ConfigError, match="twice"):
        parse_addresses("a:1,flight://a:1")
