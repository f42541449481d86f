"""litellm as a client: completion non-streamed and streamed, tools."""

from typing import Any

import litellm
from pydantic import BaseModel
from scenario_runner import KEY, MODEL, PROMPTS, TIMEOUT_S, WARMTH, run_scenarios, warmth

litellm.suppress_debug_info = True


class Place(BaseModel):
    city: str
    degrees: int


def request_for(url: str, prompt: str) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": url,
        "api_key": KEY,
        "messages": [{"role": "user", "content": prompt}],
        "max_retries": 0,
        "timeout": TIMEOUT_S,
    }


def parts_of(completion: Any) -> dict[str, Any]:
    (choice,) = completion.choices
    message = choice.message.model_dump()
    notes = [note["url_citation"] for note in message.get("annotations") or []]
    return {
        "text": message["content"],
        "finish": choice.finish_reason,
        "calls": [call["function"]["name"] for call in message.get("tool_calls") or []],
        "thought": message.get("reasoning_content") or "",
        "usage": [completion.usage.prompt_tokens, completion.usage.completion_tokens],
        "cited": {note["title"]: note["url"] for note in notes},
        "pictures": [image["image_url"]["url"] for image in message.get("images") or []],
    }


def non_streamed(url: str, prompt: str) -> Any:
    return parts_of(litellm.completion(**request_for(url, prompt)))


def streamed(url: str, prompt: str) -> Any:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**request_for(url, prompt), **options))
    return parts_of(litellm.stream_chunk_builder(chunks))


async def non_streamed_async(url: str, prompt: str) -> Any:
    return parts_of(await litellm.acompletion(**request_for(url, prompt)))


def tools(url: str) -> Any:
    request = {**request_for(url, PROMPTS["tools"]), "tools": [WARMTH]}
    first = litellm.completion(**request)
    message = first.choices[0].message
    (call,) = message.tool_calls
    tool_message = {"role": "tool", "tool_call_id": call.id, "content": warmth("Bonn")}
    request["messages"] = [
        *request["messages"],
        message.model_dump(exclude_none=True),
        tool_message,
    ]
    return [parts_of(first), parts_of(litellm.completion(**request))]


def shape(url: str) -> Any:
    completion = litellm.completion(**request_for(url, PROMPTS["shape"]), response_format=Place)
    return Place.model_validate_json(completion.choices[0].message.content).model_dump()


run_scenarios(
    variants={"non-streamed": non_streamed, "streamed": streamed, "async": non_streamed_async},
    scenarios={"tools": tools, "shape": shape},
)
