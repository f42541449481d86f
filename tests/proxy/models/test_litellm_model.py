"""The litellm client, against real servers on this machine."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from copy import deepcopy
from typing import Any

import anyio
import pytest
from aiohttp import web

from proxy.agent.events import ModelDelta, ReasoningDelta, TextDelta
from proxy.errors import BackendError
from proxy.models.litellm_model import LiteLLMModel, acompletion_arguments, to_openai_format
from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import (
    Frames,
    Held,
    Item,
    Refusal,
    ScriptedBackend,
    chunk,
    frames,
    scripted_backend,
)
from tests.proxy.models.delta_recorder import DeltaRecorder

# pydantic warns about litellm: about one of its types, and about copies of streamed chunks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]

NAME = "hosted_vllm/fake-model"
KEY = "sk-very-secret-key"
MESSAGES = [{"role": "user", "content": "What is 6 times 7?"}]
BODY = {"model": NAME, "messages": MESSAGES}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}},
    }
]


@asynccontextmanager
async def opened(
    script: Sequence[Item], *, timeout_s: float = 5
) -> AsyncIterator[tuple[ScriptedBackend, LiteLLMModel]]:
    """Run a backend, and open the client for it for at most 20 seconds."""
    async with scripted_backend(script) as backend:
        model = LiteLLMModel([NAME], api_key=KEY, api_base=backend.base_url, timeout_s=timeout_s)
        async with aclosing(model):
            with anyio.fail_after(20):
                yield backend, model


async def fails_with(item: Item, deltas: DeltaRecorder | None = None) -> BackendError:
    """Return the error of the client for a response of the backend."""
    async with opened([item]) as (_, model):
        with pytest.raises(BackendError) as raised:
            await model.complete(BODY, deltas)
    return raised.value


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
async def test_tools_are_sent_if_the_package_mcp_is_not_installed(provider: str) -> None:
    """For a call with tools, litellm 1.106 imports `mcp`, which is not a dependency."""
    assert importlib.util.find_spec("mcp") is None, "this test needs an environment without mcp"
    name, reply = f"{provider}/fake-model", tool_reply(call("bash", command="ls"))
    async with scripted_backend([reply, reply]) as backend:
        model = LiteLLMModel([name], api_key=KEY, api_base=backend.base_url, timeout_s=5)
        async with aclosing(model):
            body = {"model": name, "messages": MESSAGES, "tools": TOOLS}
            with anyio.fail_after(20):
                unstreamed = await model.complete(body, None)
                streamed = await model.complete(body, DeltaRecorder())
    assert [seen.body["tools"] for seen in backend.requests] == [TOOLS, TOOLS]
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    assert unstreamed.message["tool_calls"][0]["function"] == function
    assert streamed.message["tool_calls"][0]["function"] == function


def test_litellm_is_not_imported_when_a_model_is_created() -> None:
    program = (
        "import sys; from proxy.models.litellm_model import LiteLLMModel;"
        "LiteLLMModel(['openai/x'], timeout_s=1); sys.exit('litellm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


# Requests


async def test_litellm_arguments_in_a_request_are_sent_to_the_backend_and_not_applied() -> None:
    elsewhere = "http://127.0.0.1:1/v1"
    fields = {"api_base": elsewhere, "base_url": elsewhere, "mock_response": "hi", "num_retries": 3}
    async with opened([text_reply("42")]) as (backend, model):
        completion = await model.complete({**BODY, **fields}, None)
    assert completion.message["content"] == "42"
    assert backend.requests[0].body == {"model": "fake-model", "messages": MESSAGES, **fields}
    assert backend.requests[0].headers["authorization"] == f"Bearer {KEY}"


async def test_model_that_is_not_configured_is_not_found() -> None:
    model = LiteLLMModel(["openai/a"], timeout_s=5)
    for attempt in (
        model.complete({"model": "anthropic/b", "messages": MESSAGES}, None),
        model.complete({"model": "anthropic/b", "messages": MESSAGES}, DeltaRecorder()),
    ):
        with pytest.raises(BackendError, match="'anthropic/b' does not exist") as raised:
            await attempt
        assert (raised.value.status, raised.value.code) == (404, "model_not_found")


async def test_configured_models_are_listed() -> None:
    model = LiteLLMModel(["anthropic/a", "openai/b"], timeout_s=5)
    assert await model.models() == [
        {"id": "anthropic/a", "object": "model", "created": 0, "owned_by": "anthropic"},
        {"id": "openai/b", "object": "model", "created": 0, "owned_by": "openai"},
    ]


async def test_listed_models_have_context_lengths_once_litellm_is_imported() -> None:
    known, unknown = "openai/gpt-4o", "openai/nobody-knows-it"
    async with scripted_backend([text_reply("Hi.")]) as backend:
        model = LiteLLMModel([known, unknown], api_key=KEY, api_base=backend.base_url, timeout_s=5)
        async with aclosing(model):
            await model.complete({**BODY, "model": known}, None)
            listed = await model.models()
    assert [each.get("max_model_len") for each in listed] == [128_000, None]


def test_litellm_call_arguments_are_deep_copies_of_the_request() -> None:
    body = {**BODY, "tools": deepcopy(TOOLS), "min_p": 0.1, "chat_template_kwargs": {"a": [1]}}
    before = deepcopy(body)
    arguments = acompletion_arguments(body)
    arguments["tools"][0]["function"]["parameters"].clear()
    arguments["extra_body"]["chat_template_kwargs"]["a"].clear()
    arguments["messages"].clear()
    assert body == before


# Responses


async def test_fields_unknown_to_litellm_are_preserved() -> None:
    message = {"role": "assistant", "content": "42", "odd": {"kept": True}, "reasoning": "hm"}
    async with opened([{"message": message}]) as (_, model):
        completion = await model.complete(BODY, None)
    assert completion.message == {**message, "reasoning_content": "hm"}


def test_provider_specific_fields_lose_nulls_and_values_that_the_message_already_has() -> None:
    signatures = {"thought_signatures": ["abc"], "citations": None}
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "SIG"}]
    fields = {"role": "assistant", "content": "hi", "thinking_blocks": blocks}
    moved = {**signatures, "thinking_blocks": blocks}
    answer = {"choices": [{"message": {**fields, "provider_specific_fields": moved}}]}
    expected = {**fields, "provider_specific_fields": {"thought_signatures": ["abc"]}}
    assert to_openai_format(answer, is_openai_like=False) == {"choices": [{"message": expected}]}


# Failures


async def test_error_in_the_stream_is_raised_after_the_deltas_before_it() -> None:
    error = {"message": "out of memory", "type": "InternalServerError", "code": 500}
    deltas = DeltaRecorder()
    raised = await fails_with(Frames(frames(chunk({"content": "4"}), {"error": error})), deltas)
    assert deltas == [TextDelta("4")]
    assert raised.status == 500
    assert "out of memory" in raised.message


async def test_truncated_stream_is_an_error() -> None:
    deltas = DeltaRecorder()
    raised = await fails_with(Frames(frames(chunk({"content": "4"})), cut=True), deltas)
    assert deltas == [TextDelta("4")]
    assert (raised.status, raised.code) == (502, "backend_unreachable")
    assert "closed before the answer was complete" in raised.message


async def test_api_key_is_removed_from_errors() -> None:
    raised = await fails_with(Refusal(401, f"Incorrect API key provided: {KEY}."))
    assert raised.status == 401
    assert raised.message == "Incorrect API key provided: [key]."


async def test_stopped_backend_is_reported_as_unreachable() -> None:
    async with scripted_backend([]) as backend:
        pass
    model = LiteLLMModel([NAME], api_key=KEY, api_base=backend.base_url, timeout_s=5)
    async with aclosing(model):
        with anyio.fail_after(20):
            for attempt in (
                model.complete(BODY, None),
                model.complete(BODY, DeltaRecorder()),
                model.relay(BODY, {}),
                model.relay({**BODY, "stream": True}, {}),
            ):
                with pytest.raises(BackendError) as raised:
                    await attempt
                assert (raised.value.status, raised.value.code) == (502, "backend_unreachable")


async def test_call_to_a_silent_backend_times_out() -> None:
    held = Held(text_reply("too late"), until=asyncio.Event())
    async with opened([held], timeout_s=0.05) as (_, model):
        with pytest.raises(BackendError) as raised:
            await model.complete(BODY, None)
    assert (raised.value.status, raised.value.code) == (504, "backend_timeout")


async def test_model_copy_with_a_timeout_uses_that_timeout() -> None:
    held = Held(text_reply("too late"), until=asyncio.Event())
    async with opened([held], timeout_s=60) as (_, model):
        with pytest.raises(BackendError) as raised:
            await model.with_timeout(0.05).complete(BODY, None)
    assert (raised.value.status, raised.value.code) == (504, "backend_timeout")


async def test_error_in_a_relayed_stream_is_sent_as_an_event_before_done() -> None:
    error = {"message": "out of memory", "code": 500}
    item = Frames(frames(chunk({"content": "4"}), {"error": error}))
    async with opened([item]) as (_, model):
        relayed = await model.relay({**BODY, "stream": True}, {})
        body = b"".join([piece async for piece in relayed.body])
    text, failed, done = [event.removeprefix(b"data: ") for event in body.strip().split(b"\n\n")]
    assert json.loads(text)["choices"][0]["delta"]["content"] == "4"
    assert "out of memory" in json.loads(failed)["error"]["message"]
    assert done == b"[DONE]"


# Connections


async def test_cancelled_stream_disconnects_from_the_backend() -> None:
    first_delta = asyncio.Event()

    async def on_delta(delta: ModelDelta) -> None:
        first_delta.set()

    held = Held(text_reply("The answer is 42."), until=asyncio.Event(), after_pieces=2)
    async with opened([held]) as (backend, model):
        run = asyncio.create_task(model.complete(BODY, on_delta))
        await first_delta.wait()
        run.cancel()
        await backend.requests[0].gone.wait()
        with pytest.raises(asyncio.CancelledError):
            await run


async def test_closing_a_relayed_body_disconnects_from_the_backend() -> None:
    held = Held(text_reply("The answer is 42."), until=asyncio.Event(), after_pieces=2)
    async with opened([held]) as (backend, model):
        relayed = await model.relay({**BODY, "stream": True}, {})
        await relayed.body.aclose()
        await backend.requests[0].gone.wait()


async def test_model_can_be_used_after_another_model_was_closed() -> None:
    async with scripted_backend([text_reply("1"), text_reply("2")]) as backend:
        for expected in ("1", "2"):
            model = LiteLLMModel([NAME], api_key=KEY, api_base=backend.base_url, timeout_s=5)
            async with aclosing(model):
                with anyio.fail_after(20):
                    completion = await model.complete(BODY, None)
            assert completion.message["content"] == expected


# Anthropic's API


@asynccontextmanager
async def anthropic(events: list[dict[str, Any]]) -> AsyncIterator[tuple[str, list[Any]]]:
    """Run a server that streams these events to each request. Yield its URL and the requests."""
    requests: list[Any] = []

    async def messages(request: web.Request) -> web.StreamResponse:
        requests.append(await request.json())
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        return response

    app = web.Application()
    app.router.add_post("/v1/messages", messages)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}", requests
    finally:
        await runner.cleanup()


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


SIGNED_THINKING_AND_A_CALL = [
    {
        "type": "message_start",
        "message": {
            "id": "m1",
            "type": "message",
            "role": "assistant",
            "model": "claude",
            "content": [],
            "stop_reason": None,
            "usage": {"input_tokens": 9, "output_tokens": 1},
        },
    },
    *block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "let "},
        {"type": "thinking_delta", "thinking": "me"},
        {"type": "signature_delta", "signature": "SIG"},
    ),
    *block(1, {"type": "text", "text": ""}, {"type": "text_delta", "text": "Looking."}),
    *block(
        2,
        {"type": "tool_use", "id": "tool_1", "name": "bash", "input": {}},
        {"type": "input_json_delta", "partial_json": '{"command":'},
        {"type": "input_json_delta", "partial_json": '"ls"}'},
    ),
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use"},
        "usage": {"output_tokens": 12},
    },
    {"type": "message_stop"},
]


async def test_signed_thinking_of_anthropic_is_sent_back_with_and_without_tools() -> None:
    name, deltas = "anthropic/claude-sonnet-4-5", DeltaRecorder()
    async with anthropic(SIGNED_THINKING_AND_A_CALL) as (address, requests):
        model = LiteLLMModel([name], api_key=KEY, api_base=address, timeout_s=5)
        async with aclosing(model):
            body: dict[str, Any] = {"model": name, "messages": MESSAGES, "tools": TOOLS}
            with anyio.fail_after(20):
                first = await model.complete(body, deltas)
                result = {"role": "tool", "tool_call_id": "tool_1", "content": "a.txt"}
                history = [*MESSAGES, first.message, result]
                await model.complete({"model": name, "messages": history}, deltas)
    assert deltas[:3] == [ReasoningDelta("let "), ReasoningDelta("me"), TextDelta("Looking.")]
    assert first.message == {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "let me",
        "thinking_blocks": [{"type": "thinking", "thinking": "let me", "signature": "SIG"}],
        "tool_calls": [
            {
                "id": "tool_1",
                "type": "function",
                "function": {"name": "bash", "arguments": '{"command":"ls"}'},
            }
        ],
    }
    assert requests[1]["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "let me", "signature": "SIG"},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "tool_1", "name": "bash", "input": {"command": "ls"}},
    ]
    # Anthropic refuses a history with calls but no tools: litellm puts one there.
    assert [tool["name"] for tool in requests[1]["tools"]] == ["dummy_tool"]
