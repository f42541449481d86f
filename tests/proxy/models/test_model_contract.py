"""The behaviour that all implementations of `Model` share."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from proxy.agent.events import ModelCallAccepted, ModelDelta, ToolCallDelta
from proxy.agent.model import CompletionStopped, Model
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError
from proxy.models.litellm_model import LiteLLMModel
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.fakes.backend import scripted_backend
from tests.proxy.models.delta_recorder import DeltaRecorder

# pydantic warns about litellm: about one of its types, and about copies of streamed chunks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "What is 6 times 7?"}]


@dataclass
class OpenedModel:
    model: Model
    name: str
    """The model's name in requests."""
    received: Callable[[], list[dict[str, Any]]]
    """Returns the bodies that the backend received."""
    has_tokenizer: bool = False


OpenModel = Callable[[Sequence[Mapping[str, Any]]], AbstractAsyncContextManager[OpenedModel]]

TIMEOUT_S = 120
"""The first call of litellm imports it, which takes seconds."""


@asynccontextmanager
async def openai_http(replies: Sequence[Mapping[str, Any]]) -> AsyncIterator[OpenedModel]:
    async with scripted_backend(replies) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key="sk-test-key", timeout_s=5)
        async with aclosing(model):
            yield OpenedModel(model, "fake-model", lambda: [seen.body for seen in backend.requests])


@asynccontextmanager
async def litellm_openai(replies: Sequence[Mapping[str, Any]]) -> AsyncIterator[OpenedModel]:
    async with open_litellm("openai/fake-model", replies) as open_model:
        yield open_model


@asynccontextmanager
async def litellm_hosted_vllm(replies: Sequence[Mapping[str, Any]]) -> AsyncIterator[OpenedModel]:
    async with open_litellm("hosted_vllm/fake-model", replies) as open_model:
        yield open_model


@asynccontextmanager
async def open_litellm(
    name: str, replies: Sequence[Mapping[str, Any]]
) -> AsyncIterator[OpenedModel]:
    async with scripted_backend(replies) as backend:
        model = LiteLLMModel([name], api_key="sk-test-key", api_base=backend.base_url, timeout_s=5)
        async with aclosing(model):
            yield OpenedModel(
                model, name, lambda: [seen.body for seen in backend.requests], has_tokenizer=True
            )


@asynccontextmanager
async def scripted(replies: Sequence[Mapping[str, Any]]) -> AsyncIterator[OpenedModel]:
    model = ScriptedModel(replies, name="fake-model")
    async with aclosing(model):
        yield OpenedModel(model, "fake-model", lambda: model.requests)


@pytest.fixture(params=[openai_http, litellm_openai, litellm_hosted_vllm, scripted])
def open_model(request: pytest.FixtureRequest) -> OpenModel:
    @asynccontextmanager
    async def opened(replies: Sequence[Mapping[str, Any]]) -> AsyncIterator[OpenedModel]:
        with anyio.fail_after(TIMEOUT_S):
            async with request.param(replies) as model:
                yield model

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


async def test_completion_has_message_finish_reason_and_usage(open_model: OpenModel) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    async with open_model([{**text_reply("It is 42."), "usage": usage}]) as opened:
        completion = await opened.model.complete({"model": opened.name, "messages": MESSAGES}, None)
    assert completion.message == {"role": "assistant", "content": "It is 42."}
    assert completion.finish_reason == "stop"
    assert {key: completion.usage[key] for key in usage} == usage


async def test_streamed_completion_has_the_text_of_its_deltas(open_model: OpenModel) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    deltas = DeltaRecorder()
    async with open_model([{**text_reply("The answer is forty-two."), "usage": usage}]) as opened:
        completion = await opened.model.complete(
            {"model": opened.name, "messages": MESSAGES}, deltas
        )
    assert len(deltas) == 3
    assert deltas.text == "The answer is forty-two."
    assert completion.message == {"role": "assistant", "content": "The answer is forty-two."}
    assert completion.finish_reason == "stop"
    assert {key: completion.usage[key] for key in usage} == usage


async def test_stopped_completion_contains_the_text_so_far(open_model: OpenModel) -> None:
    deltas = DeltaRecorder()

    async def stop_at_once(delta: ModelDelta) -> None:
        await deltas(delta)
        if deltas:
            raise CompletionStopped("max_tokens")

    async with open_model([text_reply("The answer is forty-two.")]) as opened:
        body = {"model": opened.name, "messages": MESSAGES}
        with pytest.raises(CompletionStopped) as stopped:
            await opened.model.complete(body, stop_at_once)
    sent = stopped.value.partial_completion
    assert sent is not None
    assert (sent.message["content"], bool(sent.response)) == (deltas.text, True)


async def test_streamed_model_call_reports_that_the_backend_accepted_it(
    open_model: OpenModel,
) -> None:
    refusal = {"error": {"status": 400, "message": "no"}}
    accepted, refused = DeltaRecorder(), DeltaRecorder()
    async with open_model([refusal, text_reply("42")]) as opened:
        body = {"model": opened.name, "messages": MESSAGES}
        with pytest.raises(BackendError):
            await opened.model.complete(body, refused)
        await opened.model.complete(body, accepted)
    assert (refused.progress, accepted.progress) == ([], [ModelCallAccepted()])


async def test_tools_are_sent_and_tool_calls_are_returned(open_model: OpenModel) -> None:
    async with open_model([TWO_CALLS]) as opened:
        body = {"model": opened.name, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto"}
        completion = await opened.model.complete(body, None)
        received = opened.received()
    assert received[0]["tools"] == TOOLS
    assert received[0]["tool_choice"] == "auto"
    assert completion.message == TWO_CALLS_MESSAGE
    assert completion.finish_reason == "tool_calls"


async def test_streamed_tool_calls_are_returned_as_the_same_message_as_unstreamed_ones(
    open_model: OpenModel,
) -> None:
    deltas = DeltaRecorder()
    async with open_model([TWO_CALLS]) as opened:
        body = {"model": opened.name, "messages": MESSAGES, "tools": TOOLS}
        completion = await opened.model.complete(body, deltas)
        received = opened.received()
    assert received[0]["tools"] == TOOLS
    assert completion.message == TWO_CALLS_MESSAGE
    assert completion.finish_reason == "tool_calls"
    assert deltas.text == "Let me compute."
    assert deltas.arguments(0) == '{"command": "echo 6 times 7"}'
    assert deltas.arguments(1) == '{"answer": "42"}'
    names = {delta.index: delta.name for delta in deltas if isinstance(delta, ToolCallDelta)}
    assert names == {0: "bash", 1: "submit"}


async def test_content_is_null_if_only_tools_are_called(open_model: OpenModel) -> None:
    async with open_model([tool_reply(call("submit")), tool_reply(call("submit"))]) as opened:
        body = {"model": opened.name, "messages": MESSAGES, "tools": TOOLS}
        unstreamed = await opened.model.complete(body, None)
        streamed = await opened.model.complete(body, DeltaRecorder())
    assert unstreamed.message["content"] is None
    assert streamed.message["content"] is None


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning_is_streamed_and_preserved(open_model: OpenModel, streamed: bool) -> None:
    deltas = DeltaRecorder()
    async with open_model([{"content": "42", "reasoning": "six sevens are..."}]) as opened:
        body = {"model": opened.name, "messages": MESSAGES}
        completion = await opened.model.complete(body, deltas if streamed else None)
    reasoning = {completion.message.get("reasoning"), completion.message.get("reasoning_content")}
    assert reasoning - {None} == {"six sevens are..."}
    assert deltas.reasoning == ("six sevens are..." if streamed else "")


async def test_all_fields_of_the_request_reach_the_model(open_model: OpenModel) -> None:
    async with open_model([text_reply("42")]) as opened:
        body = {
            "model": opened.name,
            "messages": [{"role": "system", "content": "Be brief."}, *MESSAGES],
            "temperature": 0.5,
            "seed": 7,
            "min_p": 0.1,
            "chat_template_kwargs": {"enable_thinking": False},
            "metadata": {"run": "1"},
        }
        before = deepcopy(body)
        await opened.model.complete(body, None)
        received = opened.received()[0]
    assert {**received, "model": opened.name} == before
    assert body == before


async def test_message_of_the_model_can_be_sent_back_in_the_next_request(
    open_model: OpenModel,
) -> None:
    async with open_model([TWO_CALLS, text_reply("It is 42.")]) as opened:
        body: dict[str, Any] = {"model": opened.name, "messages": MESSAGES, "tools": TOOLS}
        first = await opened.model.complete(body, DeltaRecorder())
        results = [
            {"role": "tool", "tool_call_id": tool_call["id"], "content": "ok"}
            for tool_call in first.message["tool_calls"]
        ]
        history = [*MESSAGES, first.message, *results]
        # The last call of a run withdraws the tools although the history has calls.
        last = await opened.model.complete(
            {"model": opened.name, "messages": history}, DeltaRecorder()
        )
        received = opened.received()[1]
    assert received["messages"] == history
    assert last.message["content"] == "It is 42."


async def test_error_keeps_status_and_message(open_model: OpenModel) -> None:
    error = {"status": 429, "message": "slow down", "code": "rate_limited", "retry_after_s": 7}
    async with open_model([{"error": error}]) as opened:
        body = {"model": opened.name, "messages": MESSAGES}
        with pytest.raises(BackendError, match="slow down") as raised:
            await opened.model.complete(body, None)
    assert raised.value.status == 429
    assert raised.value.code == "rate_limited"
    assert raised.value.retry_after_s == 7


@pytest.mark.parametrize("streamed", [False, True])
async def test_context_overflow_is_recognized(open_model: OpenModel, streamed: bool) -> None:
    message = "This model's maximum context length is 4096 tokens, you asked for 9000."
    async with open_model([{"error": {"status": 400, "message": message}}]) as opened:
        body = {"model": opened.name, "messages": MESSAGES}
        with pytest.raises(ContextOverflowError) as raised:
            await opened.model.complete(body, DeltaRecorder() if streamed else None)
    assert raised.value.status == 400
    assert raised.value.code == "context_length_exceeded"
    assert message in raised.value.message


@pytest.mark.parametrize("streamed", [False, True])
async def test_refusal_of_tools_is_recognized(open_model: OpenModel, streamed: bool) -> None:
    message = (
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    )
    async with open_model([{"error": {"status": 400, "message": message}}]) as opened:
        body = {"model": opened.name, "messages": MESSAGES, "tools": TOOLS}
        with pytest.raises(ToolsRefusedError) as raised:
            await opened.model.complete(body, DeltaRecorder() if streamed else None)
    assert raised.value.status == 400
    assert message in raised.value.message


async def test_relayed_request_gets_the_models_response(open_model: OpenModel) -> None:
    async with open_model([TWO_CALLS]) as opened:
        relayed = await opened.model.relay(
            {"model": opened.name, "messages": MESSAGES, "tools": TOOLS}, {}
        )
        completion = json.loads(b"".join([piece async for piece in relayed.body]))
    assert relayed.status == 200
    assert relayed.headers["content-type"].startswith("application/json")
    choice = completion["choices"][0]
    assert (choice["message"], choice["finish_reason"]) == (TWO_CALLS_MESSAGE, "tool_calls")


async def test_relayed_stream_ends_with_done(open_model: OpenModel) -> None:
    async with open_model([text_reply("The answer is forty-two.")]) as opened:
        relayed = await opened.model.relay(
            {"model": opened.name, "messages": MESSAGES, "stream": True}, {}
        )
        body = b"".join([piece async for piece in relayed.body])
    assert relayed.status == 200
    assert relayed.headers["content-type"].startswith("text/event-stream")
    *chunks, done = [event.removeprefix(b"data: ") for event in body.strip().split(b"\n\n")]
    assert done == b"[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "The answer is forty-two."


async def test_error_of_a_relayed_request_is_returned_as_a_response_and_not_raised(
    open_model: OpenModel,
) -> None:
    error = {"status": 429, "message": "slow down", "retry_after_s": 7}
    async with open_model([{"error": error}]) as opened:
        relayed = await opened.model.relay({"model": opened.name, "messages": MESSAGES}, {})
        body = json.loads(b"".join([piece async for piece in relayed.body]))
    assert relayed.status == 429
    assert relayed.headers["retry-after"] == "7"
    assert body["error"]["message"] == "slow down"


async def test_unread_relayed_body_can_be_closed_twice(open_model: OpenModel) -> None:
    async with open_model([text_reply("The answer is forty-two.")]) as opened:
        relayed = await opened.model.relay(
            {"model": opened.name, "messages": MESSAGES, "stream": True}, {}
        )
        await relayed.body.aclose()
        await relayed.body.aclose()


async def test_models_are_listed(open_model: OpenModel) -> None:
    async with open_model([]) as opened:
        models = await opened.model.models()
    assert [model["id"] for model in models] == [opened.name]


async def test_count_tokens_makes_no_model_call(open_model: OpenModel) -> None:
    async with open_model([]) as opened:
        count = await opened.model.count_tokens(opened.name, "Six times seven is forty-two.")
    if opened.has_tokenizer:
        assert count is not None
        assert 5 < count < 10
    else:
        assert count is None
    assert opened.received() == []


async def test_tokenize_prompt_returns_none_if_the_backend_does_not_tokenize(
    open_model: OpenModel,
) -> None:
    async with open_model([]) as opened:
        tokens = await opened.model.tokenize_prompt(opened.name, "<|im_start|>user")
    assert tokens is None
    assert opened.received() == []


async def test_model_can_be_closed_twice(open_model: OpenModel) -> None:
    async with open_model([text_reply("42")]) as opened:
        await opened.model.complete({"model": opened.name, "messages": MESSAGES}, None)
        await opened.model.aclose()
        await opened.model.aclose()
