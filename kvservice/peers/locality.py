"""Whether another node runs on this host, for the same user: then each may read the other's arena.

Nothing is gained by it. A process of the same user that sees the same processes can open the arena through /proc
anyway; one in another container is let in because the folder of the socket was given to it.
"""

import os
import socket
import stat
import struct
from functools import cache
from pathlib import Path

from kvservice.model.errors import ForbiddenError
from kvservice.peers.member import Facts, LocalAddress

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred


@cache
def boot_id() -> str:
    """What the kernel calls its boot; empty where it does not say."""
    try:
        return BOOT_ID_FILE.read_text().strip()
    except OSError:
        return ""


def local_address(facts: Facts) -> LocalAddress | None:
    """Where a node can be met on this host; None: it runs on another one, for another user, or where this process does
    not see its files. Copies of a machine have one boot id: who is met must be the node that said so."""
    path = facts.local_path
    if not path or not facts.boot_id or facts.boot_id != boot_id():
        return None
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    is_ours = stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
    return LocalAddress(path, facts.node) if is_ours else None


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a unix socket, as the kernel knows it: of who listened, or of who connected."""
    said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(said)[1])


def require_same_user(sock: socket.socket) -> None:
    """Raises ForbiddenError unless this user is at the other end."""
    uid, own = peer_uid(sock), os.geteuid()
    if uid != own:
        raise ForbiddenError(f"user {uid} may not read the memory of user {own}; share over the peer port")
