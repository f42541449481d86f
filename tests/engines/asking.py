"""One request, and what it cost by the proxy's count and by the model server's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.engines.engine import MODEL, REQUEST_TIMEOUT_S, Body
from tests.engines.servers import Counted, ModelServer

TEMPERATURE = 0.7
MAX_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer and its price."""

    status: int
    body: Body
    usage: Counted
    """As the answer says."""
    counted: Counted
    """As the model server counted it."""

    @property
    def finish_reason(self) -> str:
        return str(self.body["choices"][0]["finish_reason"]) if self.status == 200 else "error"

    @property
    def text(self) -> str:
        if self.status != 200:
            return str(self.body)
        return self.body["choices"][0]["message"]["content"] or ""

    @property
    def steps(self) -> int:
        """How many calls of our tools it took."""
        return int((self.body.get("sandbox") or {}).get("steps") or 0)


async def post(url: str, body: Mapping[str, Any], key: str = "none") -> httpx.Response:
    """Send a chat completion to the server at `url`."""
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S) as client:
        return await client.post(
            f"{url}/v1/chat/completions",
            json={"model": MODEL, **body},
            headers={"authorization": f"Bearer {key}"},
        )


def request(prompt: str, **parameters: Any) -> Body:
    """The body of a request with one message of the user's."""
    return {"messages": [{"role": "user", "content": prompt}], **parameters}


async def asked(url: str, server: ModelServer, body: Mapping[str, Any]) -> Asked:
    """Send it, with nothing else going on at the model server."""
    before = await server.counted()
    response = await post(url, body)
    counted = await server.counted() - before
    got = response.json()
    usage = got.get("usage") or {}
    of = Counted(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
    return Asked(response.status_code, got, of, counted)


SHORT = request("What is the capital of France?", max_tokens=10)
UNREACHABLE, ANSWERED = (502, "backend_unreachable"), (200, None)
PATIENCE_S = 600
"""For a server that starts, fails or is busy; vLLM takes a minute to start on two busy cores."""


def outcome(response: httpx.Response) -> tuple[int, Any]:
    """The status, and the code of an error."""
    return response.status_code, response.json().get("error", {}).get("code")
