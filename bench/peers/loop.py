"""A minimal agent loop on the libraries and sandboxes of the proxy.

`python -m bench.peers.loop PORT BASE_URL KIND IMAGE`

Calls the model, runs its tool calls and answers with the content of the answer file. The loop has
no limits, policies, validation, events or storage.
"""

import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from bench.backends import Kind, make_backend
from bench.instant_model import completion
from policies.isolation import Isolation
from policies.pool import PoolSettings
from policies.workspace import ANSWER_FILES
from sandbox_runtime.pool.pool import Pool
from sandbox_runtime.sandbox import Sandbox

COMMAND_TIMEOUT_S = 10
MAX_ANSWER_BYTES = 1 << 20
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("execute_bash", "str_replace_editor", "submit")
]


async def chat(request: Request) -> Response:
    """Serve one run in its own sandbox."""
    body = await request.json()
    messages = body["messages"]
    asked = {"model": body["model"], "messages": messages, "tools": TOOLS}
    async with request.app.state.pool.lease(Isolation()) as lease:
        sandbox = await lease.sandbox()
        answer = None
        while answer is None:
            async with request.app.state.session.post("chat/completions", json=asked) as reply:
                message = (await reply.json())["choices"][0]["message"]
            messages.append(message)
            for call in message["tool_calls"]:
                if call["function"]["name"] == "submit":
                    answer = await _read_text(sandbox, ANSWER_FILES[0])
                else:
                    observation = await _run_tool(
                        sandbox, json.loads(call["function"]["arguments"])
                    )
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": observation}
                    )
    said = {"role": "assistant", "content": answer}
    return Response(json.dumps(completion(said, "stop")), media_type="application/json")


async def health(request: Request) -> Response:
    """Return 200."""
    return PlainTextResponse("ok")


async def _run_tool(sandbox: Sandbox, arguments: Mapping[str, str]) -> str:
    if "path" in arguments:
        await sandbox.put(arguments["path"], _text_chunks(arguments["file_text"]))
        return "Created."
    command = arguments["command"]
    return (await sandbox.exec(command, timeout_s=COMMAND_TIMEOUT_S, stdin=None)).stdout


async def _text_chunks(text: str) -> AsyncIterator[bytes]:
    yield text.encode()


async def _read_text(sandbox: Sandbox, path: str) -> str:
    content = bytearray()

    async def take(piece: bytes) -> None:
        content.extend(piece)

    await sandbox.get(path, take, max_bytes=MAX_ANSWER_BYTES)
    return content.decode()


def create_app(base_url: str, kind: Kind, image: str) -> Starlette:
    """Return the server's application, which starts and closes its own sandbox pool."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as opened:
            directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            backend = make_backend(kind, image=image, state_dir=Path(directory))
            opened.push_async_callback(backend.aclose)
            app.state.pool = Pool(backend, PoolSettings(), [Isolation()])
            opened.push_async_callback(app.state.pool.aclose)
            app.state.pool.start()
            session = aiohttp.ClientSession(f"{base_url}/")
            app.state.session = await opened.enter_async_context(session)
            yield

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    port, base_url, kind, image = sys.argv[1:]
    app = create_app(base_url, "docker" if kind == "docker" else "bubblewrap", image)
    uvicorn.run(app, host="127.0.0.1", port=int(port), access_log=False)
