"""The door through litellm, against real servers on this machine."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from copy import deepcopy
from typing import Any

import anyio
import pytest
from aiohttp import web

from proxy.agent.events import ModelDelta, ReasoningDelta, TextDelta
from proxy.errors import BackendError
from proxy.models.litellm_model import LiteLLMModel, as_openai, call_arguments
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
from tests.proxy.models.heard import Heard

# litellm's own: pydantic warns of one of its types and of how it copies streamed chunks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]

NAME = "hosted_vllm/fake-model"
KEY = "sk-very-secret-key"
ASKED = [{"role": "user", "content": "What is 6 times 7?"}]
BODY = {"model": NAME, "messages": ASKED}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}},
    }
]


def door(backend: ScriptedBackend) -> aclosing[LiteLLMModel]:
    return aclosing(LiteLLMModel([NAME], api_key=KEY, api_base=backend.base_url, timeout_s=5))


async def fails_with(item: Item, heard: Heard | None = None) -> BackendError:
    """What the door raises when the backend answers so."""
    async with scripted_backend([item]) as backend, door(backend) as model:
        with anyio.fail_after(20), pytest.raises(BackendError) as raised:
            await model.complete(BODY, heard)
    return raised.value


# litellm 1.106 imports `mcp`, which it does not require, for any call with tools.


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
async def test_tools_work_although_mcp_is_not_installed(provider: str) -> None:
    assert importlib.util.find_spec("mcp") is None, "with mcp installed this test says nothing"
    name, reply = f"{provider}/fake-model", tool_reply(call("bash", command="ls"))
    async with scripted_backend([reply, reply]) as backend:
        model = LiteLLMModel([name], api_key=KEY, api_base=backend.base_url, timeout_s=5)
        async with aclosing(model):
            body = {"model": name, "messages": ASKED, "tools": TOOLS}
            with anyio.fail_after(20):
                whole = await model.complete(body, None)
                streamed = await model.complete(body, Heard())
    assert [seen.body["tools"] for seen in backend.requests] == [TOOLS, TOOLS]
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    assert whole.message["tool_calls"][0]["function"] == function
    assert streamed.message["tool_calls"][0]["function"] == function


def test_litellm_is_imported_only_at_first_use() -> None:
    program = (
        "import sys; from proxy.models.litellm_model import LiteLLMModel;"
        "LiteLLMModel(['openai/x'], timeout_s=1); sys.exit('litellm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


# What goes out


async def test_a_field_that_litellm_reads_itself_is_only_a_field_for_the_backend() -> None:
    elsewhere = "http://127.0.0.1:1/v1"
    fields = {"api_base": elsewhere, "base_url": elsewhere, "mock_response": "hi", "num_retries": 3}
    async with scripted_backend([text_reply("42")]) as backend, door(backend) as model:
        with anyio.fail_after(20):
            reply = await model.complete({**BODY, **fields}, None)
    assert reply.message["content"] == "42"
    assert backend.requests[0].body == {"model": "fake-model", "messages": ASKED, **fields}
    assert backend.requests[0].headers["authorization"] == f"Bearer {KEY}"


async def test_a_model_that_is_not_configured_does_not_exist() -> None:
    model = LiteLLMModel(["openai/a"], timeout_s=5)
    for attempt in (
        model.complete({"model": "anthropic/b", "messages": ASKED}, None),
        model.complete({"model": "anthropic/b", "messages": ASKED}, Heard()),
    ):
        with pytest.raises(BackendError, match="'anthropic/b' does not exist") as raised:
            await attempt
        assert (raised.value.status, raised.value.code) == (404, "model_not_found")


async def test_the_configured_models_are_listed() -> None:
    model = LiteLLMModel(["anthropic/a", "openai/b"], timeout_s=5)
    assert await model.models() == [
        {"id": "anthropic/a", "object": "model", "created": 0, "owned_by": "anthropic"},
        {"id": "openai/b", "object": "model", "created": 0, "owned_by": "openai"},
    ]


async def test_once_litellm_is_there_its_table_tells_how_much_a_model_takes() -> None:
    known, unknown = "openai/gpt-4o", "openai/nobody-knows-it"
    async with scripted_backend([text_reply("Hi.")]) as backend:
        model = LiteLLMModel([known, unknown], api_key=KEY, api_base=backend.base_url, timeout_s=5)
        async with aclosing(model):
            await model.complete({**BODY, "model": known}, None)
            listed = await model.models()
    assert [each.get("max_model_len") for each in listed] == [128_000, None]


def test_call_arguments_share_nothing_with_the_body() -> None:
    body = {**BODY, "tools": deepcopy(TOOLS), "min_p": 0.1, "chat_template_kwargs": {"a": [1]}}
    before = deepcopy(body)
    arguments = call_arguments(body)
    arguments["tools"][0]["function"]["parameters"].clear()
    arguments["extra_body"]["chat_template_kwargs"]["a"].clear()
    arguments["messages"].clear()
    assert body == before


# What comes back


async def test_fields_that_litellm_does_not_know_keep_their_places() -> None:
    message = {"role": "assistant", "content": "42", "odd": {"kept": True}, "reasoning": "hm"}
    async with scripted_backend([{"message": message}]) as backend, door(backend) as model:
        with anyio.fail_after(20):
            reply = await model.complete(BODY, None)
    assert reply.message == {**message, "reasoning_content": "hm"}


def test_what_litellm_reads_again_from_its_own_field_stays_there() -> None:
    signatures = {"thought_signatures": ["abc"], "citations": None}
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "SIG"}]
    fields = {"role": "assistant", "content": "hi", "thinking_blocks": blocks}
    moved = {**signatures, "thinking_blocks": blocks}
    answer = {"choices": [{"message": {**fields, "provider_specific_fields": moved}}]}
    kept = {**fields, "provider_specific_fields": {"thought_signatures": ["abc"]}}
    assert as_openai(answer, openai_like=False) == {"choices": [{"message": kept}]}


# Failures


async def test_an_error_inside_the_stream_comes_after_what_was_said() -> None:
    error = {"message": "out of memory", "type": "InternalServerError", "code": 500}
    heard = Heard()
    raised = await fails_with(Frames(frames(chunk({"content": "4"}), {"error": error})), heard)
    assert heard == [TextDelta("4")]
    assert raised.status == 500
    assert "out of memory" in raised.message


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    heard = Heard()
    raised = await fails_with(Frames(frames(chunk({"content": "4"})), cut=True), heard)
    assert heard == [TextDelta("4")]
    assert (raised.status, raised.code) == (502, "backend_unreachable")
    assert "closed before the answer was complete" in raised.message


async def test_our_key_is_never_told() -> None:
    raised = await fails_with(Refusal(401, f"Incorrect API key provided: {KEY}."))
    assert raised.status == 401
    assert raised.message == "Incorrect API key provided: [key]."


async def test_a_backend_that_is_not_there_is_unreachable() -> None:
    async with scripted_backend([]) as backend:
        pass
    async with door(backend) as model:
        with anyio.fail_after(20):
            for attempt in (
                model.complete(BODY, None),
                model.complete(BODY, Heard()),
                model.relay(BODY, {}),
                model.relay({**BODY, "stream": True}, {}),
            ):
                with pytest.raises(BackendError) as raised:
                    await attempt
                assert (raised.value.status, raised.value.code) == (502, "backend_unreachable")


async def test_a_silent_backend_is_a_timeout() -> None:
    held = Held(text_reply("too late"), until=asyncio.Event())
    async with scripted_backend([held]) as backend:
        model = LiteLLMModel([NAME], api_key=KEY, api_base=backend.base_url, timeout_s=0.05)
        async with aclosing(model):
            with anyio.fail_after(20), pytest.raises(BackendError) as raised:
                await model.complete(BODY, None)
    assert (raised.value.status, raised.value.code) == (504, "backend_timeout")


async def test_another_timeout_holds() -> None:
    held = Held(text_reply("too late"), until=asyncio.Event())
    async with scripted_backend([held]) as backend:
        model = LiteLLMModel([NAME], api_key=KEY, api_base=backend.base_url, timeout_s=60)
        async with aclosing(model):
            with anyio.fail_after(20), pytest.raises(BackendError) as raised:
                await model.with_timeout(0.05).complete(BODY, None)
    assert (raised.value.status, raised.value.code) == (504, "backend_timeout")


async def test_a_relayed_stream_tells_its_error_in_a_frame() -> None:
    error = {"message": "out of memory", "code": 500}
    item = Frames(frames(chunk({"content": "4"}), {"error": error}))
    async with scripted_backend([item]) as backend, door(backend) as model:
        with anyio.fail_after(20):
            relayed = await model.relay({**BODY, "stream": True}, {})
            body = b"".join([piece async for piece in relayed.body])
    said, failed, done = [event.removeprefix(b"data: ") for event in body.strip().split(b"\n\n")]
    assert json.loads(said)["choices"][0]["delta"]["content"] == "4"
    assert "out of memory" in json.loads(failed)["error"]["message"]
    assert done == b"[DONE]"


# Connections


async def test_a_run_that_is_cancelled_ends_the_backends_work() -> None:
    heard_first = asyncio.Event()

    async def on_delta(delta: ModelDelta) -> None:
        heard_first.set()

    held = Held(text_reply("The answer is 42."), until=asyncio.Event(), after_pieces=2)
    async with scripted_backend([held]) as backend, door(backend) as model:
        with anyio.fail_after(20):
            run = asyncio.create_task(model.complete(BODY, on_delta))
            await heard_first.wait()
            run.cancel()
            await backend.requests[0].gone.wait()
            with pytest.raises(asyncio.CancelledError):
                await run


async def test_a_relayed_body_that_is_closed_ends_the_backends_work() -> None:
    held = Held(text_reply("The answer is 42."), until=asyncio.Event(), after_pieces=2)
    async with scripted_backend([held]) as backend, door(backend) as model:
        with anyio.fail_after(20):
            relayed = await model.relay({**BODY, "stream": True}, {})
            await relayed.body.aclose()
            await backend.requests[0].gone.wait()


async def test_a_closed_door_does_not_shut_out_the_next() -> None:
    async with scripted_backend([text_reply("1"), text_reply("2")]) as backend:
        for expected in ("1", "2"):
            async with door(backend) as model:
                with anyio.fail_after(20):
                    reply = await model.complete(BODY, None)
            assert reply.message["content"] == expected


# Another provider's dialect: Anthropic's


@asynccontextmanager
async def anthropic(events: list[dict[str, Any]]) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server that streams these events to every request; gives its address and the requests."""
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


async def test_anthropics_signed_thinking_goes_there_and_back_also_without_tools() -> None:
    name, heard = "anthropic/claude-sonnet-4-5", Heard()
    async with anthropic(SIGNED_THINKING_AND_A_CALL) as (address, requests):
        model = LiteLLMModel([name], api_key=KEY, api_base=address, timeout_s=5)
        async with aclosing(model):
            body: dict[str, Any] = {"model": name, "messages": ASKED, "tools": TOOLS}
            with anyio.fail_after(20):
                first = await model.complete(body, heard)
                result = {"role": "tool", "tool_call_id": "tool_1", "content": "a.txt"}
                history = [*ASKED, first.message, result]
                await model.complete({"model": name, "messages": history}, heard)
    assert heard[:3] == [ReasoningDelta("let "), ReasoningDelta("me"), TextDelta("Looking.")]
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
