"""Messages of Anthropic's dialect, asked for and read as the raw wire has them."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

from tests.fakes.backend import Item, ScriptedBackend, by_history, scripted_backend
from tests.fakes.server import running_proxy

PATH = "/v1/messages"
ASKED: dict[str, Any] = {
    "model": "fake-model",
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "A dot, please."}],
}
COMPUTER = {"type": "code_execution_20250825", "name": "code_execution"}
WARMTH = {
    "name": "warmth",
    "description": "How warm it is in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


class Client:
    """Asks the house."""

    def __init__(self, http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
        self.http = http
        self.backend = backend

    async def ask(self, headers: Mapping[str, str] | None = None, **body: Any) -> httpx.Response:
        """The whole response."""
        return await self.http.post(PATH, json={**ASKED, **body}, headers=dict(headers or {}))

    async def message(self, headers: Mapping[str, str] | None = None, **body: Any) -> Any:
        """The message of a request that must succeed."""
        response = await self.ask(headers, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def error(self, headers: Mapping[str, str] | None = None, **body: Any) -> Any:
        """Status and error of a request that must fail."""
        response = await self.ask(headers, **body)
        told = response.json()
        assert told["type"] == "error"
        assert told["request_id"] == response.headers["request-id"]
        return response.status_code, told["error"]

    @property
    def heard(self) -> dict[str, Any]:
        """What the backend was asked last."""
        return self.backend.requests[-1].body


@asynccontextmanager
async def asking(script: list[Item], state_dir: Path, **changes: Any) -> AsyncIterator[Client]:
    """A client before the house with sandboxes in memory."""
    with anyio.fail_after(20):
        async with (
            scripted_backend(by_history(script)) as backend,
            running_proxy(backend, "memory", state_dir, **changes) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            yield Client(http, backend)


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, each under the name that it bears itself."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, end = response.text.split("\n\n")
    assert end == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def texts(message: Any) -> list[str]:
    """The texts of a message."""
    return [block["text"] for block in message["content"] if block["type"] == "text"]
