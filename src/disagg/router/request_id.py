"""Every response carries X-Request-Id: the client's own when it is sane, else a fresh one."""

import re
import uuid
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NAME: Final = b"x-request-id"
_SANE: Final = re.compile(rb"[!-~]{1,256}")  # printable, no spaces: safe in headers and logs


class RequestIdHeader:
    """ASGI middleware; adds the header where the response starts and touches nothing else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _NAME), b"")
        request_id = given if _SANE.fullmatch(given) else uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_NAME, request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)
