"""The routes of the page. It is three files of the package, read once; it gets its numbers over HTTP like anybody else.

Every text in those numbers comes from clients, so the page may run no script and load nothing but these files: the
policy below says so to the browser, and the script writes texts as texts.
"""

from functools import partial
from pathlib import Path

from aiohttp import web

FOLDER = Path(__file__).resolve().parent
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def add_page(application: web.Application) -> None:
    """Let ``application`` serve the page at ``/``."""
    for path, (name, kind) in FILES.items():
        application.router.add_get(path, partial(_file, (FOLDER / name).read_bytes(), kind))


async def _file(content: bytes, kind: str, _: web.Request) -> web.Response:
    return web.Response(body=content, content_type=kind, charset="utf-8", headers=HEADERS)
