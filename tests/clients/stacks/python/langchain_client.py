"""langchain-openai and langchain-anthropic: invoke, stream, tools, structured output."""

from functools import cache
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from scenario_runner import KEY, MODEL, PROMPTS, TIMEOUT_S, run_scenarios, warmth


class Place(BaseModel):
    """A city and its temperature."""

    city: str
    degrees: int


@cache
def model_at(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=url,
        api_key=KEY,
        model=MODEL,
        max_retries=0,
        timeout=TIMEOUT_S,
        stream_usage=True,
        **options,
    )


def responses_model_at(url: str) -> ChatOpenAI:
    """Return a model that uses the Responses API."""
    return model_at(url, use_responses_api=True)


@cache
def anthropic_model_at(url: str) -> ChatAnthropic:
    """Return a model that uses Anthropic's API."""
    return ChatAnthropic(
        base_url=url.removesuffix("/v1"),
        api_key=KEY,
        model=MODEL,
        max_tokens=2000,
        max_retries=0,
        timeout=TIMEOUT_S,
    )


FINISH = {"completed": "stop", "end_turn": "stop"}
"""The chat finish reason for each status or stop reason of the other two APIs."""


def parts_of(message: Any) -> dict[str, Any]:
    usage = message.usage_metadata
    metadata = message.response_metadata
    return {
        "text": message.text,
        "finish": metadata.get("finish_reason")
        or FINISH.get(metadata.get("status") or metadata["stop_reason"]),
        "calls": [call["name"] for call in message.tool_calls],
        "usage": [usage["input_tokens"], usage["output_tokens"]],
    }


def non_streamed(url: str, prompt: str) -> Any:
    return parts_of(model_at(url).invoke(prompt))


def streamed(url: str, prompt: str) -> Any:
    first, *others = model_at(url).stream(prompt)
    return parts_of(sum(others, first))


async def non_streamed_async(url: str, prompt: str) -> Any:
    return parts_of(await model_at(url).ainvoke(prompt))


async def streamed_async(url: str, prompt: str) -> Any:
    first, *others = [chunk async for chunk in model_at(url).astream(prompt)]
    return parts_of(sum(others, first))


def responses(url: str, prompt: str) -> Any:
    return parts_of(responses_model_at(url).invoke(prompt))


def responses_streamed(url: str, prompt: str) -> Any:
    first, *others = responses_model_at(url).stream(prompt)
    return parts_of(sum(others, first))


def anthropic(url: str, prompt: str) -> Any:
    return parts_of(anthropic_model_at(url).invoke(prompt))


def anthropic_streamed(url: str, prompt: str) -> Any:
    first, *others = anthropic_model_at(url).stream(prompt)
    return parts_of(sum(others, first))


def tools(url: str) -> Any:
    return tools_of(model_at(url))


def responses_tools(url: str) -> Any:
    return tools_of(responses_model_at(url))


def anthropic_tools(url: str) -> Any:
    return tools_of(anthropic_model_at(url))


def tools_of(model_at_url: ChatOpenAI | ChatAnthropic) -> Any:
    model = model_at_url.bind_tools([tool(warmth)])
    messages: list[BaseMessage] = [HumanMessage(PROMPTS["tools"])]
    first = model.invoke(messages)
    (call,) = first.tool_calls
    messages += [first, ToolMessage(warmth(**call["args"]), tool_call_id=call["id"])]
    return [parts_of(first), parts_of(model.invoke(messages))]


def shape(url: str) -> Any:
    """Request the answer with a JSON schema and with a forced tool call."""
    return [
        model_at(url)
        .with_structured_output(Place, method=method)
        .invoke(PROMPTS["shape"])
        .model_dump()
        for method in ("json_schema", "function_calling")
    ]


run_scenarios(
    variants={
        "non-streamed": non_streamed,
        "streamed": streamed,
        "async": non_streamed_async,
        "async streamed": streamed_async,
        "responses": responses,
        "responses streamed": responses_streamed,
        "anthropic": anthropic,
        "anthropic streamed": anthropic_streamed,
    },
    scenarios={
        "tools": tools,
        "responses tools": responses_tools,
        "anthropic tools": anthropic_tools,
        "shape": shape,
    },
)
