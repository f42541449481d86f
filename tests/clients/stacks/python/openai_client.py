"""The openai SDK: sync and async, non-streamed, streamed and with its stream helper."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import openai
import openai_responses
from pydantic import BaseModel
from scenario_runner import KEY, MODEL, PROMPTS, TIMEOUT_S, WARMTH, run_scenarios, warmth

OPTIONS: dict[str, Any] = {"api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_S}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


class Place(BaseModel):
    city: str
    degrees: int


@cache
def sync_at(url: str) -> Any:
    return openai.OpenAI(base_url=url, **OPTIONS)


@cache
def async_at(url: str) -> Any:
    return openai.AsyncOpenAI(base_url=url, **OPTIONS)


def request_for(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}


def parts_of(completion: Any) -> dict[str, Any]:
    """Return the parts of a completion, non-streamed or assembled by the SDK."""
    (choice,) = completion.choices
    extra = choice.message.model_extra
    sandbox = completion.model_extra.get("sandbox", {})
    notes = [note.url_citation for note in choice.message.annotations or []]
    return {
        "text": choice.message.content,
        "finish": choice.finish_reason,
        "calls": [call.function.name for call in choice.message.tool_calls or []],
        "thought": extra.get("reasoning_content", ""),
        "usage": [completion.usage.prompt_tokens, completion.usage.completion_tokens],
        "cited": {note.title: note.url for note in notes},
        "pictures": [image["image_url"]["url"] for image in extra.get("images", [])],
        "files": {file["filename"]: file["url"] for file in sandbox.get("files", [])},
    }


def assembled(chunks: Iterable[Any]) -> dict[str, Any]:
    """Assemble the parts of a completion from the raw chunks of a stream."""
    text, thought = "", ""
    found: dict[str, Any] = {"calls": [], "cited": {}, "pictures": [], "files": {}, "usage": []}
    for chunk in chunks:
        if chunk.usage:
            found["usage"] += [chunk.usage.prompt_tokens, chunk.usage.completion_tokens]
        for choice in chunk.choices:
            extra = choice.delta.model_extra
            text += choice.delta.content or ""
            thought += extra.get("reasoning_content", "")
            found["calls"] += [call.function.name for call in choice.delta.tool_calls or []]
            found["pictures"] += [image["image_url"]["url"] for image in extra.get("images", [])]
            for note in extra.get("annotations", []):
                found["cited"][note["url_citation"]["title"]] = note["url_citation"]["url"]
            if choice.finish_reason:
                files = chunk.model_extra["sandbox"]["files"]
                found["finish"] = choice.finish_reason
                found["files"] = {file["filename"]: file["url"] for file in files}
    return {"text": text, "thought": thought, **found}


def non_streamed(url: str, prompt: str) -> Any:
    return parts_of(sync_at(url).chat.completions.create(**request_for(prompt)))


def streamed(url: str, prompt: str) -> Any:
    return assembled(
        sync_at(url).chat.completions.create(**request_for(prompt), stream=True, **USAGE)
    )


def helper(url: str, prompt: str) -> Any:
    with sync_at(url).chat.completions.stream(**request_for(prompt), **USAGE) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        completion = parts_of(stream.get_final_completion())
    assert "".join(deltas) == completion["text"]
    return completion


async def non_streamed_async(url: str, prompt: str) -> Any:
    return parts_of(await async_at(url).chat.completions.create(**request_for(prompt)))


async def streamed_async(url: str, prompt: str) -> Any:
    stream = await async_at(url).chat.completions.create(
        **request_for(prompt), stream=True, **USAGE
    )
    return assembled([chunk async for chunk in stream])


async def helper_async(url: str, prompt: str) -> Any:
    async with async_at(url).chat.completions.stream(**request_for(prompt), **USAGE) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        completion = parts_of(await stream.get_final_completion())
    assert "".join(deltas) == completion["text"]
    return completion


def tools(url: str) -> Any:
    """Answer a tool call without a helper of the SDK."""
    request = {**request_for(PROMPTS["tools"]), "tools": [WARMTH]}
    client = sync_at(url)
    first = client.chat.completions.create(**request)
    message = first.choices[0].message
    (call,) = message.tool_calls
    request["messages"] += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": warmth("Bonn")},
    ]
    return [parts_of(first), parts_of(client.chat.completions.create(**request))]


def tools_helper(url: str) -> Any:
    """Call the tool from messages that the stream helper assembled."""
    request = {**request_for(PROMPTS["tools"]), "tools": [WARMTH], **USAGE}
    steps = []
    client = sync_at(url)
    for _ in range(2):
        with client.chat.completions.stream(**request) as stream:
            completion = stream.get_final_completion()
        steps.append(parts_of(completion))
        message = completion.choices[0].message
        request["messages"].append(message.model_dump(exclude_none=True))
        request["messages"] += [
            {"role": "tool", "tool_call_id": call.id, "content": warmth("Bonn")}
            for call in message.tool_calls or []
        ]
    return steps


def shape(url: str) -> Any:
    parse = sync_at(url).chat.completions.parse
    completion = parse(**request_for(PROMPTS["shape"]), response_format=Place)
    return completion.choices[0].message.parsed.model_dump()


def shape_helper(url: str) -> Any:
    request = sync_at(url).chat.completions.stream(
        **request_for(PROMPTS["shape"]), response_format=Place
    )
    with request as stream:
        return stream.get_final_completion().choices[0].message.parsed.model_dump()


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
        **openai_responses.variants(sync_at, async_at),
    },
    scenarios={
        "tools": tools,
        "tools helper": tools_helper,
        "shape": shape,
        "shape helper": shape_helper,
        "models": models,
        **openai_responses.scenarios(sync_at),
    },
)
