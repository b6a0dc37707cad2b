"""Settings name one source of members, or what is wrong with them."""

from time import time

import pytest

from kvservice.model.errors import ConfigError
from kvservice.peers.directory import Directory
from kvservice.peers.dns import DnsSource
from kvservice.peers.etcd import EtcdSource
from kvservice.peers.membership import Membership
from kvservice.peers.sources import check_sources, member_source
from kvservice.peers.static import StaticSource
from tests.peers.members import ManualClock


@pytest.mark.parametrize(
    ("shared", "etcd", "kind"),
    [
        ("a:1,b:2", "", StaticSource),
        ("dns:cache.test:7000", "", DnsSource),
        ("", "http://127.0.0.1:2379", EtcdSource),
        ("", "", type(None)),
    ],
)
async def test_settings_name_a_source(shared: str, etcd: str, kind: type) -> None:
    check_sources(shared, etcd)
    source = member_source(shared, etcd, time)
    assert type(source) is kind
    if source is not None:
        directory = Directory(ManualClock(), knows_liveness=source.knows_liveness)
        await Membership(source, directory, lambda _: None).stop()


@pytest.mark.parametrize(
    ("shared", "etcd", "reason"),
    [
        ("a:1", "http://127.0.0.1:2379", "both set"),
        ("a", "", "is not an address"),
        (" ", "", "names no node"),
        ("dns:name", "", "is not an address"),
        ("", "127.0.0.1:2379", "must begin with https"),
    ],
)
def test_settings_that_cannot_be_right_stop_the_boot(shared: str, etcd: str, reason: str) -> None:
    for check in (check_sources, lambda one, other: member_source(one, other, time)):
        with pytest.raises(ConfigError, match=reason):
            check(shared, etcd)
