"""Callers: what one shows, and who it is found to be. Pure data.

A token is a secret of the caller, so no text and no ``repr`` here holds one.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """What a caller may do, besides seeing its own tenants' figures."""

    ENGINE = "engine"
    """Opens sessions: looks up and stores for its tenants."""
    NODE = "node"
    """Another node: fetches and stores records for its tenants over the peer port, and what an engine may."""
    VIEWER = "viewer"
    """Reads the figures of the whole node over HTTP: Prometheus, a person at the page. Opens no session."""
    ADMIN = "admin"
    """All of it, and what undoes the work of others: deleting a whole namespace."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a caller shows. ``certificate_names``: the names in a certificate that TLS has verified, none without one.

    ``is_local``: it came through a socket that only this user, or only this machine, can reach.
    """

    token: str = field(default="", repr=False)
    certificate_names: tuple[str, ...] = ()
    is_local: bool = False


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How much one principal may ask for, over all its connections; 0 is no limit."""

    calls_per_s: float = 0.0
    bytes_per_s: int = 0
    sessions_max: int = 0


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller that proved who it is. ``tenants``: those it may name, None: all.

    ``proof``: what proved it, the public name of a token or a certificate; ``expires_s``: until when, in seconds of the
    epoch.
    """

    name: str
    role: Role
    tenants: frozenset[str] | None = None
    limits: CallLimits = CallLimits()
    proof: str = ""
    expires_s: float = math.inf

    def may(self, tenant: str) -> bool:
        """May it name this tenant? Asked before anything is looked up, so that the answer tells nothing of others."""
        return self.tenants is None or tenant in self.tenants

    @property
    def is_node(self) -> bool:
        """May it speak for a node over the peer port?"""
        return self.role in (Role.NODE, Role.ADMIN)

    @property
    def is_admin(self) -> bool:
        """May it undo the work of others?"""
        return self.role is Role.ADMIN

    @property
    def sees_all(self) -> bool:
        """May it read figures of all tenants?"""
        return self.role in (Role.VIEWER, Role.ADMIN)

    @property
    def may_open_sessions(self) -> bool:
        """May it look up and store?"""
        return self.role is not Role.VIEWER

    def tenants_text(self) -> str:
        """Its tenants, for a message to itself."""
        return "every tenant" if self.tenants is None else ", ".join(sorted(self.tenants)) or "no tenant"


LOCAL = Principal("local", Role.ADMIN)
"""Who comes over the unix socket, which only this user can open, unless the access file says otherwise."""

INTERNAL = Principal("internal", Role.ADMIN)
"""The node itself, in sessions that it opens for its own work."""
