"""Usage of a run of several model calls, as each client counts it."""

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy

ASK = {"role": "user", "content": "Hello."}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [ASK]},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": [ASK], "max_tokens": 100},
}
SUM, LAST = (300, 30), (200, 20)


async def counted(
    path: str, tmp_path: Path, headers: dict[str, str], **body: Any
) -> tuple[int, int]:
    """What is told after a call of 100 tokens in and 10 out, and one of twice as many."""
    tokens = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    script = [
        {**tool_reply(call("execute_bash", command="true")), "usage": tokens},
        {**text_reply("Done."), "usage": {name: 2 * count for name, count in tokens.items()}},
    ]
    with anyio.fail_after(20):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
            httpx.AsyncClient(base_url=url, timeout=None, headers=headers) as http,
        ):
            asked = {"model": "fake-model", **BODIES[path], **body}
            usage = (await http.post(path, json=asked)).json()["usage"]
    into = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
    out = usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]
    assert usage.get("total_tokens", into + out) == into + out
    return into, out


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, {}, SUM),
        ({"X-Sandbox-Usage": "last_call"}, {}, LAST),
        ({"X-Sandbox-Usage": "last_call"}, {"sandbox": {"usage": "all_calls"}}, SUM),
    ],
    ids=["unasked", "by header", "by body"],
)
async def test_it_is_of_the_calls_that_the_client_asks_for(
    path: str,
    headers: dict[str, str],
    body: dict[str, Any],
    expected: tuple[int, int],
    tmp_path: Path,
) -> None:
    assert await counted(path, tmp_path, headers, **body) == expected


@pytest.mark.parametrize(
    "headers",
    [{"originator": "codex_exec"}, {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils"}],
    ids=["Codex", "opencode"],
)
async def test_a_coding_agent_is_told_how_full_the_context_is(
    headers: dict[str, str], tmp_path: Path
) -> None:
    assert await counted("/v1/responses", tmp_path, headers) == LAST
    asked = {**headers, "X-Sandbox-Usage": "all_calls"}
    assert await counted("/v1/responses", tmp_path / "asked", asked) == SUM


@pytest.mark.parametrize("by", ["sandbox.usage", "X-Sandbox-Usage"])
async def test_another_word_for_it_is_refused(by: str, tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        headers = {by: "odd"} if by == "X-Sandbox-Usage" else {}
        body = {} if headers else {"sandbox": {"usage": "odd"}}
        asked = {"model": "fake-model", "messages": [ASK], **body}
        answer = await http.post("/v1/chat/completions", json=asked, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, by)
