"""Rollouts whose turns are written by another program, such as a trainer that runs the agent loop.

The proxy sends its model calls to a server in this process, which answers each one with the turn
that the program writes next. The rest of such a rollout is as usual: the sandbox, the limits, the
observations, the trajectory and the reward.
"""

import asyncio
import json
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from training.rollouts import Rollout, RolloutClient
from training.rows import TaskRow

Message = dict[str, Any]
T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE_S = 10.0
"""Seconds between the spaces that a waiting model call gets, so that the proxy's read timeout does
not end it. JSON permits spaces before a value."""


class ManualRollout:
    """A rollout whose turns the caller writes. Its methods wait for the proxy; call them from one
    thread."""

    def __init__(self, run: Coroutine[Any, Any, Rollout]) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls = asyncio.Queue[list[Message]]()
        self._turns = asyncio.Queue[Message]()
        self._is_ending = False
        self.run = asyncio.create_task(run)

    def prompt(self) -> list[Message]:
        """Return the messages with which the run begins. Call it once, before the first turn.
        Return no messages if the infrastructure has spoilt the run. Raises RolloutError."""
        return self._wait(self._next_call()) or []

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Write a turn that calls a tool, and return the texts that a model would read after it.
        Return None if the run has ended, for example after `submit`. Raises RolloutError."""
        return self._wait(self._call_tool(name, arguments))

    def end(self, answer: str) -> Rollout:
        """Write a last turn without a call, unless the run has ended, and return the rollout. If
        the proxy asks for further turns, they are empty. Raises RolloutError."""
        return self._wait(self._end(answer))

    def cancel(self) -> None:
        """End the run without an answer, unless it has ended."""
        self._loop.call_soon_threadsafe(self.run.cancel)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # In the server's thread

    async def answer_call(self, messages: list[Message]) -> Message:
        """Return the next turn for a model call with these messages."""
        self._calls.put_nowait(messages)
        if self._is_ending and self._turns.empty():
            return {"role": "assistant", "content": ""}
        return await self._turns.get()

    async def _next_call(self) -> list[Message] | None:
        """Return the messages of the proxy's next model call; None if the run has ended."""
        call = asyncio.create_task(self._calls.get())
        await asyncio.wait({call, self.run}, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            return call.result()
        call.cancel()
        self.run.result()  # raises RolloutError
        return None

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        if self.run.done():
            self.run.result()  # raises RolloutError
            return None
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
        self._turns.put_nowait({"role": "assistant", "content": "", "tool_calls": [call]})
        messages = await self._next_call()
        if messages is None:
            return None
        roles = [message["role"] for message in messages]
        last_reply = len(roles) - 1 - roles[::-1].index("assistant")
        return "\n".join(text_of(message) for message in messages[last_reply + 1 :])

    async def _end(self, answer: str) -> Rollout:
        if not self._is_ending:
            self._is_ending = True
            self._turns.put_nowait({"role": "assistant", "content": answer})
        return await self.run


class TurnServer:
    """Serves the turns of manual rollouts to a proxy, during a `with` block. The proxy's
    configuration must list the server's `url` in `backend.upstreams`."""

    def __init__(self, client: RolloutClient, *, host: str = "127.0.0.1", port: int = 8790) -> None:
        self.url = f"http://{host}:{port}/rollouts"
        self._client = client
        self._address = (host, port)
        self._rollouts: dict[str, ManualRollout] = {}
        self._training_id = uuid.uuid4().hex
        path = "/rollouts/{id}/v1/chat/completions"
        app = Starlette(routes=[Route(path, self._chat_completion, methods=["POST"])])
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Self:
        """Start to serve. Raises OSError if the port is in use."""
        self._socket = socket.create_server(self._address)
        self._thread.start()
        self._is_ready.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for rollout in list(self._rollouts.values()):
            rollout.cancel()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def begin(self, row: TaskRow) -> ManualRollout:
        """Begin a rollout of a task."""
        return asyncio.run_coroutine_threadsafe(self._begin(row), self._loop).result()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self._client.connect(max_connections=None) as self._http:
            self._is_ready.set()
            await self._server.serve(sockets=[self._socket])

    async def _begin(self, row: TaskRow) -> ManualRollout:
        id = uuid.uuid4().hex
        fields = {"capture": "tokens", "upstream": f"{self.url}/{id}/v1"}
        group_id = f"{self._training_id}-{row.id}"
        rollout = ManualRollout(self._client.run_once(self._http, row, group_id, fields))
        self._rollouts[id] = rollout
        rollout.run.add_done_callback(lambda _: self._rollouts.pop(id))
        return rollout

    async def _chat_completion(self, request: Request) -> Response:
        rollout = self._rollouts.get(request.path_params["id"])
        if rollout is None:
            return _error(404, "There is no such rollout.")
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return _error(413, f"A body needs a content-length of at most {MAX_BODY_BYTES} bytes.")
        body = await request.json()
        if body.get("stream"):
            return _error(400, "This server does not stream.")
        turn = asyncio.create_task(rollout.answer_call(body["messages"]))
        return StreamingResponse(
            _completion_pieces(turn, body["model"]), media_type="application/json"
        )


async def _completion_pieces(turn: "asyncio.Task[Message]", model: str) -> AsyncIterator[bytes]:
    """Yield spaces until the turn is written, and then the chat completion."""
    try:
        while not (await asyncio.wait({turn}, timeout=KEEP_ALIVE_S))[0]:
            yield b" "
        message = turn.result()
    finally:
        turn.cancel()
    reason = "tool_calls" if "tool_calls" in message else "stop"
    yield json.dumps(completion_of(message, reason, model)).encode()


def completion_of(message: Message, finish_reason: str, model: str) -> dict[str, Any]:
    """Return a chat completion with one message."""
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _error(status: int, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error"}
    return JSONResponse({"error": error}, status)
