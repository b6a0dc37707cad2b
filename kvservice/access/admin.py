"""The admin's verbs, on a unix socket of their own (mode 0600): nobody reaches them over the network.

    curl --unix-socket kvservice.sock.admin -X POST http://node/reload
    curl --unix-socket kvservice.sock.admin -X POST 'http://node/delete-namespace?namespace=HEX'
    curl --unix-socket kvservice.sock.admin http://node/access

A verb that changes something is a POST. Further verbs (drain) are added by who owns them.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from aiohttp import web

from kvservice.access.guard import Guard
from kvservice.access.principal import INTERNAL
from kvservice.access.tenant_stats import quota_document
from kvservice.data_socket import bind_private
from kvservice.model.errors import InvalidInputError, KVServiceError
from kvservice.model.identity import Namespace
from kvservice.node import Node
from kvservice.stats.http import refusal

Verb = Callable[[Mapping[str, str]], Awaitable[Mapping[str, object]]]
"""Does something with a query's parameters; raises KVServiceError."""
TENANTS_TOLD_MAX = 1024
STOP_GRACE_S = 2.0
"""A verb that runs while the node stops is cut off then."""


class AdminSocket:
    """Serves verbs on ``path``. Add all of them before ``start``."""

    def __init__(self, path: Path, node: Node, guard: Guard) -> None:
        self._path = path
        self._application = web.Application()
        self._runner: web.AppRunner | None = None
        self.add("reload", partial(_reload, guard))
        self.add("delete-namespace", partial(_delete_namespace, node))
        self.add("access", partial(_access, node, guard), method="GET")

    def add(self, name: str, verb: Verb, method: str = "POST") -> None:
        """Answer ``name`` with what ``verb`` does."""
        self._application.router.add_route(method, f"/{name}", partial(_answer, verb))

    async def start(self) -> None:
        """Bind and answer until ``stop``."""
        self._runner = web.AppRunner(self._application, access_log=None, shutdown_timeout=STOP_GRACE_S)
        await self._runner.setup()
        await web.SockSite(self._runner, bind_private(self._path)).start()

    async def stop(self) -> None:
        """Close and remove the socket. Safe to call twice."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()
            self._path.unlink(missing_ok=True)


async def _answer(verb: Verb, request: web.Request) -> web.Response:
    try:
        return web.json_response(dict(await verb(request.query)))
    except KVServiceError as error:
        return refusal(error)


async def _reload(guard: Guard, _: Mapping[str, str]) -> Mapping[str, object]:
    """Read access file and certificates again; what is wrong is told, and the old rules stay."""
    guard.reload()
    return {"problem": guard.problem}


async def _access(node: Node, guard: Guard, _: Mapping[str, str]) -> Mapping[str, object]:
    gate = guard.gate
    tenants = sorted({space.identity.tenant for space in node.catalog.spaces.values()} | {*gate.quotas.table.by_tenant})
    return {
        "problem": guard.problem,
        "reloads": gate.reloads,
        "refused_callers": gate.refused,
        "refused_calls": gate.buckets.refused,
        "refused_by_quota": dict(gate.quotas.refused),
        "tenants": {name: quota_document(node, gate, name) for name in tenants[:TENANTS_TOLD_MAX]},
    }


async def _delete_namespace(node: Node, query: Mapping[str, str]) -> Mapping[str, object]:
    """Every cache of one namespace, whoever's it is; how many there were, here or elsewhere, whichever is more."""
    try:
        namespace = Namespace(bytes.fromhex(query.get("namespace", "")))
    except ValueError as error:
        raise InvalidInputError(f"namespace={query.get('namespace')!r}: give it in hexadecimal") from error
    space = node.catalog.spaces.get(namespace)
    if space is None:
        raise InvalidInputError(f"nothing is held for namespace {namespace.hex() or '(none given)'}")
    session = node.open_session("admin", [space.identity.canonical_json()], may_write=True, principal=INTERNAL)
    try:
        if node.sharing is None:
            return {"deleted": await node.delete(session, (), namespace)}
        held = [cache.key for cache in space.caches()]
        with node.sharing.deleting([space], None):
            deleted = await node.delete(session, (), namespace)
            elsewhere = await node.sharing.delete([space], None, held)
        return {"deleted": max(deleted, elsewhere)}
    finally:
        node.close_session(session.id)
