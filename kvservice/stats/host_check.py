"""Whom a node on loopback answers over HTTP: those who asked for this machine, not for a name that leads here.

A web page may have its own name lead to 127.0.0.1, and then read what is answered there (DNS rebinding).
"""

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from kvservice.model.errors import InvalidInputError
from kvservice.stats.asking import is_loopback
from kvservice.stats.http import refusal

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MISDIRECTED = 421


def host_check(bound: str) -> Middleware:
    """Refuses requests for other hosts, if ``bound`` is loopback. Who binds another address answers to any name."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        named = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdigit() else request.host
        if is_loopback(bound) and not is_loopback(named):
            text = f"this node answers on loopback only, not as {named!r}; ask for http://127.0.0.1 or localhost"
            return refusal(InvalidInputError(text), MISDIRECTED)
        return await handler(request)

    return check
