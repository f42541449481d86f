"""The anthropic SDK: sync and async, non-streamed, streamed and with its helpers."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import anthropic
from pydantic import BaseModel
from scenario_runner import KEY, MODEL, PROMPTS, TIMEOUT_S, WARMTH, run_scenarios, warmth

OPTIONS: dict[str, Any] = {"api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_S}
FINISH = {"end_turn": "stop", "tool_use": "tool_calls"}
"""The chat finish reason for each stop reason."""
FUNCTION = WARMTH["function"]
TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}


class Place(BaseModel):
    city: str
    degrees: int


@cache
def sync_at(url: str) -> Any:
    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), **OPTIONS)


@cache
def async_at(url: str) -> Any:
    return anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), **OPTIONS)


def request_for(prompt: str) -> dict[str, Any]:
    """Return a request with extended thinking."""
    return {
        "model": MODEL,
        "max_tokens": 2000,
        "messages": [{"role": "user", "content": prompt}],
        "thinking": {"type": "adaptive"},
    }


def parts_of(message: Any) -> dict[str, Any]:
    """Return the parts of a message, non-streamed or assembled by the SDK."""
    usage = message.usage
    sandbox = message.model_extra.get("sandbox", {})
    return {
        "text": "".join(block.text for block in message.content if block.type == "text"),
        "finish": FINISH[message.stop_reason],
        "calls": [block.name for block in message.content if block.type == "tool_use"],
        "thought": "".join(block.thinking for block in message.content if block.type == "thinking"),
        "usage": [usage.input_tokens, usage.output_tokens],
        "files": {file["filename"]: file["url"] for file in sandbox.get("files", [])},
    }


def assembled(events: Iterable[Any]) -> dict[str, Any]:
    """Assemble the parts of a message from the raw events of a stream."""
    found: dict[str, Any] = {"text": "", "thought": "", "calls": []}
    for event in events:
        match event.type:
            case "content_block_start" if event.content_block.type == "tool_use":
                found["calls"].append(event.content_block.name)
            case "content_block_delta" if event.delta.type == "text_delta":
                found["text"] += event.delta.text
            case "content_block_delta" if event.delta.type == "thinking_delta":
                found["thought"] += event.delta.thinking
            case "message_delta":
                files = event.model_extra["sandbox"]["files"]
                found["finish"] = FINISH[event.delta.stop_reason]
                found["usage"] = [event.usage.input_tokens, event.usage.output_tokens]
                found["files"] = {file["filename"]: file["url"] for file in files}
    return found


def non_streamed(url: str, prompt: str) -> Any:
    return parts_of(sync_at(url).messages.create(**request_for(prompt)))


def streamed(url: str, prompt: str) -> Any:
    return assembled(sync_at(url).messages.create(**request_for(prompt), stream=True))


def helper(url: str, prompt: str) -> Any:
    with sync_at(url).messages.stream(**request_for(prompt)) as stream:
        streamed_text = "".join(stream.text_stream)
        message = parts_of(stream.get_final_message())
    assert streamed_text == message["text"]
    return message


async def non_streamed_async(url: str, prompt: str) -> Any:
    return parts_of(await async_at(url).messages.create(**request_for(prompt)))


async def streamed_async(url: str, prompt: str) -> Any:
    stream = await async_at(url).messages.create(**request_for(prompt), stream=True)
    return assembled([event async for event in stream])


async def helper_async(url: str, prompt: str) -> Any:
    async with async_at(url).messages.stream(**request_for(prompt)) as stream:
        streamed_text = "".join([text async for text in stream.text_stream])
        message = parts_of(await stream.get_final_message())
    assert streamed_text == message["text"]
    return message


def beta(url: str, prompt: str) -> Any:
    """Use the beta API with the hosted code execution tool."""
    computer = {"type": "code_execution_20250825", "name": "code_execution"}
    message = sync_at(url).beta.messages.create(
        **request_for(prompt), tools=[computer], betas=["code-execution-2025-08-25"]
    )
    assert message.container.id
    return parts_of(message)


def tools(url: str) -> Any:
    """Answer a tool call without a helper of the SDK."""
    request = {**request_for(PROMPTS["tools"]), "tools": [TOOL]}
    client = sync_at(url)
    first = client.messages.create(**request)
    request["messages"] += [first.to_param(), answer_to(first)]
    return [parts_of(first), parts_of(client.messages.create(**request))]


def tools_helper(url: str) -> Any:
    """Call the tool from messages that the stream helper assembled."""
    request = {**request_for(PROMPTS["tools"]), "tools": [TOOL]}
    steps = []
    client = sync_at(url)
    for _ in range(2):
        with client.messages.stream(**request) as stream:
            message = stream.get_final_message()
        steps.append(parts_of(message))
        request["messages"] += [message.to_param(), answer_to(message)]
    return steps


def answer_to(message: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": block.id, "content": warmth("Bonn")}
            for block in message.content
            if block.type == "tool_use"
        ],
    }


def tool_runner(url: str) -> Any:
    """Let the SDK run the tool and send its result."""
    tool = anthropic.beta_tool(warmth)
    runner = sync_at(url).beta.messages.tool_runner(**request_for(PROMPTS["tools"]), tools=[tool])
    return parts_of(runner.until_done())["text"]


def shape(url: str) -> Any:
    message = sync_at(url).messages.parse(**request_for(PROMPTS["shape"]), output_format=Place)
    return message.parsed_output.model_dump()


def shape_helper(url: str) -> Any:
    request = sync_at(url).messages.stream(**request_for(PROMPTS["shape"]), output_format=Place)
    with request as stream:
        return stream.get_final_message().parsed_output.model_dump()


def models(url: str) -> Any:
    return [model.id for model in sync_at(url).models.list()]


run_scenarios(
    variants={
        "non-streamed": non_streamed,
        "streamed": streamed,
        "helper": helper,
        "async": non_streamed_async,
        "async streamed": streamed_async,
        "async helper": helper_async,
        "beta": beta,
    },
    scenarios={
        "tools": tools,
        "tools helper": tools_helper,
        "tool runner": tool_runner,
        "shape": shape,
        "shape helper": shape_helper,
        "models": models,
    },
)
