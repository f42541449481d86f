"""Send a request, and compare the usage of its answer or of its model calls with other counts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.engines.engine import MODEL, REQUEST_TIMEOUT_S, Body
from tests.engines.servers import ModelServer, TokenCounts

TEMPERATURE = 0.7
MAX_TOKENS = 200


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """An answer and its token counts."""

    status: int
    body: Body
    usage: TokenCounts
    """Usage in the answer."""
    counted: TokenCounts
    """Tokens counted by the model server."""

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
        """The number of sandbox tool calls."""
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
    """Return the body of a request with one user message."""
    return {"messages": [{"role": "user", "content": prompt}], **parameters}


async def ask(url: str, server: ModelServer, body: Mapping[str, Any]) -> MeasuredAnswer:
    """Send a request while the model server is otherwise idle."""
    before = await server.token_counts()
    response = await post(url, body)
    counted = await server.token_counts() - before
    got = response.json()
    reported = got.get("usage") or {}
    usage = TokenCounts(reported.get("prompt_tokens", 0), reported.get("completion_tokens", 0))
    return MeasuredAnswer(response.status_code, got, usage, counted)


SHORT = request("What is the capital of France?", max_tokens=10)
UNREACHABLE, ANSWERED = (502, "backend_unreachable"), (200, None)
PATIENCE_S = 600
"""Time limit for starts, failures and busy servers, in seconds; vLLM needs a minute to start."""


def outcome(response: httpx.Response) -> tuple[int, Any]:
    """Return the status and the error code."""
    return response.status_code, response.json().get("error", {}).get("code")


@dataclass(frozen=True, slots=True)
class CapturedReply:
    """The tokens of one model call in a trajectory."""

    ids: list[int]
    """The ids of the prompt, and then of the reply."""
    prompt_tokens: int
    logprobs: list[float]
    """The log probability of each token of the reply."""


def captured_replies(trajectory: Body) -> Iterator[CapturedReply]:
    """Yield the tokens of each model call, which must be as many as its usage says."""
    for call in trajectory["model_calls"]:
        assert call["tokens_missing"] is None
        segment = trajectory["token_segments"][call["token_segment"]]
        prompt, reply = call["prompt_tokens"], call["reply_tokens"]
        assert prompt == call["usage"]["prompt_tokens"]
        assert reply == call["usage"]["completion_tokens"]
        ids = [*segment["prompt_ids"], *segment["response_ids"]][: prompt + reply]
        logprobs = [0.0] * len(segment["prompt_ids"]) + segment["logprobs"]
        yield CapturedReply(ids, prompt, logprobs[prompt : prompt + reply])
