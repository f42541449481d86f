"""pydantic-ai: run, run_stream, tools, typed output."""

from functools import cache
from typing import Any

import openai
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from stage import KEY, MODEL, SAID, TIMEOUT_S, play, warmth


class Place(BaseModel):
    """A city and its temperature."""

    city: str
    degrees: int


@cache
def model_at(url: str) -> OpenAIChatModel:
    client = openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))


@cache
def responses_model_at(url: str) -> OpenAIResponsesModel:
    client = openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(openai_client=client))


def agent_at(url: str, **how: Any) -> Any:
    return Agent(model_at(url), **how)


def shown(response: ModelResponse) -> dict[str, Any]:
    return {
        "text": "".join(part.content for part in response.parts if isinstance(part, TextPart)),
        "finish": response.finish_reason,
        "calls": [part.tool_name for part in response.parts if isinstance(part, ToolCallPart)],
        "thought": "".join(p.content for p in response.parts if isinstance(p, ThinkingPart)),
        "usage": [response.usage.input_tokens, response.usage.output_tokens],
    }


def responses(messages: list[ModelMessage]) -> list[ModelResponse]:
    return [message for message in messages if isinstance(message, ModelResponse)]


async def whole(url: str, words: str) -> Any:
    return await asked(agent_at(url), words)


async def by_responses(url: str, words: str) -> Any:
    return await asked(Agent(responses_model_at(url)), words)


async def asked(agent: Any, words: str) -> Any:
    (response,) = responses((await agent.run(words)).all_messages())
    return shown(response)


async def streamed(url: str, words: str) -> Any:
    return await asked_streaming(agent_at(url), words)


async def responses_streamed(url: str, words: str) -> Any:
    return await asked_streaming(Agent(responses_model_at(url)), words)


async def asked_streaming(agent: Any, words: str) -> Any:
    async with agent.run_stream(words) as result:
        deltas = [text async for text in result.stream_text(delta=True, debounce_by=None)]
    (response,) = responses(result.all_messages())
    assert "".join(deltas) == shown(response)["text"]
    return shown(response)


async def tools(url: str) -> Any:
    result = await agent_at(url, tools=[warmth]).run(SAID["tools"])
    return [shown(response) for response in responses(result.all_messages())]


async def responses_tools(url: str) -> Any:
    result = await Agent(responses_model_at(url), tools=[warmth]).run(SAID["tools"])
    return [shown(response) for response in responses(result.all_messages())]


async def tools_streamed(url: str) -> Any:
    async with agent_at(url, tools=[warmth]).run_stream(SAID["tools"]) as result:
        assert [text async for text in result.stream_text(delta=True)]
    return [shown(response) for response in responses(result.all_messages())]


async def shape(url: str) -> Any:
    """Request the answer with a forced tool call and with a JSON schema."""
    return [
        (await agent_at(url, output_type=kind).run(SAID["shape"])).output.model_dump()
        for kind in (Place, NativeOutput(Place))
    ]


play(
    ways={
        "whole": whole,
        "streamed": streamed,
        "responses": by_responses,
        "responses streamed": responses_streamed,
    },
    alone={
        "tools": tools,
        "tools streamed": tools_streamed,
        "responses tools": responses_tools,
        "shape": shape,
    },
)
