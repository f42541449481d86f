"""What the door to OpenAI-compatible servers makes of failures."""

import asyncio
import json
from contextlib import aclosing

import anyio
import pytest

from proxy.agent.events import TextDelta
from proxy.errors import BackendError, ContextOverflowError
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.scripted import text_reply
from tests.fakes.backend import (
    Frames,
    Held,
    Item,
    Raw,
    Refusal,
    ScriptedBackend,
    chunk,
    frames,
    scripted_backend,
)
from tests.proxy.models.heard import Heard

BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "What is 6 times 7?"}]}
KEY = "sk-very-secret-key"


def door(backend: ScriptedBackend) -> aclosing[OpenAIHTTPModel]:
    return aclosing(OpenAIHTTPModel(backend.base_url, api_key=KEY, timeout_s=5))


def impatient(backend: ScriptedBackend) -> aclosing[OpenAIHTTPModel]:
    return aclosing(OpenAIHTTPModel(backend.base_url, api_key=KEY, timeout_s=0.05))


async def fails_with(item: Item, heard: Heard | None = None) -> BackendError:
    """What the door raises when the backend answers so."""
    async with scripted_backend([item]) as backend, door(backend) as model:
        with anyio.fail_after(5), pytest.raises(BackendError) as raised:
            await model.complete(BODY, heard)
    return raised.value


async def test_an_error_inside_the_stream_keeps_its_code_and_comes_after_what_was_said() -> None:
    error = {"message": "out of memory", "type": "InternalServerError", "code": 503}
    heard = Heard()
    raised = await fails_with(Frames(frames(chunk({"content": "4"}), {"error": error})), heard)
    assert heard == [TextDelta("4")]
    assert (raised.status, raised.message) == (503, "out of memory")
    assert (raised.type, raised.code) == ("InternalServerError", "503")


async def test_a_flat_error_inside_the_stream_is_read_too() -> None:
    error = {"object": "error", "message": "out of memory", "type": "InternalError", "code": 500}
    raised = await fails_with(Frames(frames(error)), Heard())
    assert (raised.status, raised.message) == (500, "out of memory")


async def test_an_overflow_told_inside_the_stream_is_told_apart() -> None:
    error = {"message": "The input is longer than the context length.", "code": 400}
    raised = await fails_with(Frames(frames({"error": error}, "[DONE]")), Heard())
    assert isinstance(raised, ContextOverflowError)


@pytest.mark.parametrize("cut", [True, False])
async def test_a_stream_that_breaks_off_is_an_error(cut: bool) -> None:
    heard = Heard()
    raised = await fails_with(Frames(frames(chunk({"content": "4"})), cut=cut), heard)
    assert heard == [TextDelta("4")]
    assert (raised.status, raised.code) == (502, "backend_unreachable")
    assert "closed before the answer was complete" in raised.message


async def test_sglangs_flat_errors_are_read() -> None:
    item = Refusal(422, "bad tool", type="BadRequest")
    async with (
        scripted_backend([item], style="sglang") as backend,
        door(backend) as model,
    ):
        with anyio.fail_after(5), pytest.raises(BackendError) as raised:
            await model.complete(BODY, None)
    assert (raised.value.status, raised.value.message) == (422, "bad tool")
    assert (raised.value.type, raised.value.code) == ("BadRequest", "422")


async def test_of_a_gateways_long_page_the_beginning_is_told() -> None:
    raised = await fails_with(Raw(500, b"<html>" + b"x" * 1_000_000))
    assert raised.status == 500
    assert raised.message == "<html>" + "x" * 994


async def test_a_retry_after_header_is_honoured() -> None:
    raised = await fails_with(Refusal(429, "slow down", headers={"Retry-After": "2.5"}))
    assert (raised.status, raised.retry_after_s) == (429, 2.5)


async def test_our_key_is_never_told() -> None:
    message = f"Incorrect API key provided: {KEY}."
    raised = await fails_with(Refusal(401, message))
    assert raised.message == "Incorrect API key provided: [key]."


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"choices": []}', b'{"choices": [{}]}'])
async def test_an_answer_that_is_no_completion_is_an_error(body: bytes) -> None:
    raised = await fails_with(Raw(200, body, {"content-type": "application/json"}))
    assert (raised.status, raised.code) == (502, "backend_bad_response")


@pytest.mark.parametrize("event", [b"data: {\n\n", b"data: 7\n\n"])
async def test_a_chunk_that_is_no_json_object_is_an_error(event: bytes) -> None:
    raised = await fails_with(Frames([event]), Heard())
    assert (raised.status, raised.code) == (502, "backend_bad_response")


async def test_an_error_under_status_200_is_an_error() -> None:
    body = json.dumps({"error": {"message": "upstream is down", "code": 502}}).encode()
    raised = await fails_with(Raw(200, body, {"content-type": "application/json"}))
    assert (raised.status, raised.message) == (502, "upstream is down")


async def test_a_redirect_is_not_followed() -> None:
    raised = await fails_with(Raw(307, b"", {"Location": "http://127.0.0.1:1/elsewhere"}))
    assert raised.status == 502


async def test_a_silent_backend_is_a_timeout() -> None:
    held = Held(text_reply("too late"), until=asyncio.Event())
    async with scripted_backend([held]) as backend, impatient(backend) as model:
        with anyio.fail_after(5), pytest.raises(BackendError) as raised:
            await model.complete(BODY, None)
    assert (raised.value.status, raised.value.code) == (504, "backend_timeout")


async def test_another_timeout_holds_for_the_same_connections() -> None:
    script = [text_reply("first"), Held(text_reply("late"), until=asyncio.Event())]
    async with scripted_backend(script) as backend, door(backend) as model:
        await model.complete(BODY, None)
        with anyio.fail_after(5), pytest.raises(BackendError) as raised:
            await model.with_timeout(0.05).complete(BODY, None)
        first, second = (request.peer for request in backend.requests)
    assert (raised.value.status, raised.value.code) == (504, "backend_timeout")
    assert first == second


async def test_a_backend_that_is_not_there_is_unreachable() -> None:
    async with scripted_backend([]) as backend:
        pass
    async with door(backend) as model:
        with anyio.fail_after(5):
            for attempt in (
                model.complete(BODY, None),
                model.complete(BODY, Heard()),
                model.relay(BODY, {}),
                model.models(),
            ):
                with pytest.raises(BackendError) as raised:
                    await attempt
                assert (raised.value.status, raised.value.code) == (502, "backend_unreachable")
