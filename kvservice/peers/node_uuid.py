"""Who this node is: a uuid in a small file of its own folder, and an epoch that rises with every boot.

    node.json := {"version": 1, "uuid": text}        mode 0600, replaced at once or not at all (Disk.write_small)
    epoch     := decimal number                      of the last boot; an SSD folder has it anyway (clean_marker.py)

The folder is locked, so two processes on one host never share it. Copies of it elsewhere are found out by the others
(fence.py, etcd.py).
"""

import json
import logging
import uuid
from pathlib import Path
from uuid import UUID

from kvservice.peers.member import NodeId
from kvservice.storage.clean_marker import next_epoch, read_epoch, write_epoch
from kvservice.storage.disk import Disk, RealDisk

NODE_NAME = "node.json"
VERSION = 1

log = logging.getLogger(__name__)


def open_state_folder(folder: Path, holder: str) -> Disk:
    """The folder, made if need be and locked. Raises ConfigError if another process has it, DiskError. Close it."""
    disk = RealDisk(folder)
    try:
        disk.lock(holder)
    except BaseException:
        disk.close()
        raise
    return disk


def identity_on(disk: Disk, now_ns: int, boot_epoch: int | None = None) -> NodeId:
    """Who the node with this locked folder is; a new uuid is made, for good, where there is none. Raises DiskError.

    ``boot_epoch``: this boot's, if the caller has settled it (an SSD tier has); otherwise it is made and kept here.
    """
    found = _read(disk)
    if found is None:
        found = uuid.uuid4()
        disk.write_small(NODE_NAME, json.dumps({"version": VERSION, "uuid": str(found)}).encode() + b"\n")
        log.info("this node is %s, as %s says from now on", found, disk.folder / NODE_NAME)
    if boot_epoch is None:
        boot_epoch = next_epoch([read_epoch(disk)], now_ns)
        write_epoch(disk, boot_epoch)
    return NodeId(found, boot_epoch)


def passing_identity(boot_epoch: int) -> NodeId:
    """Who a node without any folder is: somebody else with every boot."""
    return NodeId(uuid.uuid4(), boot_epoch)


def _read(disk: Disk) -> UUID | None:
    data = disk.read_small(NODE_NAME)
    if data is None:
        return None
    try:
        fields = json.loads(data)
        if fields["version"] != VERSION:
            raise ValueError(f"version {fields['version']!r}, this program reads {VERSION}")  # noqa: TRY301
        return UUID(fields["uuid"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning(
            "%s is damaged (%r): this node gets a new uuid, and others take it for a new one",
            disk.folder / NODE_NAME,
            error,
        )
        return None
