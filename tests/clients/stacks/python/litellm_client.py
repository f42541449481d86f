"""litellm as a client: completion non-streamed and streamed, tools."""

from typing import Any

import litellm
from pydantic import BaseModel
from stage import KEY, MODEL, SAID, TIMEOUT_S, WARMTH, play, warmth

litellm.suppress_debug_info = True


class Place(BaseModel):
    city: str
    degrees: int


def asked(url: str, words: str) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": url,
        "api_key": KEY,
        "messages": [{"role": "user", "content": words}],
        "max_retries": 0,
        "timeout": TIMEOUT_S,
    }


def shown(completion: Any) -> dict[str, Any]:
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


def whole(url: str, words: str) -> Any:
    return shown(litellm.completion(**asked(url, words)))


def streamed(url: str, words: str) -> Any:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**asked(url, words), **options))
    return shown(litellm.stream_chunk_builder(chunks))


async def whole_async(url: str, words: str) -> Any:
    return shown(await litellm.acompletion(**asked(url, words)))


def tools(url: str) -> Any:
    asking = {**asked(url, SAID["tools"]), "tools": [WARMTH]}
    first = litellm.completion(**asking)
    message = first.choices[0].message
    (call,) = message.tool_calls
    tool_message = {"role": "tool", "tool_call_id": call.id, "content": warmth("Bonn")}
    asking["messages"] = [*asking["messages"], message.model_dump(exclude_none=True), tool_message]
    return [shown(first), shown(litellm.completion(**asking))]


def shape(url: str) -> Any:
    completion = litellm.completion(**asked(url, SAID["shape"]), response_format=Place)
    return Place.model_validate_json(completion.choices[0].message.content).model_dump()


play(
    ways={"whole": whole, "streamed": streamed, "async": whole_async},
    alone={"tools": tools, "shape": shape},
)
