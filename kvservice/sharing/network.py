"""A node among others: its peer port, the members it knows, cold storage; opened after the node, closed before it.

Built from settings alone. What cannot be reached at the start is tried again behind it; what is wrong stops the boot.
"""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvservice.access.guard import Guard
from kvservice.access.outgoing import Outgoing
from kvservice.building import BuiltNode
from kvservice.config import Settings, is_loopback
from kvservice.model.errors import ConfigError, InvalidInputError, KVServiceError
from kvservice.model.identity import Namespace
from kvservice.peers.directory import Directory, DirectoryLimits
from kvservice.peers.etcd import EtcdRegistration
from kvservice.peers.etcd_gateway import EtcdGateway
from kvservice.peers.etcd_place import parse_etcd_url
from kvservice.peers.flight_client import FlightLink
from kvservice.peers.flight_server import FlightServer
from kvservice.peers.flight_words import require_flight
from kvservice.peers.host_node import NodeHost
from kvservice.peers.locality import boot_id
from kvservice.peers.member import FLIGHT, Address, Facts, FlightAddress, LocalAddress, NodeId, is_local_path
from kvservice.peers.node_uuid import identity_on, open_state_folder, passing_identity
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Medium
from kvservice.peers.sources import member_source
from kvservice.peers.streams_client import PeerLink
from kvservice.peers.streams_client_dialler import Caller
from kvservice.peers.streams_limits import LinkLimits
from kvservice.peers.streams_local_channel import LOCAL_IDLE_S
from kvservice.peers.streams_local_server import LocalServer
from kvservice.peers.streams_packed import PackedStream
from kvservice.peers.streams_server import StreamServer
from kvservice.peers.weights import Ramp
from kvservice.sharing.cluster import Alone, Cluster, Link, OnChange, OpenLink
from kvservice.sharing.cold import ColdPlace
from kvservice.sharing.draining import Drain
from kvservice.sharing.packed_sums import PackedSums
from kvservice.sharing.routed import RoutedPlace
from kvservice.stats.others_document import others_document
from kvservice.stats.sharing_document import NetworkDocument, network_document
from kvservice.storage.disk import Disk
from kvservice.storage.remote.contract import RemoteTier
from kvservice.storage.remote.opening import open_remote

DRAIN_S, DRAIN_S_MAX = 60.0, 3600.0
WARM_S = 1e9
"""Of a node that found caches on its SSD: it has been filling for long."""
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  compared with, not bound to
_LOG = logging.getLogger(__name__)


class Network:
    """``async with Network(...)``: opened and closed on the node's loop. ``port``: of the peer port, 0 without one;
    ``flight_port`` the same of the Flight port."""

    def __init__(self, settings: Settings, built: BuiltNode, guard: Guard) -> None:
        self.port = self.flight_port = 0
        self.cluster: Cluster | None = None
        self.router, self.given = Router(time.monotonic), Router(time.monotonic, direction="to")
        """How records come, and how they go."""
        self._packed = PackedSums()
        self._settings = settings
        self._built = built
        self._node = built.node
        self._guard = guard
        self._outgoing = Outgoing(settings, guard.certificates)
        self._is_draining = False
        self._is_stopping = asyncio.Event()
        self._began_s = time.monotonic()
        self._stack = AsyncExitStack()
        self._server: StreamServer | None = None
        self._local_server: LocalServer | None = None
        self._local_path = ""
        self._registration: EtcdRegistration | None = None
        self._name = settings.node_name or socket.gethostname()[:64]
        self._node_id = passing_identity(self._node.boot_epoch)

    @property
    def is_needed(self) -> bool:
        """Does this node have anything to do with others?"""
        settings = self._settings
        has_port = settings.peer_port >= 0 or settings.flight_port >= 0
        return has_port or bool(settings.shared or settings.etcd or settings.cold)

    def facts(self) -> Facts:
        """What this node says of itself to others."""
        settings = self._settings
        size = settings.host_bytes + (settings.ssd_bytes if settings.ssd_folder else 0)
        is_warm = self._node.ssd is not None and self._node.ssd.began_with_caches
        empty_s = WARM_S if is_warm else time.monotonic() - self._began_s
        return Facts(
            self._node_id,
            self._name,
            float(size),
            self._is_draining,
            empty_s,
            self.flight_port,
            boot_id() if self._local_path else "",
            self._local_path,
        )

    async def open(self) -> None:
        """Open what the settings say. Raises ConfigError, DiskError; what was opened is closed again then."""
        if not self.is_needed:
            return
        try:
            self._node_id = self._identity()
            self._node.describe_network = self.figures
            self._outgoing.check()
            await self._open_server()
            await self._open_flight_server()
            await self._open_places()
            await self._register()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave the others first, then take no more of their calls. Places are the node's to close. Safe twice."""
        self.end_drain()
        await self._stack.aclose()

    # Parts

    def _identity(self) -> NodeId:
        settings, now_ns = self._settings, time.time_ns()
        if settings.state_folder:
            disk: Disk = open_state_folder(Path(settings.state_folder), f"kvservice at {settings.socket_path}")
            self._stack.callback(disk.close)
            return identity_on(disk, now_ns, self._node.boot_epoch if self._built.disk else None)
        if self._built.disk is not None:
            return identity_on(self._built.disk, now_ns, self._node.boot_epoch)
        return passing_identity(self._node.boot_epoch)

    async def _open_server(self) -> None:
        settings, certificates = self._settings, self._guard.certificates
        if settings.peer_port < 0:
            return
        host = NodeHost(self._node, asyncio.get_running_loop(), self.facts, self._guard.gate.buckets)
        self._server = server = StreamServer(
            host,
            (settings.peer_address, settings.peer_port),
            authorize=self._guard.authorize,
            is_current=self._guard.gate.is_current,
            tls=None if certificates is None else certificates.server_context(),
        )
        self._stack.push_async_callback(asyncio.to_thread, server.stop)
        self.port = await asyncio.to_thread(server.start)
        await self._open_local_server(host, server)

    async def _open_local_server(self, host: NodeHost, server: StreamServer) -> None:
        """Beside the peer port, of whose ways it is only one more: without it others come over that."""
        if not self._settings.shares_memory:
            return
        path = self._settings.peers_socket_path.absolute()
        local = LocalServer(
            host,
            path,
            self._built.arena,
            sessions=server.sessions,
            authorize=self._guard.authorize,
            is_current=self._guard.gate.is_current,
        )
        self._stack.push_async_callback(asyncio.to_thread, local.stop)
        try:
            await asyncio.to_thread(local.start)
        except ConfigError as error:
            _LOG.warning("nodes of this host share over TCP, not in shared memory: %s", error)
            return
        self._local_server = local
        self._local_path = str(path) if is_local_path(str(path)) else ""

    async def _open_flight_server(self) -> None:
        settings, certificates = self._settings, self._guard.certificates
        if settings.flight_port < 0:
            return
        server = FlightServer(
            NodeHost(self._node, asyncio.get_running_loop(), self.facts, self._guard.gate.buckets),
            (settings.peer_address, settings.flight_port),
            sessions=None if self._server is None else self._server.sessions,
            authorize=self._guard.authorize,
            tls=None if certificates is None else certificates.pem_files,
        )
        self._stack.push_async_callback(asyncio.to_thread, server.stop)
        self.flight_port = await asyncio.to_thread(server.start)

    async def _open_places(self) -> None:
        settings = self._settings
        cold = ColdPlace(_shown(settings.cold), self._open_cold, self._guard.gate.quotas) if settings.cold else None
        if cold is not None:
            await cold.open()
        behind = None if cold is None else RoutedPlace(self.router, {Medium.COLD: cold})
        if FLIGHT in settings.shared:
            require_flight()
        source = member_source(settings.shared, settings.etcd, time.time)
        if source is None:
            if behind is not None:
                self._node.share(Alone(behind), settings.push, is_gated=settings.is_load_gated)
            return
        limits = DirectoryLimits(
            grace_s=settings.member_grace_s, ramp=Ramp(settings.member_warm_s), replicas=settings.replicas
        )
        directory = Directory(time.monotonic, knows_liveness=source.knows_liveness, limits=limits)
        self.cluster = cluster = Cluster(
            source,
            directory,
            self._openers(),
            self.facts,
            self._is_self,
            self._place,
            behind,
        )
        self._node.share(cluster, settings.push, is_gated=settings.is_load_gated)
        assert self._node.sharing is not None
        wake = self._node.sharing.pushes.wake
        cluster.on_live, cluster.on_emptied = wake, lambda _: wake()
        self._stack.push_async_callback(cluster.stop)
        await cluster.start()

    async def _open_cold(self) -> RemoteTier:
        return await open_remote(self._settings.cold, deadline_s=self._settings.cold_deadline_s)

    def _openers(self) -> dict[Medium, OpenLink]:
        """What makes links, by medium. Without that of shared memory none is read, whatever others say of theirs."""
        openers: dict[Medium, OpenLink] = {Medium.STREAM: self._link, Medium.FLIGHT: self._flight_link}
        if self._settings.shares_memory:
            openers[Medium.SHARED_MEMORY] = self._local_link
        return openers

    def _link(self, address: Address, on_change: OnChange) -> PeerLink:
        caller = Caller(self.facts, self._outgoing.token, self._outgoing.context)
        limits = LinkLimits(deadline_s=self._settings.peer_deadline_s)
        link = PeerLink(address, caller, arena=self._built.arena, limits=limits, on_change=on_change)
        self._packed.watch(link, link.counters)
        return link

    def _place(self, medium: Medium, link: Link) -> RoutedPlace:
        """Where the node behind a first link is. A stream can pack what was rounded."""
        packed = PackedStream(link) if medium is Medium.STREAM and isinstance(link, PeerLink) else None
        return RoutedPlace(self.router, {medium: link}, packed=packed, given=self.given, is_lossy=self._is_lossy)

    def _is_lossy(self, namespace: Namespace) -> bool:
        space = self._node.catalog.spaces.get(namespace)
        return space is not None and space.identity.is_lossy

    def _local_link(self, address: LocalAddress, on_change: OnChange) -> PeerLink:
        return PeerLink(
            address,
            Caller(self.facts, self._outgoing.token),
            arena=self._built.arena,
            identity_of=self._identity_of,
            limits=LinkLimits(deadline_s=self._settings.peer_deadline_s, idle_s=LOCAL_IDLE_S),
            on_change=on_change,
        )

    def _flight_link(self, address: FlightAddress, on_change: OnChange) -> FlightLink:
        return FlightLink(
            address,
            Caller(self.facts, self._outgoing.token),
            pem=self._outgoing.pem,
            identity_of=self._identity_of,
            limits=LinkLimits(deadline_s=self._settings.peer_deadline_s),
            on_change=on_change,
        )

    def _identity_of(self, namespace: Namespace) -> str | None:
        space = self._node.catalog.spaces.get(namespace)
        return None if space is None else space.identity.canonical_json()

    def _is_self(self, address: Address) -> bool:
        """Does it lead to a port of ours? An address is ours if a socket can be bound to it."""
        port = self.flight_port if isinstance(address, FlightAddress) else self.port
        if not port or address.port != port:
            return False
        bound = self._settings.peer_address
        if bound not in _EVERYWHERE:
            return address.host == bound or (address.host == "localhost" and is_loopback(bound))
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address.host, 0))
            except OSError:
                return False
        return True

    async def _register(self) -> None:
        settings = self._settings
        if not (self.port or self.flight_port) or not settings.etcd:
            return
        host = settings.peer_address
        if host in _EVERYWHERE:
            host = socket.gethostname()
        address = Address(host, self.port) if self.port else FlightAddress(host, self.flight_port)
        gateway = EtcdGateway(parse_etcd_url(settings.etcd))
        self._registration = registration = EtcdRegistration(
            gateway, address, self.facts, clock=time.time, on_refused=self._note_refused
        )
        self._stack.push_async_callback(registration.stop)
        await registration.start()

    def _note_refused(self, error: KVServiceError) -> None:
        _LOG.error("this node is no member any more, and serves its own engines only: %s", error)

    # Draining

    async def drain_verb(self, query: Mapping[str, str]) -> Mapping[str, object]:
        """``drain`` of the admin socket; ``timeout_s``: how long to give caches away at most."""
        text = query.get("timeout_s", str(DRAIN_S))
        try:
            timeout_s = float(text)
        except ValueError as error:
            raise InvalidInputError(f"timeout_s={text!r}: give seconds") from error
        if not 0 < timeout_s <= DRAIN_S_MAX:
            raise InvalidInputError(f"timeout_s={text}: give 0 to {DRAIN_S_MAX:g} seconds")
        return await self.drain(timeout_s)

    async def members_verb(self, _: Mapping[str, str]) -> Mapping[str, object]:
        """``members`` of the admin socket: who is there, as this node sees it."""
        return self.document()

    def figures(self) -> NetworkDocument:
        """The same as numbers."""
        cluster, servers = self.cluster, [one for one in (self._server, self._local_server) if one is not None]
        states = Counter() if cluster is None else Counter(one.state for one in cluster.directory.members)
        links = () if cluster is None else cluster.links.values()
        storages = () if self._node.sharing is None else self._node.sharing.directory.storages()
        return network_document(
            dict(states),
            sum(not link.is_answering for link in links),
            sum(one.connections for one in servers),
            sum(one.refused for one in servers),
            self.router.log,
            self.given.log,
            self._packed.total(one.counters for one in servers),
            others_document(cluster, storages, self.router, self.given, self._node_id.uuid),
        )

    def document(self) -> dict[str, object]:
        """This node and the members it knows."""
        own, cluster = self.facts(), self.cluster
        document: dict[str, object] = {
            "uuid": str(own.node.uuid),
            "epoch": own.node.epoch,
            "name": own.name,
            "peer_port": self.port,
            "flight_port": self.flight_port,
            "is_draining": self._is_draining,
        }
        if cluster is not None:
            document |= {
                "source": cluster.directory.source_state,
                "reason": cluster.directory.source_reason,
                "members": cluster.directory.document(),
                "refused": {str(address): why for address, why in cluster.directory.refused.items()},
            }
        return document

    async def drain(self, timeout_s: float) -> dict[str, Any]:
        """Take no new caches from others, give away what only this node has, and say how that went.

        Reads go on meanwhile, and after it: the process is ended by whoever asked for this.
        """
        self._is_draining = True
        if self._registration is not None:
            await self._registration.update()
        if self.cluster is not None:
            self.cluster.tell_own()
        sharing = self._node.sharing
        pushes = None if sharing is None else sharing.pushes
        return await Drain(self._node.catalog, pushes, self._is_stopping).run(timeout_s)

    def end_drain(self) -> None:
        """The node stops: a drain that runs ends now, and says what it did not get to."""
        self._is_stopping.set()


def _shown(url: str) -> str:
    """A URL without what may be a secret in it."""
    scheme, colon, rest = url.partition("://")
    return f"{scheme}{colon}{rest.rpartition('@')[2].partition('?')[0]}"
