"""Chat completions by plain HTTP, for what no SDK does by itself."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
from anyio.abc import TaskGroup

from tests.fakes.backend import ScriptedBackend, SeenRequest

PATH = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": "fake-model",
    "messages": [{"role": "user", "content": "How many?"}],
}
FIRST, SECOND = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}


def client(url: str) -> httpx.AsyncClient:
    """One that waits as long as the test does."""
    return httpx.AsyncClient(base_url=url, timeout=None)


async def ask(
    client: httpx.AsyncClient, headers: Mapping[str, str] | None = None, **body: Any
) -> httpx.Response:
    """The whole response."""
    return await client.post(PATH, json={**ASKED, **body}, headers=dict(headers or {}))


def answer(response: httpx.Response) -> str:
    """The text of a completion, streamed or not."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        text: str = response.json()["choices"][0]["message"]["content"]
        return text
    return "".join(delta(chunk).get("content", "") for chunk in chunks(response))


def reasoning(response: httpx.Response) -> str:
    """The steps, streamed or not."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        text: str = response.json()["choices"][0]["message"]["reasoning"]
        return text
    return "".join(delta(chunk).get("reasoning", "") for chunk in chunks(response))


def chunks(response: httpx.Response) -> list[Any]:
    """The data of each frame but the last."""
    frames = [line for line in response.text.split("\n") if line.startswith("data: {")]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def delta(chunk: Any) -> dict[str, Any]:
    """What one chunk adds."""
    found: dict[str, Any] = chunk["choices"][0]["delta"] if chunk["choices"] else {}
    return found


async def leave_after(
    backend: ScriptedBackend, count: int, url: str, headers: Mapping[str, str], **body: Any
) -> SeenRequest:
    """Ask, and hang up when the backend has been asked that often; gives its last request."""
    async with client(url) as asking, anyio.create_task_group() as group:
        group.start_soon(_ask_in_vain, asking, headers, body)
        seen = await backend.arrived(count)
        group.cancel_scope.cancel()
    return seen


async def _ask_in_vain(
    client: httpx.AsyncClient, headers: Mapping[str, str], body: dict[str, Any]
) -> None:
    await ask(client, headers, **body)


@dataclass
class Asking:
    """Requests under way side by side, and what came of each, in the order they were made."""

    client: httpx.AsyncClient
    group: TaskGroup
    responses: dict[int, httpx.Response] = field(default_factory=dict)
    _made: int = 0

    def begin(self, headers: Mapping[str, str] | None = None, **body: Any) -> None:
        """Ask, and do not wait."""
        number, self._made = self._made, self._made + 1

        async def go() -> None:
            self.responses[number] = await ask(self.client, headers, **body)

        self.group.start_soon(go)
