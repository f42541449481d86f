"""Time until a client sees the first text of an answer. The model writes a token every 0.2 s.

Measures each API, plain and through the agent loop. On the first turn, the time starts at the
client's request; after a tool call, it starts at the model request of the next turn, which excludes
the duration of the tool. The loop holds prose back for up to a second, because a tool call may
follow.
"""

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import aiohttp
from aiohttp import web

from bench.backends import Kind, working_backends
from bench.plan import Measurement, Plan, interleave
from bench.servers import BenchServer, free_port, run_proxy
from bench.table import Row, TablePart

ROUNDS = 5
TOKEN_S = 0.2
TOKEN_COUNT = 60
MAX_ADDED_S = 1.2
"""Maximum time that the loop may add to `:plain`, in seconds."""
Api = Literal["chat", "responses", "messages"]
APIS: tuple[Api, ...] = ("chat", "responses", "messages")
PATHS = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
FIRST_TURN, AFTER_CALL = "first turn", "after a tool call"
PROSE_MODEL, CALL_MODEL = "prose", "call"
TOOL_CALL = {"name": "execute_bash", "arguments": json.dumps({"command": "echo $((6 * 7))"})}
TIMEOUT = aiohttp.ClientTimeout(total=60)


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every API without a sandbox and with every kind of sandbox."""
    async with AsyncExitStack() as opened:
        found = await opened.enter_async_context(working_backends(plan.image))
        timer = StreamTimer()
        model = await opened.enter_async_context(run_slow_model(timer))
        session = await opened.enter_async_context(aiohttp.ClientSession(timeout=TIMEOUT))
        measurements: dict[str, Measurement] = {}
        for kind in found.kinds:
            server = await opened.enter_async_context(
                run_proxy(model, sandbox=kind, image=plan.image, idle=1)
            )
            asking = partial(_first_token_s, session, timer, server)
            for api in APIS:
                if _plain_row_name(api) not in measurements:
                    measurements[_plain_row_name(api)] = partial(
                        asking, api, f"{PROSE_MODEL}:plain", _plain_row_name(api)
                    )
                for name, turn in ((PROSE_MODEL, FIRST_TURN), (CALL_MODEL, AFTER_CALL)):
                    row = _loop_row_name(kind, api, turn)
                    measurements[row] = partial(asking, api, name, row)
        measured = await interleave(plan.rounds or ROUNDS, measurements)
    rows = [row for api in APIS for row in _rows(api, found.kinds, measured)]
    name = f"typing: until the first token of prose shows, the model writing one in {TOKEN_S} s"
    return [TablePart(name, [*rows, *found.missing_rows])]


def _plain_row_name(api: Api) -> str:
    return f"{api}, :plain"


def _loop_row_name(kind: Kind, api: Api, turn: str) -> str:
    return f"{api}, {kind}: {turn}"


def _rows(api: Api, kinds: list[Kind], measured: Mapping[str, list[float]]) -> list[Row]:
    plain = measured.get(_plain_row_name(api), [])
    if not plain:
        return []
    most = median(plain) + MAX_ADDED_S
    rows = [Row(_plain_row_name(api), plain, "s")]
    for kind in kinds:
        for turn in (FIRST_TURN, AFTER_CALL):
            name = _loop_row_name(kind, api, turn)
            added = median(measured[name]) - median(plain)
            rows.append(Row(name, measured[name], "s", most, note=f"plain + {added:.2f} s"))
    return rows


@dataclass(slots=True)
class StreamTimer:
    """Holds the `time.perf_counter` time of the last model request that was answered with prose."""

    asked_at: float = 0.0


_question_numbers = itertools.count(1)


def question() -> str:
    """Return a new question each time, because equal requests share one run of the proxy."""
    return f"What is 6 * 7? I ask for time number {next(_question_numbers)}."


async def _first_token_s(
    session: aiohttp.ClientSession,
    timer: StreamTimer,
    server: BenchServer,
    api: Api,
    model: str,
    row_name: str,
) -> Mapping[str, float]:
    """Send a request, disconnect at the first visible text, and return the seconds until then."""
    url, body = f"{server.base_url}{PATHS[api]}", _request_body(api, model, question())
    started = time.perf_counter()
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status} {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {") and _visible_text(json.loads(line[len(b"data: ") :])):
                since = timer.asked_at if model == CALL_MODEL else started
                return {row_name: time.perf_counter() - since}
    raise RuntimeError(f"{url}: nothing was to be seen")


def _request_body(api: Api, model: str, question: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": model, "stream": True}
    if api == "responses":
        return {**asked, "input": question}
    said = [{"role": "user", "content": question}]
    limit = {"max_tokens": 1000} if api == "messages" else {}
    return {**asked, **limit, "messages": said}


def _visible_text(event: Any) -> str:
    """Return the text that a frame of any of the three APIs adds to the answer."""
    match event:
        case {"choices": [{"delta": {"content": str(text)}}]}:
            return text
        case {"type": "response.output_text.delta", "delta": str(text)}:
            return text
        case {"type": "content_block_delta", "delta": {"text": str(text)}}:
            return text
    return ""


@asynccontextmanager
async def run_slow_model(timer: StreamTimer) -> AsyncIterator[BenchServer]:
    """Run the model as a server in this process. Supports all three APIs, which `:plain` relays."""
    routes = [
        web.get("/v1/models", _models),
        web.post("/v1/chat/completions", partial(_chat, timer)),
        web.post("/v1/responses", partial(_responses, timer)),
        web.post("/v1/messages", partial(_messages, timer)),
    ]
    application = web.Application()
    application.add_routes(routes)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield BenchServer(os.getpid(), port, 0)
    finally:
        await runner.cleanup()


async def _models(_: web.Request) -> web.Response:
    names = (PROSE_MODEL, CALL_MODEL)
    listed = [{"id": name, "object": "model", "max_model_len": 100_000} for name in names]
    return web.json_response({"object": "list", "data": listed})


async def _chat(timer: StreamTimer, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    has_called = any(said["role"] == "tool" for said in body["messages"])
    if body["model"] == CALL_MODEL and not has_called:
        call = {"index": 0, "id": "call_1", "type": "function", "function": TOOL_CALL}
        return await _stream(request, [_chunk({"tool_calls": [call]}, "tool_calls")])
    timer.asked_at = time.perf_counter()
    return await _stream(request, [_chunk({"content": f"word{n} "}) for n in range(TOKEN_COUNT)])


async def _responses(timer: StreamTimer, request: web.Request) -> web.StreamResponse:
    timer.asked_at = time.perf_counter()
    type_ = "response.output_text.delta"
    deltas = [{"type": type_, "item_id": "msg_1", "delta": f"word{n} "} for n in range(TOKEN_COUNT)]
    return await _stream(request, deltas)


async def _messages(timer: StreamTimer, request: web.Request) -> web.StreamResponse:
    timer.asked_at = time.perf_counter()
    deltas = [{"type": "text_delta", "text": f"word{n} "} for n in range(TOKEN_COUNT)]
    events = [{"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas]
    return await _stream(request, events)


def _chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "chatcmpl-slow", "object": "chat.completion.chunk", "created": 0}
    return {**head, "model": PROSE_MODEL, "choices": [choice]}


async def _stream(request: web.Request, events: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await asyncio.sleep(TOKEN_S)
        name = f"event: {event['type']}\n" if "type" in event else ""
        await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response
