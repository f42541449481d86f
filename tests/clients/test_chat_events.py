"""The raw server-sent events of a streamed chat completion, field by field."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from openai.types.chat import ChatCompletionChunk

from policies.sessions import container_id
from proxy.api.dependencies import owner_of
from proxy.models.scripted import call, text_reply
from tests.fakes.backend import (
    Frames,
    Held,
    ScriptedBackend,
    by_history,
    chunk,
    frames,
    scripted_backend,
)
from tests.fakes.server import running_proxy

COMMAND = "printf 'GIF89a;' > output/dot.gif"
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
SCRIPT = [
    {
        "reasoning": "A dot.",
        "tool_calls": [call("execute_bash", command=COMMAND)],
        "usage": USAGE,
    },
    {
        "tool_calls": [call("submit", answer="See /testbed/output/dot.gif")],
        "usage": USAGE,
    },
]
BODY = {
    "model": "fake-model",
    "messages": [{"role": "user", "content": "A dot, please."}],
    "stream": True,
}
KEEP_ALIVE = ": keep-alive"
DATA_URL = "data:image/gif;base64,R0lGODlhOw=="
Frame = dict[str, Any]


@pytest.fixture
async def backend() -> AsyncIterator[ScriptedBackend]:
    with anyio.fail_after(10):
        async with scripted_backend(by_history(SCRIPT)) as running:
            yield running


async def stream_chat(
    url: str, headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    async with httpx.AsyncClient(headers=headers) as client:
        return await client.post(f"{url}/v1/chat/completions", json={**BODY, **body})


def parse_events(text: str) -> list[Frame]:
    """Return the data of each event; the last event must be `[DONE]`."""
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def deltas(found: list[Frame]) -> list[dict[str, Any]]:
    return [frame["choices"][0]["delta"] for frame in found]


def reasoning_delta(text: str) -> dict[str, str]:
    return {"reasoning": text, "reasoning_content": text}


def outcome(run_id: str, url: str) -> Frame:
    """Return the `sandbox` object of a run whose only file has the link `url`."""
    file = {
        "id": url.split("/")[-2],
        "filename": "dot.gif",
        "path": "/testbed/output/dot.gif",
        "bytes": 7,
        "mime_type": "image/gif",
        "sha256": "a95fb9e1bcb6dfbd670260be7616d62aee27563d6ea7baf82deb48bf7cf03541",
        "url": url,
    }
    ended = {
        "container_id": container_id(owner_of(""), run_id),
        "stop_reason": "submitted",
        "route": "auto",
        "steps": 1,
    }
    return {"v": 1, "run_id": run_id, **ended, "files": [file]}


async def test_streamed_run_sends_the_documented_events(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        answer = await stream_chat(url)
        found = parse_events(answer.text)
    # Values that differ in each run.
    run_id = answer.headers["x-sandbox-run"]
    created = found[0]["created"]
    ms = found[3]["sandbox"]["ms"]
    link = found[-1]["sandbox"]["files"][0]["url"]

    def frame(delta: Any, finish_reason: str | None = None, **beside: Any) -> Frame:
        return {
            "id": f"chatcmpl-{run_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": "fake-model",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
            **beside,
        }

    start = {"v": 1, "run_id": run_id, "step": 1, "kind": "tool_start", "tool": "execute_bash"}
    end = {"v": 1, "step": 1, "kind": "tool_end", "exit_code": 0, "ms": ms}
    picture = {"type": "image_url", "index": 0, "image_url": {"url": DATA_URL}}
    citation = {"url": link, "title": "dot.gif", "start_index": 5, "end_index": 12}
    assert found == [
        frame({"role": "assistant", "content": ""}),
        frame(reasoning_delta("A dot.")),
        frame(reasoning_delta(f"\n````console\n$ {COMMAND}\n"), sandbox=start),
        frame(reasoning_delta(f"[exit 0, {ms / 1000:.1f} s, 0 lines]\n````\n"), sandbox=end),
        frame({"content": "See "}),
        frame({"content": f"[dot.gif]({link})"}),
        frame({"images": [picture]}),
        frame(
            {"annotations": [{"type": "url_citation", "url_citation": citation}]},
            "stop",
            sandbox=outcome(run_id, link),
        ),
    ]


async def test_no_reasoning_follows_the_first_content(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    """A chat UI would show later reasoning above the answer."""
    async with running_proxy(backend, "memory", tmp_path) as url:
        found = deltas(parse_events((await stream_chat(url)).text))
    begun = next(number for number, delta in enumerate(found) if delta.get("content"))
    assert [delta for delta in found[begun:] if "reasoning" in delta] == []


async def test_stream_headers_disable_buffering_and_name_the_run(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        headers = (await stream_chat(url)).headers
    run_id = headers["x-sandbox-run"]
    assert headers["content-type"].split(";")[0] == "text/event-stream"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-sandbox-container"] == container_id(owner_of(""), run_id)


async def test_every_event_is_a_chunk_of_the_same_completion(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        answer = await stream_chat(url, stream_options={"include_usage": True})
    found = parse_events(answer.text)
    chunks = [ChatCompletionChunk.model_validate(frame) for frame in found]
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{answer.headers['x-sandbox-run']}"}
    assert len({(chunk.object, chunk.created, chunk.model) for chunk in chunks}) == 1
    roles = [chunk.choices[0].delta.role for chunk in chunks if chunk.choices]
    assert roles == ["assistant"] + [None] * (len(roles) - 1)


async def test_usage_is_the_last_chunk_only_if_requested(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        requested = parse_events(
            (await stream_chat(url, stream_options={"include_usage": True})).text
        )
        declined = parse_events(
            (await stream_chat(url, stream_options={"include_usage": False})).text
        )
        default = parse_events((await stream_chat(url)).text)
    assert ["usage" in frame for frame in requested] == [False] * (len(requested) - 1) + [True]
    usage = requested[-1]["usage"]
    summed = {key: usage[key] for key in USAGE}
    assert summed == {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
    assert requested[-1]["choices"] == []
    assert not any("usage" in frame for frame in [*declined, *default])


@pytest.mark.parametrize(
    "request_options",
    [
        {"sandbox": {"steps": "off"}},
        {"headers": {"X-Sandbox-Steps": "off"}},
        {"sandbox": {"steps": "off"}, "headers": {"X-Sandbox-Steps": "reasoning"}},
    ],
)
async def test_stream_with_steps_off_has_the_models_reasoning_but_no_steps(
    request_options: dict[str, Any], backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        found = parse_events((await stream_chat(url, **request_options)).text)
    thinking = [delta for delta in deltas(found) if "reasoning" in delta]
    assert thinking == [reasoning_delta("A dot.")]
    assert ["sandbox" in frame for frame in found] == [False] * (len(found) - 1) + [True]
    assert all("sandbox" not in request.body for request in backend.requests)


async def test_server_default_for_steps_is_overridden_by_the_request(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path, steps="off") as url:
        by_default = deltas(parse_events((await stream_chat(url)).text))
        by_request = deltas(
            parse_events((await stream_chat(url, sandbox={"steps": "reasoning"})).text)
        )
    assert [delta for delta in by_default if "reasoning" in delta] == [reasoning_delta("A dot.")]
    assert reasoning_delta(f"\n````console\n$ {COMMAND}\n") in by_request


async def test_silent_stream_sends_keep_alive_comments(tmp_path: Path) -> None:
    speak = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("Done."), speak)]) as backend,
        running_proxy(backend, "memory", tmp_path, keep_alive_s=0.02) as url,
        httpx.AsyncClient() as client,
    ):
        with anyio.fail_after(10):
            path = f"{url}/v1/chat/completions"
            async with client.stream("POST", path, json=BODY) as answer:
                lines = answer.aiter_lines()
                first = await anext(lines)
                silence = [await anext(lines) for _ in range(6)]
                speak.set()
                rest = [line async for line in lines if line not in ("", KEEP_ALIVE)]
    role = {"role": "assistant", "content": ""}
    assert deltas([json.loads(first.removeprefix("data: "))]) == [role]
    assert [line for line in silence if line] == [KEEP_ALIVE] * 3
    assert deltas([json.loads(line.removeprefix("data: ")) for line in rest[:-1]]) == [
        {"content": "Done."},
        {},
    ]


async def test_error_during_a_stream_is_one_event_before_done(tmp_path: Path) -> None:
    broken = {"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}
    script = [Frames(frames(chunk({"reasoning": "Let me see."}), broken, "[DONE]"))]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        with anyio.fail_after(10):
            answer = await stream_chat(url, stream_options={"include_usage": True})
    role, thinking, error = parse_events(answer.text)
    assert deltas([role, thinking]) == [
        {"role": "assistant", "content": ""},
        reasoning_delta("Let me see."),
    ]
    assert error == {
        "error": {
            "message": "engine died",
            "type": "InternalServerError",
            "param": None,
            "code": "500",
        }
    }


async def test_client_tool_calls_are_sent_in_pieces_before_the_last_chunk(
    tmp_path: Path,
) -> None:
    weather = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    own = {"id": "call_w", "type": "function", "function": weather}
    script = [{"content": "I ask.", "message": {"role": "assistant", "tool_calls": [own]}}]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        with anyio.fail_after(10):
            tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
            found = parse_events((await stream_chat(url, tools=tools)).text)
    minted = f"call_{found[-1]['sandbox']['run_id']}_1"
    begun = {**own, "index": 0, "id": minted, "function": {"name": "weather", "arguments": ""}}
    pieces = ('{"city":', ' "Bonn"}')
    assert deltas(found)[1:] == [
        {"tool_calls": [begun]},
        *({"tool_calls": [{"index": 0, "function": {"arguments": each}}]} for each in pieces),
        {},
    ]
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert found[-1]["sandbox"]["stop_reason"] == "client_tool_calls"
