"""Opens the sessions of one connector, and says once why the service gives none, and once that it does again.

Imports no engine and no torch. What is told holds no secret: messages name a token's file, never what is in it.
"""

import logging
import threading
from collections.abc import Sequence

from kvservice.client.connectors.service_options import ServiceOptions
from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.model.errors import KVServiceError, UnauthenticatedError
from kvservice.model.identity import Identity


class Entrance:
    """Safe from any thread. The breakers of its users say how often it is tried; token and certificates are read from
    their files each time, so that new ones count from the next try on."""

    def __init__(self, options: ServiceOptions, log: logging.Logger) -> None:
        self._address = options.address
        self._security = options.security
        self._log = log
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def open(self, identities: Sequence[Identity], *, is_writer: bool, client_name: str) -> Session:
        """A new session. Raises what keeps it from being opened, a KVServiceError."""
        transport = SharedMemoryTransport(self._address, self._security)
        try:
            session = Session(transport, identities, is_writer=is_writer, client_name=client_name)
        except KVServiceError as error:
            self._tell_shut(error)
            raise
        self._tell_open()
        return session

    def _tell_shut(self, error: KVServiceError) -> None:
        """Once for each kind of trouble: others of its kind say nothing new."""
        with self._lock:
            is_news = error.code not in self._told
            self._told.add(error.code)
        if is_news:
            shown = self._security.token if isinstance(error, UnauthenticatedError) else ""
            self._log.warning(
                "kvservice: no session with %s: %s%s. The engine goes on without cache; the service is tried again, "
                "and this is told once",
                self._address,
                error,
                f" (the token is read from {shown})" if shown else "",
            )

    def _tell_open(self) -> None:
        if not self._told:  # the usual case
            return
        with self._lock:
            was_shut = bool(self._told)
            self._told.clear()
        if was_shut:
            self._log.warning("kvservice: there is a session with %s again", self._address)
