"""A streamed answer: server-sent events as OpenAI's API sends them."""

import contextlib

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvtier_engine.api.answers import LAST_EVENT, AnswerFormat, event
from kvtier_engine.api.generation import Generation, Piece
from kvtier_engine.api.http_requests import ApiError


class EventStream(Response):
    """Sends a generation's text as it comes; owns the generation.

    Begins with the first text, so that what fails before is an error response like any other. What fails later is an
    event with `error`, without `[DONE]` after it. A slow reader delays `send` and thereby `read`: what comes meanwhile
    waits as tokens in the generation's feed, and goes out as one chunk.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: AnswerFormat) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation, self._answer = generation, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._generation):
            pieces = await self._generation.read()
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await _send(send, *map(event, self._answer.first_chunks()))
                while self._generation.num_open:
                    await _send(send, *self._events(pieces))
                    pieces = await self._generation.read()
                await _send(send, *self._events(pieces), *map(event, self._answer.usage_chunks()), LAST_EVENT)
            except ClientDisconnect:
                pass
            except ApiError as error:
                await _send(send, event(error.body))
            await send({"type": "http.response.body", "body": b""})

    def _events(self, pieces: list[Piece]) -> list[bytes]:
        return [event(chunk) for piece in pieces for chunk in self._answer.chunks(piece)]


async def _send(send: Send, *events: bytes) -> None:
    if events:
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
