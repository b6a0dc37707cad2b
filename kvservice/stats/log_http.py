"""GET /log.parquet and /log.arrow: the request log as a file. One at a time, copied in slices and made in a thread."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from kvservice.model.errors import ConfigError, InvalidInputError, LimitError
from kvservice.stats.http import refusal
from kvservice.stats.log_table import FORMATS, log_file, require_pyarrow

if TYPE_CHECKING:
    from kvservice.node import Node


def add_log(application: web.Application, node: "Node") -> None:
    """Let ``application`` answer for every format."""
    turn = asyncio.Lock()
    for kind in FORMATS:
        application.router.add_get(f"/log.{kind}", partial(_export, node, turn, kind))


async def _export(node: "Node", turn: asyncio.Lock, kind: str, _: web.Request) -> web.Response:
    log = node.request_log
    if log is None:
        return refusal(InvalidInputError("the request log is off; start the node with log_segments"), status=404)
    if turn.locked():
        return refusal(LimitError("the log is being exported already; ask again"), status=429)
    async with turn:
        try:
            require_pyarrow()
        except ConfigError as error:
            return refusal(error, status=501)
        content = await asyncio.to_thread(log_file, await log.snapshot(), kind)
    headers = {"Content-Disposition": f'attachment; filename="kvservice-log.{kind}"'}
    return web.Response(body=content, content_type=FORMATS[kind], headers=headers)
