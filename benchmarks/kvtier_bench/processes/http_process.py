"""The far end and the peer of a gateway: an engine that streams at once, and a plain proxy of the same framework.

`python -m kvtier_bench.processes.http_process engine` and `... proxy URL` print `ready url=URL` and serve until
SIGTERM. The proxy does nothing but hand on: it neither reads bodies as JSON nor knows anybody.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

import aiohttp
import uvloop
from aiohttp import web

NUM_EVENTS = 20
"""Events of a streamed answer, each a piece of its own."""
MODEL = "bench"
_EVENT = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "word "}}]}).encode() + b"\n\n"
_READ_AHEAD_BYTES = 1 << 15

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def _engine(request: web.BaseRequest) -> web.StreamResponse:
    if request.method == "GET":
        pages = {"/v1/models": json.dumps({"data": [{"id": MODEL}]}), "/metrics": "kvtier_engine_running 0\n"}
        return web.Response(text=pages.get(request.path, ""))
    await request.read()
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for _ in range(NUM_EVENTS):
        await answer.write(_EVENT)
        await asyncio.sleep(0)
    await answer.write(b"data: [DONE]\n\n")
    return answer


def _proxy(session: aiohttp.ClientSession, target: str) -> Handler:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with session.post(target + request.raw_path, data=body, headers=headers) as response:
            passed = web.StreamResponse(status=response.status)
            passed.headers["Content-Type"] = response.headers["Content-Type"]
            await passed.prepare(request)
            async for piece in response.content.iter_any():
                await passed.write(piece)
            await passed.write_eof()
            return passed

    return answer


async def _main(kind: str, target: str) -> None:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, read_bufsize=_READ_AHEAD_BYTES
    ) as session:
        handler = _engine if kind == "engine" else _proxy(session, target)
        server = web.Server(handler, access_log=None)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        print(f"ready url=http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
