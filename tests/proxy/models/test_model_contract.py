"""What every door to a model does, whatever stands behind it."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from proxy.agent.events import CallAccepted, ModelDelta, ToolCallDelta
from proxy.agent.model import CompletionStopped, Model
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError
from proxy.models.litellm_model import LiteLLMModel
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.fakes.backend import scripted_backend
from tests.proxy.models.delta_recorder import DeltaRecorder

# litellm's own: pydantic warns of one of its types and of how it copies streamed chunks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
ASKED = [{"role": "user", "content": "What is 6 times 7?"}]


@dataclass
class Door:
    model: Model
    name: str
    """What the requests call the model."""
    received: Callable[[], list[dict[str, Any]]]
    """The bodies that the other side got."""


Opened = Callable[[Sequence[Mapping[str, Any]]], AbstractAsyncContextManager[Door]]

PATIENCE_S = 120
"""litellm is imported at its first use."""


@asynccontextmanager
async def openai_http(replies: Sequence[Mapping[str, Any]]) -> AsyncIterator[Door]:
    async with scripted_backend(replies) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key="sk-test-key", timeout_s=5)
        async with aclosing(model):
            yield Door(model, "fake-model", lambda: [seen.body for seen in backend.requests])


@asynccontextmanager
async def litellm_openai(replies: Sequence[Mapping[str, Any]]) -> AsyncIterator[Door]:
    async with litellm_door("openai/fake-model", replies) as door:
        yield door


@asynccontextmanager
async def litellm_hosted_vllm(replies: Sequence[Mapping[str, Any]]) -> AsyncIterator[Door]:
    async with litellm_door("hosted_vllm/fake-model", replies) as door:
        yield door


@asynccontextmanager
async def litellm_door(name: str, replies: Sequence[Mapping[str, Any]]) -> AsyncIterator[Door]:
    async with scripted_backend(replies) as backend:
        model = LiteLLMModel([name], api_key="sk-test-key", api_base=backend.base_url, timeout_s=5)
        async with aclosing(model):
            yield Door(model, name, lambda: [seen.body for seen in backend.requests])


@asynccontextmanager
async def scripted(replies: Sequence[Mapping[str, Any]]) -> AsyncIterator[Door]:
    model = ScriptedModel(replies, name="fake-model")
    async with aclosing(model):
        yield Door(model, "fake-model", lambda: model.requests)


@pytest.fixture(params=[openai_http, litellm_openai, litellm_hosted_vllm, scripted])
def door(request: pytest.FixtureRequest) -> Opened:
    opened: Opened = request.param
    return opened


TWO_CALLS = tool_reply(
    call("bash", command="echo 6 times 7"), call("submit", answer="42"), content="Let me compute."
)
TWO_CALLS_MESSAGE = {
    "role": "assistant",
    "content": "Let me compute.",
    "tool_calls": [
        {
            "id": "call_0_0",
            "type": "function",
            "function": {"name": "bash", "arguments": '{"command": "echo 6 times 7"}'},
        },
        {
            "id": "call_0_1",
            "type": "function",
            "function": {"name": "submit", "arguments": '{"answer": "42"}'},
        },
    ],
}


async def test_a_whole_reply_has_message_finish_reason_and_usage(door: Opened) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    async with door([{**text_reply("It is 42."), "usage": usage}]) as opened:
        with anyio.fail_after(PATIENCE_S):
            reply = await opened.model.complete({"model": opened.name, "messages": ASKED}, None)
    assert reply.message == {"role": "assistant", "content": "It is 42."}
    assert reply.finish_reason == "stop"
    assert {key: reply.usage[key] for key in usage} == usage


async def test_a_streamed_reply_comes_in_pieces_that_make_the_same_message(door: Opened) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    heard = DeltaRecorder()
    async with door([{**text_reply("The answer is forty-two."), "usage": usage}]) as opened:
        with anyio.fail_after(PATIENCE_S):
            reply = await opened.model.complete({"model": opened.name, "messages": ASKED}, heard)
    assert len(heard) == 3
    assert heard.text == "The answer is forty-two."
    assert reply.message == {"role": "assistant", "content": "The answer is forty-two."}
    assert reply.finish_reason == "stop"
    assert {key: reply.usage[key] for key in usage} == usage


async def test_a_reply_that_its_listener_stops_is_known_as_far_as_it_came(door: Opened) -> None:
    heard = DeltaRecorder()

    async def stop_at_once(delta: ModelDelta) -> None:
        await heard(delta)
        if heard:
            raise CompletionStopped("max_tokens")

    async with door([text_reply("The answer is forty-two.")]) as opened:
        body = {"model": opened.name, "messages": ASKED}
        with anyio.fail_after(PATIENCE_S), pytest.raises(CompletionStopped) as stopped:
            await opened.model.complete(body, stop_at_once)
    sent = stopped.value.partial
    assert sent is not None
    assert (sent.message["content"], bool(sent.response)) == (heard.text, True)


async def test_a_streamed_call_tells_that_it_was_accepted(door: Opened) -> None:
    refusal = {"error": {"status": 400, "message": "no"}}
    accepted, refused = DeltaRecorder(), DeltaRecorder()
    async with door([refusal, text_reply("42")]) as opened:
        body = {"model": opened.name, "messages": ASKED}
        with anyio.fail_after(PATIENCE_S):
            with pytest.raises(BackendError):
                await opened.model.complete(body, refused)
            await opened.model.complete(body, accepted)
    assert (refused.progress, accepted.progress) == ([], [CallAccepted()])


async def test_tools_reach_the_model_and_its_calls_come_back(door: Opened) -> None:
    async with door([TWO_CALLS]) as opened:
        body = {"model": opened.name, "messages": ASKED, "tools": TOOLS, "tool_choice": "auto"}
        with anyio.fail_after(PATIENCE_S):
            reply = await opened.model.complete(body, None)
        received = opened.received()
    assert received[0]["tools"] == TOOLS
    assert received[0]["tool_choice"] == "auto"
    assert reply.message == TWO_CALLS_MESSAGE
    assert reply.finish_reason == "tool_calls"


async def test_streamed_tool_calls_come_back_as_the_same_message(door: Opened) -> None:
    heard = DeltaRecorder()
    async with door([TWO_CALLS]) as opened:
        body = {"model": opened.name, "messages": ASKED, "tools": TOOLS}
        with anyio.fail_after(PATIENCE_S):
            reply = await opened.model.complete(body, heard)
        received = opened.received()
    assert received[0]["tools"] == TOOLS
    assert reply.message == TWO_CALLS_MESSAGE
    assert reply.finish_reason == "tool_calls"
    assert heard.text == "Let me compute."
    assert heard.arguments(0) == '{"command": "echo 6 times 7"}'
    assert heard.arguments(1) == '{"answer": "42"}'
    names = {delta.index: delta.name for delta in heard if isinstance(delta, ToolCallDelta)}
    assert names == {0: "bash", 1: "submit"}


async def test_the_content_of_a_reply_that_only_calls_tools_is_null(door: Opened) -> None:
    async with door([tool_reply(call("submit")), tool_reply(call("submit"))]) as opened:
        body = {"model": opened.name, "messages": ASKED, "tools": TOOLS}
        with anyio.fail_after(PATIENCE_S):
            whole = await opened.model.complete(body, None)
            streamed = await opened.model.complete(body, DeltaRecorder())
    assert whole.message["content"] is None
    assert streamed.message["content"] is None


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning_is_heard_and_kept(door: Opened, streamed: bool) -> None:
    heard = DeltaRecorder()
    async with door([{"content": "42", "reasoning": "six sevens are..."}]) as opened:
        body = {"model": opened.name, "messages": ASKED}
        with anyio.fail_after(PATIENCE_S):
            reply = await opened.model.complete(body, heard if streamed else None)
    kept = {reply.message.get("reasoning"), reply.message.get("reasoning_content")}
    assert kept - {None} == {"six sevens are..."}
    assert heard.reasoning == ("six sevens are..." if streamed else "")


async def test_every_field_of_the_request_reaches_the_model(door: Opened) -> None:
    async with door([text_reply("42")]) as opened:
        body = {
            "model": opened.name,
            "messages": [{"role": "system", "content": "Be brief."}, *ASKED],
            "temperature": 0.5,
            "seed": 7,
            "min_p": 0.1,
            "chat_template_kwargs": {"enable_thinking": False},
            "metadata": {"run": "1"},
        }
        before = deepcopy(body)
        with anyio.fail_after(PATIENCE_S):
            await opened.model.complete(body, None)
        received = opened.received()[0]
    assert {**received, "model": opened.name} == before
    assert body == before


async def test_the_history_can_be_sent_back_as_it_was_received(door: Opened) -> None:
    async with door([TWO_CALLS, text_reply("It is 42.")]) as opened:
        body: dict[str, Any] = {"model": opened.name, "messages": ASKED, "tools": TOOLS}
        with anyio.fail_after(PATIENCE_S):
            first = await opened.model.complete(body, DeltaRecorder())
            results = [
                {"role": "tool", "tool_call_id": tool_call["id"], "content": "ok"}
                for tool_call in first.message["tool_calls"]
            ]
            history = [*ASKED, first.message, *results]
            # The last call of a run withdraws the tools although the history has calls.
            last = await opened.model.complete(
                {"model": opened.name, "messages": history}, DeltaRecorder()
            )
        received = opened.received()[1]
    assert received["messages"] == history
    assert last.message["content"] == "It is 42."


async def test_a_refusal_keeps_status_and_message(door: Opened) -> None:
    error = {"status": 429, "message": "slow down", "code": "rate_limited", "retry_after_s": 7}
    async with door([{"error": error}]) as opened:
        body = {"model": opened.name, "messages": ASKED}
        with anyio.fail_after(PATIENCE_S), pytest.raises(BackendError, match="slow down") as raised:
            await opened.model.complete(body, None)
    assert raised.value.status == 429
    assert raised.value.code == "rate_limited"
    assert raised.value.retry_after_s == 7


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_that_is_too_long_is_told_apart(door: Opened, streamed: bool) -> None:
    message = "This model's maximum context length is 4096 tokens, you asked for 9000."
    async with door([{"error": {"status": 400, "message": message}}]) as opened:
        body = {"model": opened.name, "messages": ASKED}
        with anyio.fail_after(PATIENCE_S), pytest.raises(ContextOverflowError) as raised:
            await opened.model.complete(body, DeltaRecorder() if streamed else None)
    assert raised.value.status == 400
    assert raised.value.code == "context_length_exceeded"
    assert message in raised.value.message


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_refusal_of_tools_is_told_from_other_refusals(door: Opened, streamed: bool) -> None:
    message = (
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    )
    async with door([{"error": {"status": 400, "message": message}}]) as opened:
        body = {"model": opened.name, "messages": ASKED, "tools": TOOLS}
        with anyio.fail_after(PATIENCE_S), pytest.raises(ToolsRefusedError) as raised:
            await opened.model.complete(body, DeltaRecorder() if streamed else None)
    assert raised.value.status == 400
    assert message in raised.value.message


async def test_a_relayed_request_is_answered_as_the_model_answers(door: Opened) -> None:
    async with door([TWO_CALLS]) as opened:
        with anyio.fail_after(PATIENCE_S):
            relayed = await opened.model.relay(
                {"model": opened.name, "messages": ASKED, "tools": TOOLS}, {}
            )
            completion = json.loads(b"".join([piece async for piece in relayed.body]))
    assert relayed.status == 200
    assert relayed.headers["content-type"].startswith("application/json")
    choice = completion["choices"][0]
    assert (choice["message"], choice["finish_reason"]) == (TWO_CALLS_MESSAGE, "tool_calls")


async def test_a_relayed_stream_ends_with_done(door: Opened) -> None:
    async with door([text_reply("The answer is forty-two.")]) as opened:
        with anyio.fail_after(PATIENCE_S):
            relayed = await opened.model.relay(
                {"model": opened.name, "messages": ASKED, "stream": True}, {}
            )
            body = b"".join([piece async for piece in relayed.body])
    assert relayed.status == 200
    assert relayed.headers["content-type"].startswith("text/event-stream")
    *chunks, done = [event.removeprefix(b"data: ") for event in body.strip().split(b"\n\n")]
    assert done == b"[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "The answer is forty-two."


async def test_a_relayed_refusal_is_an_answer_and_no_exception(door: Opened) -> None:
    error = {"status": 429, "message": "slow down", "retry_after_s": 7}
    async with door([{"error": error}]) as opened:
        with anyio.fail_after(PATIENCE_S):
            relayed = await opened.model.relay({"model": opened.name, "messages": ASKED}, {})
            body = json.loads(b"".join([piece async for piece in relayed.body]))
    assert relayed.status == 429
    assert relayed.headers["retry-after"] == "7"
    assert body["error"]["message"] == "slow down"


async def test_a_relayed_body_can_be_closed_unread_and_twice(door: Opened) -> None:
    async with door([text_reply("The answer is forty-two.")]) as opened:
        with anyio.fail_after(PATIENCE_S):
            relayed = await opened.model.relay(
                {"model": opened.name, "messages": ASKED, "stream": True}, {}
            )
            await relayed.body.aclose()
            await relayed.body.aclose()


async def test_the_models_are_listed(door: Opened) -> None:
    async with door([]) as opened:
        with anyio.fail_after(PATIENCE_S):
            models = await opened.model.models()
    assert [model["id"] for model in models] == [opened.name]


async def test_a_text_is_counted_or_said_not_to_be_and_nothing_is_asked(door: Opened) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with door([]) as opened:
            count = await opened.model.count_tokens(opened.name, "Six times seven is forty-two.")
        assert count is None or 5 < count < 10
        assert opened.received() == []


async def test_a_door_can_be_closed_twice(door: Opened) -> None:
    async with door([text_reply("42")]) as opened:
        with anyio.fail_after(PATIENCE_S):
            await opened.model.complete({"model": opened.name, "messages": ASKED}, None)
            await opened.model.aclose()
            await opened.model.aclose()
