"""``kvservice drain`` and ``kvservice members``: verbs of a running node's admin socket, for people and hooks."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from kvservice.model.errors import KVServiceError, UnavailableError, error_from_code

SPARE_S = 10.0
"""A node answers a little after the time that it was given."""


def drain(socket: str, timeout_s: float) -> tuple[int, str]:
    """Exit status and text of ``kvservice drain``."""
    told = ask(socket, "POST", "drain", {"timeout_s": str(timeout_s)}, timeout_s + SPARE_S)
    lines = [f"given away: {told['given']} caches; not given yet: {told['waiting']}"]
    lines += [f"  {count}: {why}" for why, count in told["reasons"].items()]
    lines.append("what was not given is lost with this node" if told["waiting"] else "the node may be stopped now")
    return int(told["waiting"] > 0), "\n".join(lines)


def members(socket: str, *, as_json: bool) -> str:
    """Text of ``kvservice members``."""
    told = ask(socket, "GET", "members", {}, SPARE_S)
    if as_json:
        return json.dumps(told, indent=2)
    lines = [f"this node: {told['name']} {told['uuid']}, peer port {told['peer_port'] or 'none'}"]
    if "members" not in told:
        return "\n".join([*lines, "it shares with no other node: see setting shared"])
    lines.append(f"members: {told['source']}" + (f", {told['reason']}" if told["reason"] else ""))
    for one in told["members"]:
        name = one["name"] or one["uuid"]
        lines.append(f"  {one['state']:<13} {name:<24} {one['address']:<24} warmth {one['warmth']:.2f}")
    lines += [f"  refused       {address}: {why}" for address, why in told["refused"].items()]
    return "\n".join(lines)


def ask(socket: str, method: str, verb: str, query: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """What a node's admin socket answers. Raises KVServiceError as the node says it, UnavailableError without one."""
    path = Path(socket)
    path = path.with_name(path.name + ".admin")
    try:
        return asyncio.run(_ask(path, method, verb, query, timeout_s))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise UnavailableError(f"no node answers at {path}: {error}. Is `kvservice serve` running?") from error


async def _ask(path: Path, method: str, verb: str, query: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=timeout) as session,
        session.request(method, f"http://node/{verb}", params=query) as reply,
    ):
        told: dict[str, Any] = await reply.json(content_type=None)
    if reply.status != 200:
        raise _error_of(told)
    return told


def _error_of(told: Mapping[str, Any]) -> KVServiceError:
    return error_from_code(str(told.get("error", "")), str(told.get("message", told)))
