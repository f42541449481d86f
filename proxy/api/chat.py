"""POST /v1/chat/completions."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from fastapi import APIRouter
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from policies.routing import route
from proxy.agent import choices
from proxy.agent.choices import several
from proxy.agent.events import Emit, Event, OfChoice, ToolCallFinished
from proxy.agent.task import Result, Task
from proxy.api.connection import authorize, base_url, json_body, services, while_connected
from proxy.api.json_response import JSON
from proxy.api.relay import relay
from proxy.errors import BadRequestError, ProxyError, SandboxUnavailableError, internal_error
from proxy.wire.chat_request import check, choice_count, to_task, wants_usage
from proxy.wire.chat_response import ChunkWriter, Thoughts, completion
from proxy.wire.steps import Steps
from sandbox_runtime import errors

log = logging.getLogger(__name__)
router = APIRouter()

SEND_TIMEOUT_S = 300
"""How long a client may not read before it counts as gone; its run and sandbox end then."""
QUEUED_FRAMES = 64
"""How many frames a slow client may lag behind before the run waits for it."""
SSE_HEADERS = {"Cache-Control": "no-cache"}


async def chat_completions(request: Request) -> Response:
    authorize(request)
    body = check(await json_body(request))
    way = route(body)
    if way.kind == "plain":
        plain = {key: value for key, value in body.items() if key != "sandbox"}
        return await relay(request, {**plain, "model": way.model})
    run_id = uuid.uuid4().hex
    outbox = services(request).files.outbox(run_id, base_url(request))
    task = to_task(body, model=way.model, run_id=run_id, outbox=outbox)
    count = choice_count(body, services(request).agent.limits.max_choices)
    task = several(task, count, lambda id: services(request).files.outbox(id, base_url(request)))
    answer = _Answer(request, body, task)
    return answer.streamed() if task.stream else await answer.whole()


# Not @router.post: FastAPI's own handling of parameters, of which there are none, takes longer
# than relaying a plain request.
router.add_route("/v1/chat/completions", chat_completions, methods=["POST"])


class _Answer:
    """One run and the response it becomes."""

    def __init__(self, request: Request, body: dict[str, Any], task: Task) -> None:
        self._request = request
        self._task = task
        self._agent = services(request).agent
        self._steps = _steps(request, body)
        self._wants_usage = wants_usage(body)
        self._names: dict[str, Any] = {
            "response_id": f"chatcmpl-{task.run_id}",
            "created": int(time.time()),
            "model": body["model"],
        }
        self._headers = {
            "X-Sandbox-Run": task.run_id,
            "X-Sandbox-Container": task.outbox.container_id,
        }

    async def whole(self) -> Response:
        """The completion in one piece."""
        thoughts = Thoughts(self._steps)
        work_done = False

        async def listen(event: Event) -> None:
            nonlocal work_done
            happened = event.event if isinstance(event, OfChoice) else event
            work_done |= isinstance(happened, ToolCallFinished)
            thoughts.hear(event)

        try:
            result = await while_connected(self._request, self._run(listen))
        except ProxyError as error:
            if work_done:  # OpenAI's SDKs would have all of it done again, twice
                error.headers["x-should-retry"] = "false"
            raise
        others = [thoughts.of(index + 1) for index, _ in enumerate(result.others)]
        reasoning = thoughts.of(0)
        content = completion(result, **self._names, reasoning=reasoning, other_reasoning=others)
        return JSON(content, headers=self._headers)

    def streamed(self) -> Response:
        """The completion as server-sent events."""
        send, receive = anyio.create_memory_object_stream[bytes](QUEUED_FRAMES)
        return EventSourceResponse(
            _drain(receive),
            data_sender_callable=lambda: self._produce(send),
            send_timeout=SEND_TIMEOUT_S,
            ping=services(self._request).keep_alive_s,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive"),
            sep="\n",
            headers={**self._headers, **SSE_HEADERS},
        )

    async def _produce(self, send: MemoryObjectSendStream[bytes]) -> None:
        chunks = ChunkWriter(**self._names, run_id=self._task.run_id, steps=self._steps)

        async def listen(event: Event) -> None:
            if frame := chunks.event(event):
                await send.send(_data(frame))

        async with send:
            await send.send(_data(chunks.role()))
            try:
                result = await self._run(listen)
            except ProxyError as error:
                frames = [json.dumps(error.body())]
            except Exception:  # noqa: BLE001 - the headers are out: the client must hear of it here
                frames = [json.dumps(internal_error().body())]
            else:
                frames = chunks.finish(result)
                frames += [chunks.usage(result)] if self._wants_usage else []
            for frame in [*frames, "[DONE]"]:
                await send.send(_data(frame))

    async def _run(self, listen: Emit) -> Result:
        run_id = self._task.run_id
        log.info("run %s started, model %s", run_id, self._task.model)
        try:
            result = await choices.run(self._agent, self._task, listen)
        except ProxyError as error:
            log.warning("run %s failed: %s", run_id, error)
            raise
        except errors.SandboxUnavailableError as error:
            log.warning("run %s found no sandbox: %s", run_id, error)
            raise SandboxUnavailableError(str(error), retry_after_s=error.retry_after_s) from error
        except errors.SandboxError as error:
            log.warning("run %s failed: %s", run_id, error)
            raise SandboxUnavailableError(str(error)) from error
        except asyncio.CancelledError:
            log.info("run %s ended: the client left", run_id)
            raise
        except Exception:
            log.exception("run %s failed", run_id)
            raise
        log.info(
            "run %s ended: %s, %d steps, %d ms",
            run_id,
            result.stop_reason,
            result.tally.tool_calls,
            result.tally.wall_ms,
        )
        return result


def _steps(request: Request, body: dict[str, Any]) -> Steps:
    """The profile asked for: in the body, by header, or as configured."""
    ours = body.get("sandbox")
    asked = ours.get("steps") if isinstance(ours, dict) else None
    asked = asked or request.headers.get("x-sandbox-steps") or services(request).steps
    if asked == "off":
        return "off"
    if asked == "reasoning":
        return "reasoning"
    raise BadRequestError(
        f"Invalid value {asked!r} for 'sandbox.steps': 'off' or 'reasoning'.",
        param="sandbox.steps",
        code="invalid_value",
    )


def _data(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


async def _drain(receive: MemoryObjectReceiveStream[bytes]) -> AsyncIterator[bytes]:
    try:
        async for frame in receive:
            yield frame
    finally:
        receive.close()
