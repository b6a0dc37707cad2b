"""What guards one node: the gate, the certificates, and the task that has both read again when their files change.

A caller whose token expired or was taken away loses its sessions within WATCH_S, and with them what they held.
"""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvservice.access.gate import Gate
from kvservice.access.principal import Credentials, Principal
from kvservice.access.tls import Certificates
from kvservice.config import Settings, is_loopback

if TYPE_CHECKING:
    from kvservice.node import Node

WATCH_S = 1.0
_LOG = logging.getLogger(__name__)


class Guard:
    """Built before the node; ``attach`` it before the node starts. Raises ConfigError for files that do not fit."""

    def __init__(self, settings: Settings) -> None:
        self.gate = Gate(Path(settings.access_file) if settings.access_file else None)
        self.certificates: Certificates | None = None
        if settings.is_tls:
            ca = Path(settings.tls_client_ca) if settings.tls_client_ca else None
            self.certificates = Certificates(Path(settings.tls_cert), Path(settings.tls_key), ca)
        self.is_local = not settings.is_tls and is_loopback(settings.host)
        """Are the ports of gRPC and HTTP plaintext on loopback?"""
        if settings.insecure_plaintext:
            _LOG.warning("insecure_plaintext is set: who is on the way to this node's ports reads and changes all")
        self._node: Node | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def asks_callers(self) -> bool:
        """Must callers of the network's ports be looked at?"""
        return self.certificates is not None or self.gate.path is not None

    @property
    def problem(self) -> str:
        """What is wrong with a file that was read last; empty: nothing."""
        certificates = "" if self.certificates is None else self.certificates.problem
        return "; ".join(filter(None, (self.gate.problem, certificates)))

    def authorize(self, credentials: Credentials) -> Principal:
        """Who calls at the peer port; from any thread. Over TLS everybody shows something, on this machine too: others
        than this user can reach a port on loopback. Raises UnauthenticatedError."""
        is_local = credentials.is_local and self.certificates is None
        return self.gate.authorize(replace(credentials, is_local=is_local))

    def attach(self, node: "Node") -> None:
        """Let the gate's quotas rule the node."""
        self._node = node
        node.allocation.room.quotas = self.gate.quotas
        self.gate.on_change += [node.allocation.room.enforce_all, self.end_stale_sessions]

    def start(self) -> None:
        """Enforce quotas on what a start brought, and watch the files, in the running loop."""
        assert self._node is not None, "attached before"
        self._node.allocation.room.enforce_all()
        if self.asks_callers:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """Watch no more. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def reload(self) -> None:
        """Read all files again, as at SIGHUP; ``problem`` says what is wrong with them."""
        self.gate.reload()
        if self.certificates is not None:
            self.certificates.reload()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self.look()
            except Exception:  # noqa: BLE001  a task's top: the old rules stay, and the next look may do better
                _LOG.exception("looking at access file and certificates failed. Please report this")

    def look(self) -> None:
        """Read again what has changed, and end the sessions of callers that have no right to them any more."""
        self.gate.reload_if_changed()
        if self.certificates is not None:
            self.certificates.reload_if_changed()
        self.end_stale_sessions()

    def end_stale_sessions(self) -> None:
        """End sessions whose principal is gone, changed, or expired; others get its limits as they are now."""
        if self._node is None:
            return
        sessions = list(self._node.sessions.open.values())
        current = {one: self.gate.current(one) for one in {session.principal for session in sessions}}
        for session in sessions:
            found = current[session.principal]
            if found is not None:
                session.principal = found
                continue
            _LOG.info("a session of %s ends: what proved it is in force no more", session.principal.name)
            self._node.close_session(session.id)
