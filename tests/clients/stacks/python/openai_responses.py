"""The openai SDK's Responses API: sync and async, non-streamed, streamed and by stream helper."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from scenario_runner import MODEL, PROMPTS, WARMTH, warmth

OWN_TOOL: dict[str, Any] = {"type": "function", "strict": False, **WARMTH["function"]}
SHELL: dict[str, Any] = {"type": "shell", "environment": {"type": "container_auto"}}


class Place(BaseModel):
    city: str
    degrees: int


def request_for(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "input": prompt}


def of_type(response: Any, kind: str) -> list[Any]:
    return [item for item in response.output if item.type == kind]


def parts_of(response: Any) -> dict[str, Any]:
    sandbox = response.model_extra["sandbox"]
    thoughts = [part.text for item in of_type(response, "reasoning") for part in item.summary]
    return {
        "text": response.output_text,
        "finish": {"completed": "stop"}.get(response.status, response.status),
        "calls": [item.name for item in of_type(response, "function_call")],
        "thought": "".join(thoughts),
        "usage": [response.usage.input_tokens, response.usage.output_tokens],
        "files": {file["filename"]: file["url"] for file in sandbox["files"]},
    }


def last_of(events: list[Any]) -> dict[str, Any]:
    """Return the parts of the last event's response. Its text must equal the streamed text."""
    response = parts_of(events[-1].response)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response["text"]
    return response


def variants(sync_at: Callable[[str], Any], async_at: Callable[[str], Any]) -> dict[str, Any]:
    """Return the variants that use the Responses API."""

    def non_streamed(url: str, prompt: str) -> Any:
        return parts_of(sync_at(url).responses.create(**request_for(prompt)))

    def streamed(url: str, prompt: str) -> Any:
        return last_of(list(sync_at(url).responses.create(**request_for(prompt), stream=True)))

    def helper(url: str, prompt: str) -> Any:
        with sync_at(url).responses.stream(**request_for(prompt)) as stream:
            events = list(stream)
            assert parts_of(stream.get_final_response()) == last_of(events)
        return last_of(events)

    async def streamed_async(url: str, prompt: str) -> Any:
        stream = await async_at(url).responses.create(**request_for(prompt), stream=True)
        return last_of([event async for event in stream])

    return {
        "responses": non_streamed,
        "responses streamed": streamed,
        "responses helper": helper,
        "responses async streamed": streamed_async,
    }


def scenarios(sync_at: Callable[[str], Any]) -> dict[str, Any]:
    """Return the scenarios that use the Responses API: client tools, parsed and hosted tools."""

    def tools(url: str) -> Any:
        responses = sync_at(url).responses
        messages: list[Any] = [{"role": "user", "content": PROMPTS["tools"]}]
        first = responses.create(model=MODEL, input=messages, tools=[OWN_TOOL])
        (call,) = of_type(first, "function_call")
        answer = {"call_id": call.call_id, "output": warmth("Bonn")}
        messages += [*first.output, {"type": "function_call_output", **answer}]
        return [
            parts_of(first),
            parts_of(responses.create(model=MODEL, input=messages, tools=[OWN_TOOL])),
        ]

    def shape(url: str) -> Any:
        parsed = sync_at(url).responses.parse(**request_for(PROMPTS["shape"]), text_format=Place)
        return parsed.output_parsed.model_dump()

    def hosted(url: str) -> Any:
        with sync_at(url).responses.stream(
            **request_for(PROMPTS["tools"]), tools=[SHELL, OWN_TOOL]
        ) as stream:
            return [
                event.item.type for event in stream if event.type == "response.output_item.done"
            ]

    return {"responses tools": tools, "responses shape": shape, "hosted": hosted}
