"""Rollouts whose turns come from the caller, such as a trainer that runs the agent loop itself.

The proxy sends its model calls to a server in this process, which answers each call with the turn
that the caller supplies next. The proxy runs the tool calls in a sandbox, applies its limits and
keeps the trajectory, as with a model.
"""

import asyncio
import json
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from training.rollouts import INFRA_ERROR, Rollout, RolloutClient
from training.rows import TaskRow

Message = dict[str, Any]
T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE_S = 10.0
"""Seconds between the spaces that a waiting model call receives, so that the proxy's read timeout
does not end the call. JSON permits spaces before a value."""


class TrainerRollout:
    """A rollout whose turns the caller supplies. `prompt` and `call_tool` block until the proxy
    responds, and must not be called by two threads at a time."""

    def __init__(self, run: Coroutine[Any, Any, Rollout], cancelled_result: Rollout) -> None:
        """Start the run, in the server's event loop. If it is cancelled, its result is
        `cancelled_result`."""
        self._loop = asyncio.get_running_loop()
        self._cancelled_result = cancelled_result
        self._prompts = asyncio.Queue[list[Message]]()
        self._turns = asyncio.Queue[Message]()
        self._last_prompt: list[Message] = []
        self._last_turn: asyncio.Task[Message] | None = None
        self._is_ending = False
        self.run_task = asyncio.create_task(self._finish(run))

    def prompt(self) -> list[Message]:
        """Return the messages with which the run begins. Call it once, before the first turn.
        Return an empty list if the run ended before its first model call, for example because the
        proxy failed. Raises RolloutError."""
        return self._wait(self._next_prompt()) or []

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Supply a turn that calls a tool, and return the texts that a model would read after it.
        Return None if the run has ended, for example after `submit`. Raises RolloutError."""
        return self._wait(self._call_tool(name, arguments))

    def cancel(self) -> None:
        """End the run without an answer, unless it has ended."""
        self._loop.call_soon_threadsafe(self.run_task.cancel)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # In the server's thread

    async def turn_after(self, prompt: list[Message]) -> Message:
        """Return the turn that follows the messages of a model call. The proxy may repeat a call
        whose connection was lost; it then gets the same turn."""
        if self._last_turn is None or prompt != self._last_prompt:
            self._last_prompt = prompt
            self._last_turn = asyncio.create_task(self._next_turn())
            self._prompts.put_nowait(prompt)
        return await asyncio.shield(self._last_turn)

    async def end(self, answer: str) -> Rollout:
        """Supply a last turn without a call, unless the run has ended, and return the rollout. If
        the proxy asks for further turns, they are empty. A second call of `end` ignores its answer
        and returns the same rollout. Raises RolloutError."""
        if not self._is_ending:
            self._is_ending = True
            self._turns.put_nowait({"role": "assistant", "content": answer})
        return await asyncio.shield(self.run_task)

    async def _finish(self, run: Coroutine[Any, Any, Rollout]) -> Rollout:
        try:
            return await run
        except asyncio.CancelledError:
            return self._cancelled_result
        finally:
            if self._last_turn:
                self._last_turn.cancel()

    async def _next_turn(self) -> Message:
        if self._is_ending and self._turns.empty():
            return {"role": "assistant", "content": ""}
        return await self._turns.get()

    async def _next_prompt(self) -> list[Message] | None:
        """Return the messages of the proxy's next model call; None if the run has ended."""
        prompt = asyncio.create_task(self._prompts.get())
        await asyncio.wait({prompt, self.run_task}, return_when=asyncio.FIRST_COMPLETED)
        if prompt.done():
            return prompt.result()
        prompt.cancel()
        self.run_task.result()  # raises RolloutError
        return None

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        if self.run_task.done():
            self.run_task.result()  # raises RolloutError
            return None
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
        self._turns.put_nowait({"role": "assistant", "content": "", "tool_calls": [call]})
        prompt = await self._next_prompt()
        if prompt is None:
            return None
        roles = [message["role"] for message in prompt]
        last_reply = len(roles) - 1 - roles[::-1].index("assistant")
        return "\n".join(text_of(message) for message in prompt[last_reply + 1 :])


class TurnServer:
    """Serves the turns of rollouts to a proxy, during a `with` block. The proxy's configuration
    must list the server's `url` in `backend.upstreams`.

    The server has no authentication: every process that reaches it can read the prompts of its
    rollouts. The proxy sends its API key for the backend to the server.
    """

    def __init__(
        self, client: RolloutClient, *, host: str = "127.0.0.1", port: int = 8790, url: str = ""
    ) -> None:
        """`url` is the server's address for the proxy. Default: http://HOST:PORT/rollouts."""
        self.url = url or f"http://{host}:{port}/rollouts"
        self._client = client
        self._address = (host, port)
        self._rollouts: dict[str, TrainerRollout] = {}
        path = "/rollouts/{id}/v1/chat/completions"
        app = Starlette(routes=[Route(path, self._chat_completion, methods=["POST"])])
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)

    def __enter__(self) -> Self:
        """Start the server. Raises OSError if the port is in use."""
        self._socket = socket.create_server(self._address)
        started = Future[None]()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._serve(started),), name="turn server", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._socket.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel the rollouts that have not ended, and stop the server."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._cancel_rollouts)
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def begin(self, row: TaskRow, group_id: str) -> TrainerRollout:
        """Begin a rollout of a task."""
        return asyncio.run_coroutine_threadsafe(self._begin(row, group_id), self._loop).result()

    def end_all(self, rollouts: Sequence[TrainerRollout], answers: Sequence[str]) -> list[Rollout]:
        """End all rollouts as `TrainerRollout.end` does. Raises RolloutError."""

        async def end_all() -> list[Rollout]:
            pairs = zip(rollouts, answers, strict=True)
            return await asyncio.gather(*(each.end(answer) for each, answer in pairs))

        return asyncio.run_coroutine_threadsafe(end_all(), self._loop).result()

    # In the server's thread

    async def _serve(self, started: "Future[None]") -> None:
        self._loop = asyncio.get_running_loop()
        try:
            async with self._client.connect(max_connections=None) as self._http:
                started.set_result(None)
                await self._server.serve(sockets=[self._socket])
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    def _cancel_rollouts(self) -> None:
        for rollout in self._rollouts.values():
            rollout.run_task.cancel()

    async def _begin(self, row: TaskRow, group_id: str) -> TrainerRollout:
        id = uuid.uuid4().hex
        fields = {"capture": "tokens", "upstream": f"{self.url}/{id}/v1"}
        rollout = TrainerRollout(
            self._client.run_once(self._http, row, group_id, fields),
            Rollout(row.id, group_id, INFRA_ERROR, None),
        )
        self._rollouts[id] = rollout
        rollout.run_task.add_done_callback(lambda _: self._rollouts.pop(id))
        return rollout

    async def _chat_completion(self, request: Request) -> Response:
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return _error(413, f"A body needs a content-length of at most {MAX_BODY_BYTES} bytes.")
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return _error(400, "The body is not a JSON object with messages.")
        if body.get("stream"):
            return _error(400, "This server does not stream.")
        rollout = self._rollouts.get(request.path_params["id"])
        if rollout is None:
            return _error(404, "There is no such rollout.")
        pieces = _completion_pieces(rollout, body["messages"], str(body.get("model")))
        return StreamingResponse(pieces, media_type="application/json")


async def _completion_pieces(
    rollout: TrainerRollout, prompt: list[Message], model: str
) -> AsyncIterator[bytes]:
    """Yield spaces until the turn is supplied, and then the chat completion."""
    turn = asyncio.create_task(rollout.turn_after(prompt))
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
