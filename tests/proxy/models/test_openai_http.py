"""The client for OpenAI-compatible servers, against a real server."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import pytest

from policies.json_bounds import encode_json
from proxy.agent.events import ModelDelta, ReasoningDelta, TextDelta
from proxy.errors import BackendError, ContextOverflowError
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import (
    Frames,
    Held,
    Item,
    Raw,
    Refusal,
    ScriptedBackend,
    Style,
    chunk,
    frames,
    scripted_backend,
)
from tests.proxy.models.delta_recorder import DeltaRecorder

BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "What is 6 times 7?"}]}
KEY = "sk-very-secret-key"


@asynccontextmanager
async def opened(
    script: Sequence[Item],
    *,
    api_key: str | None = KEY,
    timeout_s: float = 5,
    style: Style = "vllm",
    limit_s: float = 5,
) -> AsyncIterator[tuple[ScriptedBackend, OpenAIHTTPModel]]:
    """Run a backend, and open the client for it for at most `limit_s` seconds."""
    async with scripted_backend(script, style=style) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key=api_key, timeout_s=timeout_s)
        async with aclosing(model):
            with anyio.fail_after(limit_s):
                yield backend, model


# Requests


async def test_unstreamed_request_has_no_stream_field() -> None:
    async with opened([text_reply("42")]) as (backend, model):
        await model.complete(BODY, None)
    assert backend.requests[0].body == BODY


async def test_streamed_request_asks_the_backend_for_usage() -> None:
    body = {**BODY, "stream_options": {"continuous_usage_stats": True}}
    async with opened([text_reply("42")]) as (backend, model):
        await model.complete(body, DeltaRecorder())
    options = {"continuous_usage_stats": True, "include_usage": True}
    assert backend.requests[0].body == {**BODY, "stream": True, "stream_options": options}


async def test_api_key_is_sent_as_bearer_token() -> None:
    async with opened([text_reply("42")]) as (backend, model):
        await model.complete(BODY, None)
    assert backend.requests[0].headers["authorization"] == f"Bearer {KEY}"


async def test_request_without_api_key_has_no_authorization() -> None:
    async with opened([text_reply("42")], api_key=None) as (backend, model):
        relayed = await model.relay(BODY, {"Authorization": "Bearer client-key"})
        async for _ in relayed.body:
            pass
    assert "authorization" not in backend.requests[0].headers


async def test_relayed_request_keeps_end_to_end_headers() -> None:
    headers = {
        "Host": "proxy.example",
        "Authorization": "Bearer client-key",
        "Cookie": "session=1",
        "Accept-Encoding": "br",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "X-Request-Id": "abc",
        "Traceparent": "00-1-2-03",
    }
    async with opened([text_reply("42")]) as (backend, model):
        relayed = await model.relay(BODY, headers)
        async for _ in relayed.body:
            pass
    seen = dict(backend.requests[0].headers)
    assert seen.pop("user-agent").startswith("Python")
    assert seen.pop("host") in backend.base_url
    assert seen == {
        "authorization": f"Bearer {KEY}",
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "content-length": str(len(encode_json(BODY))),
        "x-request-id": "abc",
        "traceparent": "00-1-2-03",
    }


async def test_body_of_several_megabytes_is_sent() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}}
    body = {**BODY, "messages": [{"role": "user", "content": [image]}]}
    async with opened([text_reply("a cat")]) as (backend, model):
        await model.complete(body, None)
    assert backend.requests[0].body == body


async def test_cookies_of_the_backend_are_ignored() -> None:
    script: list[Item] = [Raw(200, b"{}", {"Set-Cookie": "session=1"}), text_reply("42")]
    async with opened(script) as (backend, model):
        with pytest.raises(BackendError):
            await model.complete(BODY, None)
        await model.complete(BODY, None)
    assert "cookie" not in backend.requests[1].headers


# Responses


async def test_message_of_the_backend_is_returned_unchanged() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "refusal": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}],
        "audio": None,
        "unknown": {"kept": True},
    }
    async with opened([{"message": message}]) as (_, model):
        completion = await model.complete(BODY, None)
    assert completion.message == message
    assert completion.finish_reason == "tool_calls"
    assert completion.choice == {"index": 0}
    assert completion.response == {
        "id": "chatcmpl-script-0",
        "object": "chat.completion",
        "created": 0,
        "model": "fake-model",
        "system_fingerprint": "script",
    }


async def test_streamed_and_unstreamed_completions_are_equal() -> None:
    calls = tool_reply(call("bash", command="ls"), call("submit"), content="Let me look.")
    reply = {**calls, "reasoning": "I should look first.", "usage": {"total_tokens": 10}}
    async with opened([reply, reply]) as (_, model):
        unstreamed = await model.complete(BODY, None)
        streamed = await model.complete(BODY, DeltaRecorder())
    ids = [f"call_{number}_{index}" for number in (0, 1) for index in (0, 1)]
    found = [
        tool_call.pop("id") for r in (unstreamed, streamed) for tool_call in r.message["tool_calls"]
    ]
    assert found == ids
    assert {**streamed.message} == {**unstreamed.message}
    assert streamed.finish_reason == unstreamed.finish_reason
    assert streamed.usage == unstreamed.usage
    assert streamed.choice == unstreamed.choice


@pytest.mark.parametrize(
    ("style", "field"), [("vllm", "reasoning"), ("sglang", "reasoning_content")]
)
async def test_reasoning_keeps_the_backends_field_name(style: Any, field: str) -> None:
    reply = {"content": "42", "reasoning": "six sevens"}
    deltas = DeltaRecorder()
    async with opened([reply], style=style) as (_, model):
        streamed = await model.complete(BODY, deltas)
    assert streamed.message == {"role": "assistant", "content": "42", field: "six sevens"}
    assert deltas == [ReasoningDelta("six seve"), ReasoningDelta("ns"), TextDelta("42")]


async def test_logprobs_are_in_the_deltas_and_in_the_completion() -> None:
    forty, two = {"token": "4", "logprob": -0.1}, {"token": "2", "logprob": -0.2}
    pieces = frames(
        chunk({"role": "assistant", "content": ""}, logprobs=None),
        chunk({"content": "4"}, logprobs={"content": [forty]}, token_ids=[19]),
        chunk({"content": "2"}, logprobs={"content": [two]}, token_ids=[17]),
        chunk({}, "stop", stop_reason=128001),
        "[DONE]",
    )
    deltas = DeltaRecorder()
    async with opened([Frames(pieces)]) as (_, model):
        completion = await model.complete(BODY, deltas)
    assert deltas == [TextDelta("4", {"content": [forty]}), TextDelta("2", {"content": [two]})]
    assert completion.choice == {
        "index": 0,
        "logprobs": {"content": [forty, two]},
        "token_ids": [19, 17],
        "stop_reason": 128001,
    }


async def test_json_response_to_a_streamed_request_is_a_completion() -> None:
    completion = {
        "choices": [{"message": {"role": "assistant", "content": "It is 42."}}],
        "usage": {"total_tokens": 10},
    }
    item = Raw(200, json.dumps(completion).encode(), {"content-type": "application/json"})
    deltas = DeltaRecorder()
    async with opened([item]) as (_, model):
        completion = await model.complete(BODY, deltas)
    assert deltas == [TextDelta("It is 42.")]
    assert completion.message == {"role": "assistant", "content": "It is 42."}
    assert (completion.finish_reason, completion.usage) == ("stop", {"total_tokens": 10})


async def test_finish_reason_completes_a_stream_without_done_marker() -> None:
    pieces = frames(chunk({"content": "42"}), chunk({}, "length"))
    async with opened([Frames(pieces)]) as (_, model):
        completion = await model.complete(BODY, DeltaRecorder())
    assert completion.finish_reason == "length"


async def test_done_marker_completes_a_stream_without_finish_reason() -> None:
    pieces = frames(chunk({"content": "42"}), "[DONE]")
    async with opened([Frames(pieces)]) as (_, model):
        completion = await model.complete(BODY, DeltaRecorder())
    assert completion.finish_reason == "stop"


async def test_connection_left_open_after_done_does_not_delay_the_completion() -> None:
    pieces = [*frames(chunk({"content": "42"}, "stop"), "[DONE]"), b": never sent\n\n"]
    held = Held(Frames(pieces), until=asyncio.Event(), after_pieces=2)
    async with opened([held]) as (_, model):
        completion = await model.complete(BODY, DeltaRecorder())
    assert completion.message["content"] == "42"


async def test_models_are_listed_with_all_fields() -> None:
    async with opened([]) as (_, model):
        models = await model.models()
    assert models == [
        {
            "id": "fake-model",
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "max_model_len": 1_000_000,
        }
    ]


# Failures


async def fails_with(item: Item, deltas: DeltaRecorder | None = None) -> BackendError:
    """Return the error of the client for a response of the backend."""
    async with opened([item]) as (_, model):
        with pytest.raises(BackendError) as raised:
            await model.complete(BODY, deltas)
    return raised.value


async def test_error_in_the_stream_keeps_its_code_and_is_raised_after_the_deltas() -> None:
    error = {"message": "out of memory", "type": "InternalServerError", "code": 503}
    deltas = DeltaRecorder()
    raised = await fails_with(Frames(frames(chunk({"content": "4"}), {"error": error})), deltas)
    assert deltas == [TextDelta("4")]
    assert (raised.status, raised.message) == (503, "out of memory")
    assert (raised.type, raised.code) == ("InternalServerError", "503")


async def test_flat_error_in_the_stream_is_parsed() -> None:
    error = {"object": "error", "message": "out of memory", "type": "InternalError", "code": 500}
    raised = await fails_with(Frames(frames(error)), DeltaRecorder())
    assert (raised.status, raised.message) == (500, "out of memory")


async def test_context_overflow_in_the_stream_is_recognized() -> None:
    error = {"message": "The input is longer than the context length.", "code": 400}
    raised = await fails_with(Frames(frames({"error": error}, "[DONE]")), DeltaRecorder())
    assert isinstance(raised, ContextOverflowError)


@pytest.mark.parametrize("cut", [True, False])
async def test_truncated_stream_is_an_error(cut: bool) -> None:
    deltas = DeltaRecorder()
    raised = await fails_with(Frames(frames(chunk({"content": "4"})), cut=cut), deltas)
    assert deltas == [TextDelta("4")]
    assert (raised.status, raised.code) == (502, "backend_unreachable")
    assert "closed before the answer was complete" in raised.message


async def test_flat_errors_of_sglang_are_parsed() -> None:
    item = Refusal(422, "bad tool", type="BadRequest")
    async with opened([item], style="sglang") as (_, model):
        with pytest.raises(BackendError) as raised:
            await model.complete(BODY, None)
    assert (raised.value.status, raised.value.message) == (422, "bad tool")
    assert (raised.value.type, raised.value.code) == ("BadRequest", "422")


async def test_long_html_error_is_truncated() -> None:
    raised = await fails_with(Raw(500, b"<html>" + b"x" * 1_000_000))
    assert raised.status == 500
    assert raised.message == "<html>" + "x" * 994


async def test_retry_after_header_is_parsed() -> None:
    raised = await fails_with(Refusal(429, "slow down", headers={"Retry-After": "2.5"}))
    assert (raised.status, raised.retry_after_s) == (429, 2.5)


async def test_api_key_is_removed_from_errors() -> None:
    message = f"Incorrect API key provided: {KEY}."
    raised = await fails_with(Refusal(401, message))
    assert raised.message == "Incorrect API key provided: [key]."


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"choices": []}', b'{"choices": [{}]}'])
async def test_response_that_is_not_a_completion_is_an_error(body: bytes) -> None:
    raised = await fails_with(Raw(200, body, {"content-type": "application/json"}))
    assert (raised.status, raised.code) == (502, "backend_bad_response")


@pytest.mark.parametrize("event", [b"data: {\n\n", b"data: 7\n\n"])
async def test_chunk_that_is_not_a_json_object_is_an_error(event: bytes) -> None:
    raised = await fails_with(Frames([event]), DeltaRecorder())
    assert (raised.status, raised.code) == (502, "backend_bad_response")


async def test_error_body_with_status_200_raises_a_backend_error() -> None:
    body = json.dumps({"error": {"message": "upstream is down", "code": 502}}).encode()
    raised = await fails_with(Raw(200, body, {"content-type": "application/json"}))
    assert (raised.status, raised.message) == (502, "upstream is down")


async def test_redirect_of_the_backend_is_not_followed() -> None:
    raised = await fails_with(Raw(307, b"", {"Location": "http://127.0.0.1:1/elsewhere"}))
    assert raised.status == 502


async def test_call_to_a_silent_backend_times_out() -> None:
    held = Held(text_reply("too late"), until=asyncio.Event())
    async with opened([held], timeout_s=0.05) as (_, model):
        with pytest.raises(BackendError) as raised:
            await model.complete(BODY, None)
    assert (raised.value.status, raised.value.code) == (504, "backend_timeout")


async def test_model_copy_with_a_timeout_shares_the_connections() -> None:
    script = [text_reply("first"), Held(text_reply("late"), until=asyncio.Event())]
    async with opened(script) as (backend, model):
        await model.complete(BODY, None)
        with pytest.raises(BackendError) as raised:
            await model.with_timeout(0.05).complete(BODY, None)
        first, second = (request.peer for request in backend.requests)
    assert (raised.value.status, raised.value.code) == (504, "backend_timeout")
    assert first == second


async def test_stopped_backend_is_reported_as_unreachable() -> None:
    async with scripted_backend([]) as backend:
        pass
    model = OpenAIHTTPModel(backend.base_url, api_key=KEY, timeout_s=5)
    async with aclosing(model):
        with anyio.fail_after(5):
            for attempt in (
                model.complete(BODY, None),
                model.complete(BODY, DeltaRecorder()),
                model.relay(BODY, {}),
                model.models(),
            ):
                with pytest.raises(BackendError) as raised:
                    await attempt
                assert (raised.value.status, raised.value.code) == (502, "backend_unreachable")


# Relayed responses


async def test_relayed_bytes_are_unchanged() -> None:
    pieces = [b'data: {"odd" :  1}\r\n', b"\r\n: comment\n\nda", b"ta: [DONE]\n\n", b"\xff\x00"]
    async with opened([Frames(pieces)]) as (_, model):
        relayed = await model.relay({**BODY, "stream": True}, {})
        body = b"".join([piece async for piece in relayed.body])
    assert body == b"".join(pieces)


async def test_relayed_response_keeps_only_headers_for_the_client() -> None:
    headers = {
        "Content-Type": "application/problem+json",
        "Retry-After": "3",
        "X-Request-Id": "abc",
        "X-RateLimit-Remaining-Tokens": "12",
        "OpenAI-Processing-Ms": "7",
        "X-Should-Retry": "false",
        "Set-Cookie": "session=1",
        "X-Internal-Host": "gpu-7",
    }
    item = Raw(503, b"not JSON at all", headers)
    async with opened([item]) as (_, model):
        relayed = await model.relay(BODY, {})
        body = b"".join([piece async for piece in relayed.body])
    assert (relayed.status, body) == (503, b"not JSON at all")
    assert relayed.headers == {
        "content-type": "application/problem+json",
        "retry-after": "3",
        "x-request-id": "abc",
        "x-ratelimit-remaining-tokens": "12",
        "openai-processing-ms": "7",
        "x-should-retry": "false",
    }


@pytest.mark.parametrize("pieces_read", [0, 1])
async def test_closed_relayed_body_disconnects_from_the_backend(pieces_read: int) -> None:
    held = Held(text_reply("It is 42."), until=asyncio.Event(), after_pieces=1)
    async with opened([held]) as (backend, model):
        relayed = await model.relay({**BODY, "stream": True}, {})
        for _ in range(pieces_read):
            await anext(aiter(relayed.body))
        await relayed.body.aclose()
        await backend.requests[0].gone.wait()


async def test_truncated_relayed_response_is_an_error() -> None:
    item = Frames(frames(chunk({"content": "4"})), cut=True)
    async with opened([item]) as (_, model):
        relayed = await model.relay({**BODY, "stream": True}, {})
        with pytest.raises(BackendError, match="closed before the answer was complete"):
            async for _ in relayed.body:
                pass


# Connections


async def test_cancelled_stream_disconnects_from_the_backend() -> None:
    held = Held(text_reply("It is 42."), until=asyncio.Event(), after_pieces=1)
    async with opened([held]) as (backend, model):
        run = asyncio.create_task(model.complete(BODY, DeltaRecorder()))
        seen = await backend.arrived(1)
        run.cancel()
        await seen.gone.wait()
        with pytest.raises(asyncio.CancelledError):
            await run


async def test_cancelled_request_disconnects_from_the_backend() -> None:
    held = Held(text_reply("It is 42."), until=asyncio.Event())
    async with opened([held]) as (backend, model):
        run = asyncio.create_task(model.complete(BODY, None))
        seen = await backend.arrived(1)
        run.cancel()
        await seen.gone.wait()
        with pytest.raises(asyncio.CancelledError):
            await run


async def test_exception_of_the_listener_propagates_and_disconnects_from_the_backend() -> None:
    async def refuse(delta: ModelDelta) -> None:
        raise TimeoutError("the client is too slow")

    # The listener fails at the first text, which is the second piece. The third is held back.
    held = Held(text_reply("The answer is 42."), until=asyncio.Event(), after_pieces=2)
    async with opened([held]) as (backend, model):
        with pytest.raises(TimeoutError, match="the client is too slow"):
            await model.complete(BODY, refuse)
        await backend.requests[0].gone.wait()


async def test_consecutive_calls_share_a_connection() -> None:
    script: list[Item] = [
        text_reply("1"),
        text_reply("2"),
        Refusal(400),
        text_reply("3"),
        text_reply("4"),
    ]
    async with opened(script) as (backend, model):
        await model.complete(BODY, DeltaRecorder())
        await model.complete(BODY, None)
        with pytest.raises(BackendError):
            await model.complete(BODY, None)
        relayed = await model.relay({**BODY, "stream": True}, {})
        async for _ in relayed.body:
            pass
        await model.complete(BODY, DeltaRecorder())
    assert len({seen.peer for seen in backend.requests}) == 1


async def test_many_calls_run_concurrently() -> None:
    count, release = 150, asyncio.Event()
    script = [Held(text_reply("42"), until=release)] * count
    async with opened(script, limit_s=20) as (backend, model):
        runs = [asyncio.create_task(model.complete(BODY, DeltaRecorder())) for _ in range(count)]
        await backend.arrived(count)  # the backend answers once all requests have arrived
        release.set()
        completions = await asyncio.gather(*runs)
    assert [completion.message["content"] for completion in completions] == ["42"] * count
