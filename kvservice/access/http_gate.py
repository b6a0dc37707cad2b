"""Whom a node answers over HTTP when it asks who calls: viewers and admins, since its documents are of all tenants.

Others get one answer for every path, so that nothing can be learnt from which paths there are. /healthz is for all.
"""

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from kvservice.access.authorization import token_of
from kvservice.access.gate import Gate
from kvservice.access.principal import Credentials, Principal
from kvservice.access.tls import names_in_peercert
from kvservice.model.errors import ForbiddenError, KVServiceError, RateError, UnauthenticatedError
from kvservice.stats.http import refusal

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_PATHS = ("/healthz",)
CHALLENGE = 'Basic realm="kvservice: any name, and a token as the password"'


def http_gate(gate: Gate, *, is_local: bool) -> Middleware:
    """Asks for a token or a certificate. ``is_local``: plaintext on loopback, where one need not show any."""

    @web.middleware
    async def ask(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS:
            return await handler(request)
        try:
            _admit(gate, request, is_local=is_local)
        except UnauthenticatedError as error:
            answer = refusal(error, 401)
            answer.headers["WWW-Authenticate"] = CHALLENGE
            return answer
        except RateError as error:
            return refusal(error, 429)
        except KVServiceError as error:
            return refusal(error, 403)
        return await handler(request)

    return ask


def _admit(gate: Gate, request: web.Request, *, is_local: bool) -> None:
    principal = _principal_of(gate, request, is_local=is_local)
    gate.buckets.admit(principal)
    gate.buckets.charge(principal, request.content_length or 0)
    if not principal.sees_all:
        raise ForbiddenError(f"{principal.name} may not read figures of all tenants: its role is {principal.role}")


def _principal_of(gate: Gate, request: web.Request, *, is_local: bool) -> Principal:
    certificate = None if request.transport is None else request.transport.get_extra_info("peercert")
    token = token_of(request.headers.get("Authorization", ""))
    return gate.authorize(Credentials(token, names_in_peercert(certificate), is_local))
