"""From settings to a source of members."""

from collections.abc import Callable

from kvservice.model.errors import ConfigError
from kvservice.peers.dns import DnsSource, parse_resolver
from kvservice.peers.etcd import EtcdSource
from kvservice.peers.etcd_gateway import EtcdGateway
from kvservice.peers.etcd_place import parse_etcd_url
from kvservice.peers.membership import MemberSource
from kvservice.peers.static import StaticSource, parse_addresses

_DNS = ("dns:", "srv:")


def member_source(shared: str, etcd: str, clock: Callable[[], float]) -> MemberSource | None:
    """Who says which shared nodes there are; None if both settings are empty. Raises ConfigError. ``clock``: unix time.

    ``shared``: ``host:port,host:port``, ``dns:NAME:PORT`` or ``srv:NAME``. ``etcd``: a URL (etcd_place.py).
    """
    check_sources(shared, etcd)
    if etcd:
        return EtcdSource(EtcdGateway(parse_etcd_url(etcd)), clock=clock)
    if shared.strip().startswith(_DNS):
        return DnsSource(parse_resolver(shared))
    return StaticSource(parse_addresses(shared)) if shared else None


def check_sources(shared: str, etcd: str) -> None:
    """Raise ConfigError for settings that cannot be right; opens nothing."""
    if shared and etcd:
        raise ConfigError("shared and etcd are both set: etcd lists the shared nodes, leave one of the two empty")
    if etcd:
        parse_etcd_url(etcd)
    elif shared.strip().startswith(_DNS):
        parse_resolver(shared).close()
    elif shared:
        parse_addresses(shared)
