"""Anthropic messages over plain HTTP, and a parser for their events."""

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
BODY: dict[str, Any] = {
    "model": "fake-model",
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "A dot, please."}],
}
CODE_EXECUTION = {"type": "code_execution_20250825", "name": "code_execution"}
TEMPERATURE_TOOL = {
    "name": "warmth",
    "description": "How warm it is in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


class MessagesClient:
    """An HTTP client of /v1/messages and the backend behind the server."""

    def __init__(self, http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
        self.http = http
        self.backend = backend

    async def ask(self, headers: Mapping[str, str] | None = None, **body: Any) -> httpx.Response:
        """Send a request and return the complete response."""
        return await self.http.post(PATH, json={**BODY, **body}, headers=dict(headers or {}))

    async def message(self, headers: Mapping[str, str] | None = None, **body: Any) -> Any:
        """Send a request that must succeed and return its message."""
        response = await self.ask(headers, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def error(self, headers: Mapping[str, str] | None = None, **body: Any) -> Any:
        """Send a request that must fail and return its status and error."""
        response = await self.ask(headers, **body)
        body = response.json()
        assert body["type"] == "error"
        assert body["request_id"] == response.headers["request-id"]
        return response.status_code, body["error"]

    @property
    def last_request(self) -> dict[str, Any]:
        """The last request body that the backend received."""
        return self.backend.requests[-1].body


@asynccontextmanager
async def messages_client(
    script: list[Item], state_dir: Path, **changes: Any
) -> AsyncIterator[MessagesClient]:
    """Serve the scripted backend with in-memory sandboxes and yield a client of it."""
    with anyio.fail_after(20):
        async with (
            scripted_backend(by_history(script)) as backend,
            running_proxy(backend, "memory", state_dir, **changes) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            yield MessagesClient(http, backend)


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream; each `event:` name must equal the type in its data."""
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
    """Return the texts of a message's text blocks."""
    return [block["text"] for block in message["content"] if block["type"] == "text"]
