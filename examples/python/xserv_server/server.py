"""uvicorn, ended in good order: answers that run have some time to finish, and are then told why they do not."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import List, Optional

import uvicorn
from starlette.types import ASGIApp

from .connection import ConnectionLimits, with_limits
from .state import State

#: After the grace, for the last events to be sent.
LAST_SECONDS = 5


class GracefulServer(uvicorn.Server):
    """After SIGTERM or SIGINT: no new request is taken, those that run go on for `grace` seconds, and those that
    run then end with an error."""

    def __init__(self, config: uvicorn.Config, state: State, grace: float) -> None:
        super().__init__(config)
        self._state, self._grace = state, grace

    async def startup(self, sockets: Optional[List[socket.socket]] = None) -> None:
        await super().startup(sockets)
        for server in self.servers if self.started else ():
            for listening in server.sockets:
                # Connections have it from there: a peer that has vanished silently is detected.
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                host, port = listening.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                # Programs that start the server with port 0 read the port here.
                print(f"xserv-server: http://{shown}:{port}", file=sys.stderr, flush=True)

    async def shutdown(self, sockets: Optional[List[socket.socket]] = None) -> None:
        self._state.refuse_new()
        ending = asyncio.get_running_loop().call_later(self._grace, self._state.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def make_server(
    app: ASGIApp, state: State, host: str, port: int, grace: float, limits: ConnectionLimits
) -> GracefulServer:
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=with_limits(limits),
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(grace + LAST_SECONDS),
    )
    return GracefulServer(config, state, grace)
