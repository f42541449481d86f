"""Streams whose encoder fails."""

import asyncio
import json
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from policies.steps import StepsMode
from proxy.agent.events import AnswerDelta, Emit, Event, ModelCallAccepted
from proxy.agent.result import Result
from proxy.agent.status_hold import StatusHold
from proxy.api.dependencies import authenticate
from proxy.api.middleware import RequestMiddleware
from proxy.api.run_response import StreamEncoder, stream_response
from proxy.app import build_app
from proxy.errors import ProxyError, internal_error
from proxy.models.scripted import ScriptedModel
from proxy.runs.run import RequestIdentity, Run, RunMetadata
from proxy.schemas.chat_response import CompletionStreamEncoder, completion_head
from proxy.schemas.request_options import RequestOptions
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services

STEPS: StepsMode = "off"


class BrokenEncoder(CompletionStreamEncoder):
    """An encoder that raises at the first AnswerDelta."""

    def __init__(self) -> None:
        super().__init__(completion_head("r1", 0, "m"), "r1", STEPS, include_usage=False)

    def encode(self, event: Event) -> str:
        if isinstance(event, AnswerDelta):
            raise RuntimeError("the encoder is broken")
        return super().encode(event)


class BrokenErrorEncoder(BrokenEncoder):
    """An encoder that raises for an error too."""

    def fail(self, error: ProxyError) -> str:
        raise RuntimeError("the encoder is broken")


async def stream(tmp_path: Path, encoder: StreamEncoder) -> tuple[httpx.Response, Run]:
    """Return the encoder's response to a run that sends one word and does not end, and the run."""

    async def work(run: Run, emit: Emit) -> Result:
        await emit(ModelCallAccepted())
        await emit(AnswerDelta("42"))
        await asyncio.Event().wait()
        raise AssertionError

    async def endpoint(request: Request) -> Response:
        return await stream_response(
            authenticate(request), run.subscribe(), encoder, RequestOptions(), StatusHold(60)
        )

    def end(run: Run) -> None:
        run.cancel("the client disconnected")

    run = Run(RunMetadata("r1", "m", "cntr_1", 0), RequestIdentity("me", "work"), work, end)
    services = make_services(ScriptedModel([]), MemorySandboxes(), tmp_path)
    app = build_app(services)
    app.router.add_route("/stream", endpoint)
    transport = httpx.ASGITransport(RequestMiddleware(app, services))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        with anyio.fail_after(20):
            answer = await client.get("/stream")
            await run.wait_until_ended()
    return answer, run


async def test_stream_with_a_failing_encoder_ends_in_an_error_frame(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer, run = await stream(tmp_path, BrokenEncoder())
    role, error, done, _ = answer.text.split("\n\n")
    assert json.loads(role.removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(error.removeprefix("data: ")) == internal_error().body()
    assert done == "data: [DONE]"
    assert "the encoder is broken" in caplog.text
    assert run.status == "cancelled"


async def test_stream_with_an_encoder_that_fails_twice_ends_in_a_generic_error(
    tmp_path: Path,
) -> None:
    answer, _ = await stream(tmp_path, BrokenErrorEncoder())
    name, data = answer.text.split("\n\n")[-2].split("\n")
    assert name == "event: error"
    body = {"type": "error", **internal_error().body()}
    assert json.loads(data.removeprefix("data: ")) == body
