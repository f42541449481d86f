"""Call /v1/responses with the openai SDK."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import openai
import pytest
from openai.types.responses import Response

from proxy.models.scripted import call, tool_reply
from tests.fakes.backend import ScriptedBackend
from tests.fakes.server import EachKey, Kind, running_proxy

MODEL = "fake-model"


@asynccontextmanager
async def responses_client(
    backend: ScriptedBackend, state_dir: Path, kind: Kind = "memory"
) -> AsyncIterator[openai.AsyncOpenAI]:
    """Serve `backend` with the given data directory and yield an SDK client with the key "mine"."""
    async with (
        running_proxy(backend, kind, state_dir, keyring=EachKey()) as url,
        client_with_key(url, "mine") as client,
    ):
        yield client


def client_with_key(url: str, key: str) -> openai.AsyncOpenAI:
    """Return an SDK client with that key that never retries."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)


def with_other_key(mine: openai.AsyncOpenAI) -> openai.AsyncOpenAI:
    """Return a client of the same server with another key."""
    return mine.copy(api_key="yours")


async def create_response(client: openai.AsyncOpenAI, content: Any, **body: Any) -> Response:
    """Create one response and return it."""
    with anyio.fail_after(30):
        response: Response = await client.responses.create(model=MODEL, input=content, **body)
    return response


async def api_error(request: Any) -> openai.APIStatusError:
    """Await a request that must fail and return its error."""
    with anyio.fail_after(30), pytest.raises(openai.APIStatusError) as caught:
        await request
    return caught.value


def bash(command: str) -> dict[str, Any]:
    return tool_reply(call("execute_bash", command=command))


def sent_messages(backend: ScriptedBackend, number: int) -> list[tuple[str, Any]]:
    """Return role and content of each message in a backend request, without system messages."""
    messages = backend.requests[number].body["messages"]
    return [(each["role"], each["content"]) for each in messages if each["role"] != "system"]


def tool_results(backend: ScriptedBackend, number: int) -> list[str]:
    """Return the tool results in a backend request."""
    return [content for role, content in sent_messages(backend, number) if role == "tool"]


def container_of(response: Response) -> str:
    """Return the id of the container in which the response's run worked."""
    container_id: str = (response.model_extra or {})["sandbox"]["container_id"]
    return container_id


async def wait_until_finished(client: openai.AsyncOpenAI, response_id: str) -> Response:
    """Poll a response until it is no longer in progress, and return it."""
    with anyio.fail_after(30):
        while (response := await client.responses.retrieve(response_id)).status == "in_progress":
            await anyio.lowlevel.checkpoint()
    return response


async def stream_events(
    client: openai.AsyncOpenAI, content: str, headers: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Create a background response and return all of its events."""
    with anyio.fail_after(30):
        stream = await client.responses.create(
            model=MODEL, input=content, background=True, stream=True, extra_headers=headers
        )
        return [event.to_dict() async for event in stream]


async def replay_events(
    client: openai.AsyncOpenAI, response_id: str, **query: int
) -> list[dict[str, Any]]:
    """Return the events of a finished response. Read them raw: the SDK raises for error events."""
    with anyio.fail_after(30):
        answer = await client.responses.with_raw_response.retrieve(
            response_id, extra_query={"stream": "true", **query}
        )
        return sse_data(answer.text)


def sse_data(text: str) -> list[dict[str, Any]]:
    lines = (line for line in text.split("\n") if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in lines]
