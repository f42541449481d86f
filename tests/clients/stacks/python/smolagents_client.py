"""smolagents: its model non-streamed and streamed, and an agent with a tool."""

from functools import cache
from typing import Any

from scenario_runner import KEY, MODEL, PROMPTS, TIMEOUT_S, run_scenarios
from scenario_runner import warmth as look_up
from smolagents import ChatMessage, LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def warmth(city: str) -> str:
    """Return the temperature in a city.

    Args:
        city: its name.
    """
    return look_up(city)


@cache
def model_at(url: str) -> OpenAIServerModel:
    options = {"max_retries": 0, "timeout": TIMEOUT_S}
    return OpenAIServerModel(MODEL, api_base=url, api_key=KEY, client_kwargs=options, retry=False)


def messages_for(prompt: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=prompt)]


def non_streamed(url: str, prompt: str) -> Any:
    message = model_at(url).generate(messages_for(prompt))
    usage = message.token_usage
    return {
        "text": message.content,
        "calls": message.tool_calls or [],
        "usage": [usage.input_tokens, usage.output_tokens],
    }


def streamed(url: str, prompt: str) -> Any:
    deltas = list(model_at(url).generate_stream(messages_for(prompt)))
    usage = [delta.token_usage for delta in deltas if delta.token_usage]
    return {
        "text": "".join(delta.content or "" for delta in deltas),
        "calls": [call for delta in deltas for call in delta.tool_calls or []],
        "usage": [n for used in usage for n in (used.input_tokens, used.output_tokens)],
    }


def tools(url: str) -> Any:
    agent = ToolCallingAgent([warmth], model_at(url), max_steps=3, verbosity_level=LogLevel.OFF)
    return agent.run(PROMPTS["tools"])


run_scenarios(
    variants={"non-streamed": non_streamed, "streamed": streamed}, scenarios={"tools": tools}
)
