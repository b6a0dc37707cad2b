"""Limits of the streams between nodes, on both sides."""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """``handshake_s``: from the first byte to the welcome, TLS included. ``idle_s``: without a request.

    ``slow_s``: for one frame of at most 4 MiB to be taken or brought by the other side: slower ones are cut off.
    ``host_s``: for the node behind. ``proof_s``: how often it is looked at whether what proved a caller still does.
    ``fetches_max``: records of one connection that were sent and not confirmed. ``sends_files``: see Channel.
    ``ahead_bytes_max``: of first layers that go with one answer.
    """

    connections_max: int = 512
    connections_per_peer_max: int = 16
    handshake_s: float = 5.0
    idle_s: float = 120.0
    slow_s: float = 10.0
    host_s: float = 90.0
    proof_s: float = 1.0
    watch_interval_s: float = 0.25
    find_queries_max: int = 1024
    sends_files: bool | None = None
    fetches_max: int = 64
    fetch_bytes_max: int = 256 * MIB
    ahead_bytes_max: int = 8 * MIB


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Of one peer. ``deadline_s``: of a call, and of every silence in the middle of a record.

    A record may take ``deadline_s`` and its bytes at ``bytes_per_s_min`` in all. ``connections``: one for questions,
    the others for records. ``fetch_bytes_max``: asked for on one connection and not here yet. ``resumes_max``: how
    often a record is taken up where it broke off. ``pause_s``: how soon a lost peer is knocked at again, at first.
    ``idle_s``: a connection without calls is closed. ``sends_files``: see Channel.
    """

    deadline_s: float = 1.0
    bytes_per_s_min: float = 1.0 * MIB
    connections: int = 4
    fetch_bytes_max: int = 64 * MIB
    fetches_max: int = 32
    waiting_max: int = 4096
    resumes_max: int = 3
    failures_max: int = 3
    pause_s: float = 1.0
    pause_s_max: float = 30.0
    lease_ttl_s: float = 0.0
    find_queries_max: int = 512
    keys_max: int = 4096
    sends_files: bool | None = None
    idle_s: float = 60.0
