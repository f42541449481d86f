"""The unmodified openai SDK: each way to send a chat request, on each kind of sandbox."""

import hashlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from policies.sessions import container_id
from proxy.api.dependencies import owner_of
from proxy.models.scripted import call, text_reply
from tests.fakes.backend import ScriptedBackend, by_history, scripted_backend
from tests.fakes.server import BACKEND_KEY, KINDS, Kind, running_proxy

TABLE = b"n,square\n1,1\n2,4\n"
DOT = b"GIF89a;"
COMMAND = (
    r"printf 'n,square\n1,1\n2,4\n' > output/table.csv; "
    "printf 'GIF89a;' > output/dot.gif; echo made"
)
WORK = by_history(
    [
        {
            "reasoning": "A table, then.",
            "tool_calls": [call("execute_bash", command=COMMAND)],
            "usage": {
                "prompt_tokens": 100,
                "completion_tokens": 20,
                "total_tokens": 120,
                "prompt_tokens_details": {"cached_tokens": 64},
            },
        },
        {
            "tool_calls": [call("submit", answer="Here: [the table](/testbed/output/table.csv).")],
            "usage": {
                "prompt_tokens": 150,
                "completion_tokens": 10,
                "total_tokens": 160,
                "prompt_tokens_details": {"cached_tokens": 100},
            },
        },
    ]
)
MESSAGES: list[Any] = [{"role": "user", "content": "Squares as a table, please."}]
REASONING = f"A table, then.\n````console\n$ {COMMAND}\n"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture
async def backend() -> AsyncIterator[ScriptedBackend]:
    with anyio.fail_after(60):
        async with scripted_backend(WORK) as running:
            yield running


def openai_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@dataclass(frozen=True)
class Outcome:
    """The final result that a client has received, streamed or not."""

    content: str | None
    thought: str
    annotations: Any
    images: Any
    finish_reason: str | None
    sandbox: dict[str, Any]


def outcome_of_completion(completion: ChatCompletion) -> Outcome:
    (choice,) = completion.choices
    extra = choice.message.model_extra or {}
    assert choice.message.tool_calls is None
    return Outcome(
        choice.message.content,
        extra["reasoning_content"],
        [note.model_dump() for note in choice.message.annotations or []],
        extra["images"],
        choice.finish_reason,
        (completion.model_extra or {})["sandbox"],
    )


def outcome_of_chunks(chunks: Iterable[ChatCompletionChunk]) -> Outcome:
    content, thought = "", ""
    found: dict[str, Any] = {}
    for chunk in chunks:
        if not chunk.choices:
            continue
        (choice,) = chunk.choices
        extra = choice.delta.model_extra or {}
        assert choice.delta.tool_calls is None
        content += choice.delta.content or ""
        thought += extra.get("reasoning_content", "")
        found |= {key: extra[key] for key in ("annotations", "images") if key in extra}
        if choice.finish_reason:
            found |= {"end": choice.finish_reason, "sandbox": (chunk.model_extra or {})["sandbox"]}
    return Outcome(
        content, thought, found["annotations"], found["images"], found["end"], found["sandbox"]
    )


async def check_outcome(outcome: Outcome, url: str) -> None:
    """Assert the answer, its files, their citations and links."""
    run_id = outcome.sandbox["run_id"]
    dot, table = outcome.sandbox["files"]
    container = container_id(owner_of(""), run_id)
    place = f"{url}/v1/containers/{container}/files"
    assert outcome.sandbox == {
        "v": 1,
        "run_id": run_id,
        "container_id": container,
        "stop_reason": "submitted",
        "route": "auto",
        "steps": 1,
        "files": [
            file_object(dot, "dot.gif", DOT, "image/gif"),
            file_object(table, "table.csv", TABLE, "text/csv"),
        ],
    }
    assert table["url"].startswith(f"{place}/{table['id']}/content?exp=")
    assert outcome.content == f"Here: [the table]({table['url']})."
    end = len(outcome.content)
    assert outcome.annotations == [
        url_citation(dot["url"], "dot.gif", end, end),
        url_citation(table["url"], "table.csv", 7, 16),
    ]
    picture = {"url": "data:image/gif;base64,R0lGODlhOw=="}
    assert outcome.images == [{"type": "image_url", "index": 0, "image_url": picture}]
    assert outcome.finish_reason == "stop"
    assert outcome.thought.startswith(REASONING)
    async with httpx.AsyncClient() as browser:
        assert (await browser.get(dot["url"])).content == DOT
        assert (await browser.get(table["url"])).content == TABLE


def file_object(file: dict[str, Any], name: str, data: bytes, mime_type: str) -> dict[str, Any]:
    return {
        "id": file["id"],
        "filename": name,
        "path": f"/testbed/output/{name}",
        "bytes": len(data),
        "mime_type": mime_type,
        "sha256": hashlib.sha256(data).hexdigest(),
        "url": file["url"],
    }


def url_citation(url: str, title: str, start: int, end: int) -> dict[str, Any]:
    citation = {"url": url, "title": title, "start_index": start, "end_index": end}
    return {"type": "url_citation", "url_citation": citation}


def check_usage(usage: Any) -> None:
    """Assert the summed usage of both model calls."""
    reported = usage.model_dump(exclude_none=True)
    sandbox_usage = reported.pop("sandbox")
    assert reported == {
        "prompt_tokens": 250,
        "completion_tokens": 30,
        "total_tokens": 280,
        "prompt_tokens_details": {"cached_tokens": 164},
    }
    # The second prompt is the first, the model's reply, and 30 tokens of observation.
    counts = ("llm_calls", "tool_calls", "context_tokens", "env_tokens")
    assert [sandbox_usage[key] for key in counts] == [2, 2, 150, 30]
    assert sandbox_usage["wall_ms"] >= sandbox_usage["sandbox_ms"] >= 0


# Each way to ask


async def test_async_client_gets_the_answer_and_its_files_and_usage(
    backend: ScriptedBackend, kind: Kind, tmp_path: Path
) -> None:
    async with running_proxy(backend, kind, tmp_path) as url, openai_client(url) as client:
        completion = await client.chat.completions.create(model="fake-model", messages=MESSAGES)
        await check_outcome(outcome_of_completion(completion), url)
        check_usage(completion.usage)
        assert (completion.object, completion.model) == ("chat.completion", "fake-model")


async def test_sync_client_gets_the_answer_and_its_files_and_usage(
    backend: ScriptedBackend, kind: Kind, tmp_path: Path
) -> None:
    def ask(url: str) -> ChatCompletion:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return client.chat.completions.create(model="fake-model", messages=MESSAGES)

    async with running_proxy(backend, kind, tmp_path) as url:
        completion = await anyio.to_thread.run_sync(ask, url)
        await check_outcome(outcome_of_completion(completion), url)
        check_usage(completion.usage)


async def test_sync_client_streams_the_answer(
    backend: ScriptedBackend, kind: Kind, tmp_path: Path
) -> None:
    def ask(url: str) -> list[ChatCompletionChunk]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            completions = client.chat.completions
            return list(completions.create(model="fake-model", messages=MESSAGES, stream=True))

    async with running_proxy(backend, kind, tmp_path) as url:
        chunks = await anyio.to_thread.run_sync(ask, url)
        await check_outcome(outcome_of_chunks(chunks), url)


async def test_chat_stream_has_no_usage_by_default(
    backend: ScriptedBackend, kind: Kind, tmp_path: Path
) -> None:
    async with running_proxy(backend, kind, tmp_path) as url, openai_client(url) as client:
        stream = await client.chat.completions.create(
            model="fake-model", messages=MESSAGES, stream=True
        )
        chunks = [chunk async for chunk in stream]
        await check_outcome(outcome_of_chunks(chunks), url)
        assert [chunk.usage for chunk in chunks] == [None] * len(chunks)


async def test_stream_ends_with_requested_usage(
    backend: ScriptedBackend, kind: Kind, tmp_path: Path
) -> None:
    async with running_proxy(backend, kind, tmp_path) as url, openai_client(url) as client:
        stream = await client.chat.completions.create(
            model="fake-model",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = [chunk async for chunk in stream]
        await check_outcome(outcome_of_chunks(chunks), url)
        assert {chunk.usage for chunk in chunks} == {None}
        assert last.choices == []
        check_usage(last.usage)


async def test_stream_helper_assembles_the_completion(
    backend: ScriptedBackend, kind: Kind, tmp_path: Path
) -> None:
    async with running_proxy(backend, kind, tmp_path) as url, openai_client(url) as client:
        async with client.chat.completions.stream(model="fake-model", messages=MESSAGES) as stream:
            async for _ in stream:
                pass
            completion = await stream.get_final_completion()
        (choice,) = completion.choices
        assert choice.finish_reason == "stop"
        assert (choice.message.content or "").startswith("Here: [the table](http://")
        assert choice.message.tool_calls is None


async def test_raw_response_has_sandbox_headers(
    backend: ScriptedBackend, kind: Kind, tmp_path: Path
) -> None:
    async with running_proxy(backend, kind, tmp_path) as url, openai_client(url) as client:
        completions = client.chat.completions.with_raw_response
        response = await completions.create(model="fake-model", messages=MESSAGES)
        assert response.http_response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        outcome = outcome_of_completion(response.parse())
        await check_outcome(outcome, url)
        assert response.headers["x-sandbox-run"] == outcome.sandbox["run_id"]
        assert response.headers["x-sandbox-container"] == outcome.sandbox["container_id"]


async def test_streaming_response_is_read_line_by_line(
    backend: ScriptedBackend, kind: Kind, tmp_path: Path
) -> None:
    async with running_proxy(backend, kind, tmp_path) as url, openai_client(url) as client:
        completions = client.chat.completions.with_streaming_response
        asked = completions.create(model="fake-model", messages=MESSAGES, stream=True)
        async with asked as response:
            lines = [line async for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        bodies = [line.removeprefix("data: ") for line in lines[:-1]]
        chunks = [ChatCompletionChunk.model_validate_json(body) for body in bodies]
        await check_outcome(outcome_of_chunks(chunks), url)


# What passes through


async def test_extra_parameters_reach_the_backend(backend: ScriptedBackend, tmp_path: Path) -> None:
    asked = {
        "model": "fake-model",
        "temperature": 0.3,
        "seed": 7,
        "extra_body": {"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}},
    }
    async with running_proxy(backend, "memory", tmp_path) as url, openai_client(url) as client:
        await client.chat.completions.create(messages=MESSAGES, **asked)
    assert len(backend.requests) == 2
    for request in backend.requests:
        beside = {
            key: value for key, value in request.body.items() if key not in ("messages", "tools")
        }
        assert beside == {
            "stream": True,
            "stream_options": request.body["stream_options"],  # the server always requests usage
            "model": "fake-model",
            "temperature": 0.3,
            "seed": 7,
            "top_k": 5,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        assert request.headers["authorization"] == f"Bearer {BACKEND_KEY}"


async def test_response_format_applies_only_to_the_final_answer(tmp_path: Path) -> None:
    script = [text_reply("It is 42."), text_reply('{"answer": 42}')]
    form = {"type": "json_object"}
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        completion = await client.chat.completions.create(
            model="fake-model", messages=MESSAGES, extra_body={"response_format": form}
        )
    assert completion.choices[0].message.content == '{"answer": 42}'
    turn, final = (request.body for request in backend.requests)
    assert ("tools" in turn, "response_format" in turn) == (True, False)
    assert ("tools" in final, final["response_format"]) == (False, form)


async def test_models_are_listed_with_and_without_plain_suffix(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url, openai_client(url) as client:
        listed = [model async for model in client.models.list()]
        assert [model.id for model in listed] == ["fake-model", "fake-model:plain"]
        for model in listed:
            found = await client.models.retrieve(model.id)
            assert (found, found.model_extra) == (model, {"max_model_len": 1_000_000})
