"""Chat completions over plain HTTP, for behaviour that no SDK exposes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
from anyio.abc import TaskGroup

from tests.fakes.backend import ScriptedBackend, SeenRequest

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "fake-model",
    "messages": [{"role": "user", "content": "How many?"}],
}
FIRST, SECOND = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}


def http_client(url: str) -> httpx.AsyncClient:
    """Return an HTTP client without a timeout of its own; the test sets the limit."""
    return httpx.AsyncClient(base_url=url, timeout=None)


async def post_chat(
    client: httpx.AsyncClient, headers: Mapping[str, str] | None = None, **body: Any
) -> httpx.Response:
    """Send one chat request and return the complete response."""
    return await client.post(PATH, json={**BODY, **body}, headers=dict(headers or {}))


def answer_text(response: httpx.Response) -> str:
    """Return the text of a completion, streamed or not."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        text: str = response.json()["choices"][0]["message"]["content"]
        return text
    return "".join(delta(chunk).get("content", "") for chunk in chunks(response))


def reasoning_text(response: httpx.Response) -> str:
    """Return the reasoning of a completion, streamed or not."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        text: str = response.json()["choices"][0]["message"]["reasoning"]
        return text
    return "".join(delta(chunk).get("reasoning", "") for chunk in chunks(response))


def chunks(response: httpx.Response) -> list[Any]:
    """Return the parsed data of each event except `[DONE]`."""
    frames = [line for line in response.text.split("\n") if line.startswith("data: {")]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def delta(chunk: Any) -> dict[str, Any]:
    """Return the delta of the chunk's first choice, or an empty dict."""
    found: dict[str, Any] = chunk["choices"][0]["delta"] if chunk["choices"] else {}
    return found


async def disconnect_after(
    backend: ScriptedBackend, count: int, url: str, headers: Mapping[str, str], **body: Any
) -> SeenRequest:
    """Send a request and disconnect after `count` backend requests; return the last backend
    request.
    """

    async def post() -> None:
        await post_chat(client, headers, **body)

    async with http_client(url) as client, anyio.create_task_group() as group:
        group.start_soon(post)
        seen = await backend.arrived(count)
        group.cancel_scope.cancel()
    return seen


@dataclass
class ConcurrentRequests:
    """Requests that run concurrently, with their responses by the order in which they started."""

    client: httpx.AsyncClient
    group: TaskGroup
    responses: dict[int, httpx.Response] = field(default_factory=dict)
    _started: int = 0

    def begin(self, headers: Mapping[str, str] | None = None, **body: Any) -> None:
        """Start a request without waiting for its response."""
        number, self._started = self._started, self._started + 1

        async def post() -> None:
            self.responses[number] = await post_chat(self.client, headers, **body)

        self.group.start_soon(post)
