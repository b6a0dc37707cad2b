"""Builds a node from settings: the arena, what was recovered from the SSD folder, and the node that stands on both."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvservice.caches import Cache
from kvservice.config import Settings
from kvservice.curves.bounds import curve_limits
from kvservice.killpoints import Killer, KillPoint
from kvservice.node import Node, NodeLimits
from kvservice.orders import LOAD_RATES, Orders
from kvservice.request_log import RequestLog
from kvservice.ssd import SsdPolicy
from kvservice.storage.arena import Arena
from kvservice.storage.disk import Disk, RealDisk
from kvservice.storage.eviction import AgeOrder, EvictionOrder, ValueOrder
from kvservice.storage.host_tier import HostTier
from kvservice.storage.recovery import INDEX_NAME, Opened, recover
from kvservice.storage.rocks_index import RocksPlace


@dataclass(frozen=True, slots=True)
class BuiltNode:
    """A node and what it stands on. The node is stopped before ``close``."""

    node: Node
    arena: Arena
    disk: Disk | None

    def close(self) -> None:
        """Give up the arena, and the SSD folder with its lock. Safe to call twice."""
        self.arena.close()
        if self.disk is not None:
            self.disk.close()


def build_node(settings: Settings, data_socket: str, *, owns_process: bool = False) -> BuiltNode:
    """A node, with what its SSD tier holds; blocks while that is recovered. Raises ConfigError, DiskError.

    The boot epoch rises with every start: it is the start time, or with an SSD tier never below the last one.
    ``owns_process``: the node may tune the process's garbage collector.
    """
    killer, disk, opened = Killer(settings.kill_point), None, None
    with ExitStack() as on_error:
        if settings.ssd_folder:
            disk = RealDisk(Path(settings.ssd_folder))
            on_error.callback(disk.close)
            opened = _recover(disk, settings, killer)
            on_error.callback(opened.slab.close)
            on_error.callback(opened.index.close)
        arena = Arena(settings.host_bytes, is_prefaulted=settings.is_prefaulted)
        on_error.callback(arena.close)
        node = Node(
            NodeLimits(sessions_max=settings.sessions_max, lease_ttl_s=settings.lease_ttl_s),
            HostTier(arena, settings.staged_bytes),
            clock=time.monotonic,
            boot_epoch=time.time_ns() if opened is None else opened.boot_epoch,
            data_socket=data_socket,
            worker_threads=settings.worker_threads,
            owns_process=owns_process,
            orders=Orders(_order(settings), _order(settings), LOAD_RATES),
            killer=killer,
            curve_limits=curve_limits(settings.curve_records),
        )
        node.request_log = RequestLog(settings.log_segments) if settings.log_segments else None
        if disk is not None and opened is not None:
            node.attach_ssd(disk, opened, _policy(settings))
        on_error.pop_all()
    return BuiltNode(node, arena, disk)


def _recover(disk: Disk, settings: Settings, killer: Killer) -> Opened:
    holder = f"kvservice at {settings.socket_path}"
    return recover(
        disk,
        settings.ssd_bytes,
        place=RocksPlace(disk.folder / INDEX_NAME, is_durable=settings.is_ssd_durable),
        holder=holder,
        before_index=lambda: killer.reach(KillPoint.IN_REBUILD),
    )


def _order(settings: Settings) -> EvictionOrder[Cache]:
    return ValueOrder() if settings.eviction == "value" else AgeOrder()


def _policy(settings: Settings) -> SsdPolicy:
    return SsdPolicy(
        is_write_through=settings.ssd_write == "through",
        is_durable=settings.is_ssd_durable,
        write_budget_bytes=settings.ssd_write_budget_bytes,
        free_floor_bytes=settings.ssd_free_floor_bytes,
        scrub_bytes_per_s=settings.scrub_bytes_per_s,
        threads=settings.ssd_threads,
        flush_s=settings.flush_s,
    )
