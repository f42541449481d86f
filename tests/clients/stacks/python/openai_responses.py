"""The openai SDK's Responses API: sync and async, non-streamed, streamed and by stream helper."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from stage import MODEL, SAID, WARMTH, warmth

OWN_TOOL: dict[str, Any] = {"type": "function", "strict": False, **WARMTH["function"]}
SHELL: dict[str, Any] = {"type": "shell", "environment": {"type": "container_auto"}}


class Place(BaseModel):
    city: str
    degrees: int


def asked(words: str) -> dict[str, Any]:
    return {"model": MODEL, "input": words}


def of_type(response: Any, kind: str) -> list[Any]:
    return [item for item in response.output if item.type == kind]


def shown(response: Any) -> dict[str, Any]:
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
    response = shown(events[-1].response)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response["text"]
    return response


def ways(sync_at: Callable[[str], Any], async_at: Callable[[str], Any]) -> dict[str, Any]:
    """Ask in words, in each way there is."""

    def whole(url: str, words: str) -> Any:
        return shown(sync_at(url).responses.create(**asked(words)))

    def streamed(url: str, words: str) -> Any:
        return last_of(list(sync_at(url).responses.create(**asked(words), stream=True)))

    def helper(url: str, words: str) -> Any:
        with sync_at(url).responses.stream(**asked(words)) as stream:
            events = list(stream)
            assert shown(stream.get_final_response()) == last_of(events)
        return last_of(events)

    async def streamed_async(url: str, words: str) -> Any:
        stream = await async_at(url).responses.create(**asked(words), stream=True)
        return last_of([event async for event in stream])

    return {
        "responses": whole,
        "responses streamed": streamed,
        "responses helper": helper,
        "responses async streamed": streamed_async,
    }


def alone(sync_at: Callable[[str], Any]) -> dict[str, Any]:
    """With a tool, and in a form."""

    def tools(url: str) -> Any:
        responses = sync_at(url).responses
        said: list[Any] = [{"role": "user", "content": SAID["tools"]}]
        first = responses.create(model=MODEL, input=said, tools=[OWN_TOOL])
        (call,) = of_type(first, "function_call")
        answer = {"call_id": call.call_id, "output": warmth("Bonn")}
        said += [*first.output, {"type": "function_call_output", **answer}]
        return [
            shown(first),
            shown(responses.create(model=MODEL, input=said, tools=[OWN_TOOL])),
        ]

    def shape(url: str) -> Any:
        parsed = sync_at(url).responses.parse(**asked(SAID["shape"]), text_format=Place)
        return parsed.output_parsed.model_dump()

    def hosted(url: str) -> Any:
        with sync_at(url).responses.stream(
            **asked(SAID["tools"]), tools=[SHELL, OWN_TOOL]
        ) as stream:
            return [
                event.item.type for event in stream if event.type == "response.output_item.done"
            ]

    return {"responses tools": tools, "responses shape": shape, "hosted": hosted}
