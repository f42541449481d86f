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
from scenario_runner import KEY, MODEL, PROMPTS, TIMEOUT_S, run_scenarios, warmth


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


def agent_at(url: str, **options: Any) -> Any:
    return Agent(model_at(url), **options)


def parts_of(response: ModelResponse) -> dict[str, Any]:
    return {
        "text": "".join(part.content for part in response.parts if isinstance(part, TextPart)),
        "finish": response.finish_reason,
        "calls": [part.tool_name for part in response.parts if isinstance(part, ToolCallPart)],
        "thought": "".join(p.content for p in response.parts if isinstance(p, ThinkingPart)),
        "usage": [response.usage.input_tokens, response.usage.output_tokens],
    }


def responses(messages: list[ModelMessage]) -> list[ModelResponse]:
    return [message for message in messages if isinstance(message, ModelResponse)]


async def non_streamed(url: str, prompt: str) -> Any:
    return await run_agent(agent_at(url), prompt)


async def by_responses(url: str, prompt: str) -> Any:
    return await run_agent(Agent(responses_model_at(url)), prompt)


async def run_agent(agent: Any, prompt: str) -> Any:
    (response,) = responses((await agent.run(prompt)).all_messages())
    return parts_of(response)


async def streamed(url: str, prompt: str) -> Any:
    return await stream_agent(agent_at(url), prompt)


async def responses_streamed(url: str, prompt: str) -> Any:
    return await stream_agent(Agent(responses_model_at(url)), prompt)


async def stream_agent(agent: Any, prompt: str) -> Any:
    async with agent.run_stream(prompt) as result:
        deltas = [text async for text in result.stream_text(delta=True, debounce_by=None)]
    (response,) = responses(result.all_messages())
    assert "".join(deltas) == parts_of(response)["text"]
    return parts_of(response)


async def tools(url: str) -> Any:
    result = await agent_at(url, tools=[warmth]).run(PROMPTS["tools"])
    return [parts_of(response) for response in responses(result.all_messages())]


async def responses_tools(url: str) -> Any:
    result = await Agent(responses_model_at(url), tools=[warmth]).run(PROMPTS["tools"])
    return [parts_of(response) for response in responses(result.all_messages())]


async def tools_streamed(url: str) -> Any:
    async with agent_at(url, tools=[warmth]).run_stream(PROMPTS["tools"]) as result:
        assert [text async for text in result.stream_text(delta=True)]
    return [parts_of(response) for response in responses(result.all_messages())]


async def shape(url: str) -> Any:
    """Request the answer with a forced tool call and with a JSON schema."""
    return [
        (await agent_at(url, output_type=kind).run(PROMPTS["shape"])).output.model_dump()
        for kind in (Place, NativeOutput(Place))
    ]


run_scenarios(
    variants={
        "non-streamed": non_streamed,
        "streamed": streamed,
        "responses": by_responses,
        "responses streamed": responses_streamed,
    },
    scenarios={
        "tools": tools,
        "tools streamed": tools_streamed,
        "responses tools": responses_tools,
        "shape": shape,
    },
)
