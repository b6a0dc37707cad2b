"""Hosts of a test's own: network namespaces on one switch, with nodes in them. Needs root and iproute2."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvservice.config import process_environment

SUBNET = "10.77.9"
PEER_PORT = 50153
AS_BOOT = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
"""For ``sh``: what follows sees a host of another boot, which shares no memory with others."""


def why_not() -> str:
    """Why this machine has no hosts to give; empty if it has."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    name = f"kvp{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    run("ip", "netns", "del", name)
    return ""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@dataclass
class Host:
    """One namespace. ``link``: the switch's end of its cable."""

    name: str
    switch: str
    address: str
    link: str

    def plug(self, *, is_in: bool) -> None:
        """Put its cable in, or pull it."""
        run("ip", "-n", self.switch, "link", "set", self.link, "up" if is_in else "down")

    def slow_down(self, rate: str) -> bool:
        """Let it send no faster; False where the kernel cannot."""
        command = ["ip", "netns", "exec", self.name, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"]
        options = ["rate", rate, "burst", "64kb", "latency", "2s"]
        return not subprocess.run([*command, *options], capture_output=True, check=False).returncode

    @contextmanager
    def serving(self, folder: Path, *flags: str) -> Iterator["subprocess.Popen[str]"]:
        """``kvservice serve`` on this host; its unix socket can be reached from everywhere on this machine."""
        folder.mkdir(parents=True, exist_ok=True)
        boot = folder / "boot_id"
        boot.write_text(self.name)
        command = [
            "ip", "netns", "exec", self.name, "sh", "-c", AS_BOOT, str(boot),
            sys.executable, "-m", "kvservice", "serve", "--socket", str(folder / "kv.sock"), "--grpc-port", "-1",
            "--http-port", "-1", "--host-bytes", "64MiB", "--insecure-plaintext", "true", "--peer-host", self.address,
            *flags,
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=process_environment())
        assert process.stdout is not None
        try:
            assert "unix:" in process.stdout.readline()
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.stdout.close()


@contextmanager
def hosts(count: int) -> Iterator[Sequence[Host]]:
    """So many hosts that reach each other."""
    mark = f"kv{os.getpid()}"
    switch = f"{mark}s"
    with ExitStack() as stack:
        _namespace(stack, switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        found = [Host(f"{mark}h{n}", switch, f"{SUBNET}.{n + 1}", f"p{n}") for n in range(count)]
        for host in found:
            _namespace(stack, host.name)
            run("ip", "link", "add", host.link, "netns", switch, "type", "veth", "peer", "eth0", "netns", host.name)
            run("ip", "-n", switch, "link", "set", host.link, "master", "br0", "up")
            run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", host.name, "link", "set", device, "up")
        yield found


def _namespace(stack: ExitStack, name: str) -> None:
    run("ip", "netns", "add", name)
    stack.callback(run, "ip", "netns", "del", name)
