"""Clients of /v1/responses, by the openai SDK."""

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
async def client(
    backend: ScriptedBackend, state_dir: Path, kind: Kind = "memory"
) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a server that has this state."""
    async with (
        running_proxy(backend, kind, state_dir, keyring=EachKey()) as url,
        at(url, "mine") as found,
    ):
        yield found


def at(url: str, key: str) -> openai.AsyncOpenAI:
    """A client with that key, which asks once."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)


def other(mine: openai.AsyncOpenAI) -> openai.AsyncOpenAI:
    """Somebody else."""
    return mine.copy(api_key="yours")


async def ask(client: openai.AsyncOpenAI, said: Any, **body: Any) -> Response:
    """One response."""
    with anyio.fail_after(30):
        made: Response = await client.responses.create(model=MODEL, input=said, **body)
    return made


async def refused(asking: Any) -> openai.APIStatusError:
    """The error of a request that must fail."""
    with anyio.fail_after(30), pytest.raises(openai.APIStatusError) as caught:
        await asking
    return caught.value


def bash(command: str) -> dict[str, Any]:
    return tool_reply(call("execute_bash", command=command))


def told(backend: ScriptedBackend, number: int) -> list[tuple[str, Any]]:
    """What the backend was told in a request, without the house's own words."""
    messages = backend.requests[number].body["messages"]
    return [(each["role"], each["content"]) for each in messages if each["role"] != "system"]


def results(backend: ScriptedBackend, number: int) -> list[str]:
    """What the tools said in a request."""
    return [content for role, content in told(backend, number) if role == "tool"]


def container_of(response: Response) -> str:
    """Where its run worked."""
    found: str = (response.model_extra or {})["sandbox"]["container_id"]
    return found


async def over(client: openai.AsyncOpenAI, response_id: str) -> Response:
    """The response once it is at work no more."""
    with anyio.fail_after(30):
        while (found := await client.responses.retrieve(response_id)).status == "in_progress":
            await anyio.lowlevel.checkpoint()
    return found


async def streamed(
    client: openai.AsyncOpenAI, said: str, headers: Mapping[str, str]
) -> list[dict[str, Any]]:
    """All events of a response in the background."""
    with anyio.fail_after(30):
        stream = await client.responses.create(
            model=MODEL, input=said, background=True, stream=True, extra_headers=headers
        )
        return [event.to_dict() async for event in stream]


async def told_again(
    client: openai.AsyncOpenAI, response_id: str, **query: int
) -> list[dict[str, Any]]:
    """The events of a response that is over; the SDK itself would raise what one of them tells."""
    with anyio.fail_after(30):
        answer = await client.responses.with_raw_response.retrieve(
            response_id, extra_query={"stream": "true", **query}
        )
        return frames(answer.text)


def frames(text: str) -> list[dict[str, Any]]:
    lines = (line for line in text.split("\n") if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in lines]
