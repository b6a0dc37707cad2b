"""`kvservice doctor`: proves a round trip against a running node, or says what is wrong and what to do.

Every run has a namespace of its own and deletes what it wrote; what others stored, another doctor too, is never
touched.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import rope_from_parameters
from kvservice.wire.v1 import cache_pb2

HEALTH_TIMEOUT_S = 5.0
SERVICE_NAME = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name
TOKENS, LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 48, 2, 2, 32, 16, 16
MOVED_BY = 5
REFRESHED_ROWS = (7, 8, 30)

Report = Callable[[str, bool, str], None]
"""(what was checked, does it hold, what to know or to do)."""


def run_doctor(socket: str, console: Console | None = None) -> int:
    """Check the node at a unix socket. Prints one line a check; exit status 1 at the first that fails."""
    screen = console or Console()

    def report(what: str, holds: bool, note: str) -> None:
        mark = "[green]ok  [/]" if holds else "[red]FAIL[/]"
        screen.print(f"{mark} {what}" + (f"  [dim]{note}[/]" if note else ""), highlight=False, soft_wrap=True)

    checks: Sequence[Callable[[str, Report], bool]] = (_check_socket, _check_health, _check_torch, _check_round_trip)
    is_well = all(check(socket, report) for check in checks)
    screen.print("The node keeps its promises." if is_well else "Mend the line marked FAIL and run this again.")
    return 0 if is_well else 1


def _check_socket(socket: str, report: Report) -> bool:
    path = Path(socket)
    if path.is_socket():
        report(f"socket {path}", True, "")
        return True
    hint = "it is no socket" if path.exists() else "it is not there"
    report(f"socket {path}", False, f"{hint}; start `kvservice serve`, or name its socket with --socket")
    return False


def _check_health(socket: str, report: Report) -> bool:
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=HEALTH_TIMEOUT_S)
        except grpc.RpcError as error:
            report("health", False, f"{_status(error)}; a stale socket of a node that is gone? restart the node")
            return False
    is_serving = reply.status == health_pb2.HealthCheckResponse.SERVING
    report("health", is_serving, "" if is_serving else "the node is starting or stopping; try again")
    return bool(is_serving)


def _status(error: grpc.RpcError) -> str:
    call: Any = error
    return f"{call.code().name}: {call.details()}"


def _check_torch(_: str, report: Report) -> bool:
    try:
        import torch
    except ImportError as error:
        report("torch", False, f"{error}; the client needs it: pip install 'kvservice[client]'")
        return False
    report("torch", True, torch.__version__)
    return True


def _check_round_trip(socket: str, report: Report) -> bool:
    try:
        return RoundTrip(f"unix:{socket}", report).run()
    except UnavailableError as error:
        report("session", False, str(error))
    except KVServiceError as error:
        report("round trip", False, f"{error.code}: {error}")
    return False


def doctor_identity() -> Identity:
    """A small identity, another for every run: two doctors at once must not delete each other's caches."""
    geometry = attention_geometry(layers=LAYERS, heads=HEADS, head_size=HEAD_SIZE, dtype="bfloat16")
    rope = rope_from_parameters({"rope_theta": 10000.0}, head_size=HEAD_SIZE, max_positions=4096)
    return Identity("kvservice-doctor", "doctor", "1", geometry, (rope,) * LAYERS, salt=secrets.token_hex(8))


@dataclass(slots=True)
class RoundTrip:
    """Stores a dense cache and a mirror of random KV, restores both, compares every bit, deletes them."""

    address: str
    report: Report
    failures: int = field(default=0)

    def run(self) -> bool:
        """True if every check held."""
        from kvservice.client.client import Client

        with Client.connect(self.address, doctor_identity(), client_name="doctor") as client:
            self._say("session and shared memory", True, f"boot epoch {client.session.boot_epoch}")
            try:
                self._round_trip(client)
            finally:
                client.delete()
            left = client.session.leases_held
            self._say("nothing left behind", left == 0, f"{left} leases held")
        return self.failures == 0

    def _say(self, what: str, holds: bool, note: str) -> None:
        self.failures += not holds
        self.report(what, holds, note)

    def _round_trip(self, client: Any) -> None:
        import torch

        from kvservice.client.rounds import PartKind, ReusePolicy, RoundPrompt

        torch.manual_seed(0)
        kv = torch.randn(LAYERS, 2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE).to(torch.bfloat16)
        views = [[kv[layer][0], kv[layer][1]] for layer in range(LAYERS)]
        shared, slots = list(range(TOKENS)), torch.arange(BLOCKS * BLOCK_SIZE)
        first = RoundPrompt.from_parts(client.namespace, [(PartKind.SHARED, shared)])
        stored = client.store(first, views, slots[:TOKENS])
        refused = next((one.error for one in stored.segments if one.error is not None), None)
        if refused is not None:
            raise refused
        self._say("store a dense cache", stored.stored_bytes > 0, f"{stored.stored_bytes} bytes")
        self._compare(client, views, first, slots[:TOKENS], slots[TOKENS : 2 * TOKENS], "restore it bit for bit")
        parts = [(PartKind.PRIVATE, [9] * MOVED_BY), (PartKind.SHARED, shared)]
        moved = RoundPrompt.from_parts(client.namespace, parts, policy=ReusePolicy("doctor", 0))
        begin = 2 * TOKENS
        places = slots[begin : begin + MOVED_BY + TOKENS]
        with client.lookup([moved]) as plans:
            client.restore(plans, views, [places]).wait()
            for row in REFRESHED_ROWS:
                kv.view(LAYERS, 2, -1, HEADS, HEAD_SIZE)[:, :, places[MOVED_BY + row]] += 1
            mirror = client.store(moved, views, places, base=plans[0], is_refreshed=True, segments=[1])
        share = mirror.stored_bytes / stored.stored_bytes
        self._say("store a moved, refreshed mirror", 0 < share < 1, f"{share:.2f} of the dense cache")
        fresh = slots[-(MOVED_BY + TOKENS) :]
        self._compare(client, views, moved, places, fresh, "restore it bit for bit, in another place")

    def _compare(self, client: Any, views: Any, prompt: Any, source: Any, target: Any, what: str) -> None:
        import torch

        with client.lookup([prompt]) as plans:
            client.restore(plans, views, [target], verify=True).wait()
            spans = plans[0].spans()
        rows = [index for span in spans for index in range(span.start, span.end)]
        planes = [plane.flatten(0, 1).view(torch.int16) for layer in views for plane in layer]
        is_equal = all(torch.equal(plane[source[rows]], plane[target[rows]]) for plane in planes)
        self._say(what, is_equal and len(rows) >= TOKENS, f"{len(rows)} tokens")
