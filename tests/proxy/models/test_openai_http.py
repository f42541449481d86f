"""The door to OpenAI-compatible servers, against a real one."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from policies.json_bounds import encoded
from proxy.agent.events import ReasoningDelta, TextDelta
from proxy.errors import BackendError
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import (
    Frames,
    Held,
    Item,
    Raw,
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


def keyless(backend: ScriptedBackend) -> aclosing[OpenAIHTTPModel]:
    return aclosing(OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=5))


# What goes out


async def test_a_whole_reply_is_asked_for_without_stream() -> None:
    async with scripted_backend([text_reply("42")]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            await model.complete(BODY, None)
    assert backend.requests[0].body == BODY


async def test_a_streamed_reply_is_asked_for_with_its_usage() -> None:
    body = {**BODY, "stream_options": {"continuous_usage_stats": True}}
    async with scripted_backend([text_reply("42")]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            await model.complete(body, Heard())
    options = {"continuous_usage_stats": True, "include_usage": True}
    assert backend.requests[0].body == {**BODY, "stream": True, "stream_options": options}


async def test_our_key_is_sent_as_bearer() -> None:
    async with scripted_backend([text_reply("42")]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            await model.complete(BODY, None)
    assert backend.requests[0].headers["authorization"] == f"Bearer {KEY}"


async def test_without_a_key_of_ours_there_is_no_authorization() -> None:
    async with scripted_backend([text_reply("42")]) as backend, keyless(backend) as model:
        with anyio.fail_after(5):
            relayed = await model.relay(BODY, {"Authorization": "Bearer client-key"})
            async for _ in relayed.body:
                pass
    assert "authorization" not in backend.requests[0].headers


async def test_a_relayed_request_keeps_only_the_headers_that_are_for_the_backend() -> None:
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
    async with scripted_backend([text_reply("42")]) as backend, door(backend) as model:
        with anyio.fail_after(5):
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
        "content-length": str(len(encoded(BODY))),
        "x-request-id": "abc",
        "traceparent": "00-1-2-03",
    }


async def test_a_body_of_several_megabytes_is_sent() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}}
    body = {**BODY, "messages": [{"role": "user", "content": [image]}]}
    async with scripted_backend([text_reply("a cat")]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            await model.complete(body, None)
    assert backend.requests[0].body == body


async def test_a_cookie_of_the_backend_is_forgotten() -> None:
    script: list[Item] = [Raw(200, b"{}", {"Set-Cookie": "session=1"}), text_reply("42")]
    async with scripted_backend(script) as backend, door(backend) as model:
        with anyio.fail_after(5):
            with pytest.raises(BackendError):
                await model.complete(BODY, None)
            await model.complete(BODY, None)
    assert "cookie" not in backend.requests[1].headers


# What comes back


async def test_a_whole_message_is_left_as_it_was_sent() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "refusal": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}],
        "audio": None,
        "unknown": {"kept": True},
    }
    async with (
        scripted_backend([{"message": message}]) as backend,
        door(backend) as model,
    ):
        with anyio.fail_after(5):
            reply = await model.complete(BODY, None)
    assert reply.message == message
    assert reply.finish_reason == "tool_calls"
    assert reply.choice == {"index": 0}
    assert reply.response == {
        "id": "chatcmpl-script-0",
        "object": "chat.completion",
        "created": 0,
        "model": "fake-model",
        "system_fingerprint": "script",
    }


async def test_streamed_and_whole_replies_are_the_same_value() -> None:
    calls = tool_reply(call("bash", command="ls"), call("submit"), content="Let me look.")
    reply = {**calls, "reasoning": "I should look first.", "usage": {"total_tokens": 10}}
    async with scripted_backend([reply, reply]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            whole = await model.complete(BODY, None)
            streamed = await model.complete(BODY, Heard())
    ids = [f"call_{number}_{index}" for number in (0, 1) for index in (0, 1)]
    said = [tool_call.pop("id") for r in (whole, streamed) for tool_call in r.message["tool_calls"]]
    assert said == ids
    assert {**streamed.message} == {**whole.message}
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.usage == whole.usage
    assert streamed.choice == whole.choice


@pytest.mark.parametrize(
    ("style", "field"), [("vllm", "reasoning"), ("sglang", "reasoning_content")]
)
async def test_reasoning_keeps_the_name_the_backend_gives_it(style: Any, field: str) -> None:
    reply = {"content": "42", "reasoning": "six sevens"}
    heard = Heard()
    async with scripted_backend([reply], style=style) as backend, door(backend) as model:
        with anyio.fail_after(5):
            streamed = await model.complete(BODY, heard)
    assert streamed.message == {"role": "assistant", "content": "42", field: "six sevens"}
    assert heard == [ReasoningDelta("six seve"), ReasoningDelta("ns"), TextDelta("42")]


async def test_log_probabilities_come_with_their_piece_and_in_the_reply() -> None:
    forty, two = {"token": "4", "logprob": -0.1}, {"token": "2", "logprob": -0.2}
    pieces = frames(
        chunk({"role": "assistant", "content": ""}, logprobs=None),
        chunk({"content": "4"}, logprobs={"content": [forty]}, token_ids=[19]),
        chunk({"content": "2"}, logprobs={"content": [two]}, token_ids=[17]),
        chunk({}, "stop", stop_reason=128001),
        "[DONE]",
    )
    heard = Heard()
    async with scripted_backend([Frames(pieces)]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            reply = await model.complete(BODY, heard)
    assert heard == [TextDelta("4", {"content": [forty]}), TextDelta("2", {"content": [two]})]
    assert reply.choice == {
        "index": 0,
        "logprobs": {"content": [forty, two]},
        "token_ids": [19, 17],
        "stop_reason": 128001,
    }


async def test_json_in_answer_to_a_streamed_request_is_a_whole_reply() -> None:
    completion = {
        "choices": [{"message": {"role": "assistant", "content": "It is 42."}}],
        "usage": {"total_tokens": 10},
    }
    item = Raw(200, json.dumps(completion).encode(), {"content-type": "application/json"})
    heard = Heard()
    async with scripted_backend([item]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            reply = await model.complete(BODY, heard)
    assert heard == [TextDelta("It is 42.")]
    assert reply.message == {"role": "assistant", "content": "It is 42."}
    assert (reply.finish_reason, reply.usage) == ("stop", {"total_tokens": 10})


async def test_a_stream_without_done_is_complete_once_it_has_a_finish_reason() -> None:
    pieces = frames(chunk({"content": "42"}), chunk({}, "length"))
    async with scripted_backend([Frames(pieces)]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            reply = await model.complete(BODY, Heard())
    assert reply.finish_reason == "length"


async def test_a_stream_with_done_is_complete_without_a_finish_reason() -> None:
    pieces = frames(chunk({"content": "42"}), "[DONE]")
    async with scripted_backend([Frames(pieces)]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            reply = await model.complete(BODY, Heard())
    assert reply.finish_reason == "stop"


async def test_a_backend_that_stays_on_the_line_after_done_is_not_waited_for() -> None:
    pieces = [*frames(chunk({"content": "42"}, "stop"), "[DONE]"), b": never sent\n\n"]
    held = Held(Frames(pieces), until=asyncio.Event(), after_pieces=2)
    async with scripted_backend([held]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            reply = await model.complete(BODY, Heard())
    assert reply.message["content"] == "42"


async def test_the_models_are_listed_with_all_their_fields() -> None:
    async with scripted_backend([]) as backend, door(backend) as model:
        with anyio.fail_after(5):
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
