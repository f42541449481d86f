"""Usage of runs with several model calls: summed, or of the last call only."""

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy

MESSAGE = {"role": "user", "content": "Hello."}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [MESSAGE]},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 100},
}
SUM, LAST_CALL = (300, 30), (200, 20)


async def reported_usage(
    path: str, tmp_path: Path, headers: dict[str, str], **body: Any
) -> tuple[int, int]:
    """Return input and output tokens of a run with calls of 100+10 and 200+20 tokens."""
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
    input_tokens = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
    output_tokens = (
        usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]
    )
    assert usage.get("total_tokens", input_tokens + output_tokens) == input_tokens + output_tokens
    return input_tokens, output_tokens


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, {}, SUM),
        ({"X-Sandbox-Usage": "last_call"}, {}, LAST_CALL),
        ({"X-Sandbox-Usage": "last_call"}, {"sandbox": {"usage": "all_calls"}}, SUM),
    ],
    ids=["default", "by header", "by body"],
)
async def test_usage_setting_selects_the_usage_of_all_model_calls_or_of_the_last(
    path: str,
    headers: dict[str, str],
    body: dict[str, Any],
    expected: tuple[int, int],
    tmp_path: Path,
) -> None:
    assert await reported_usage(path, tmp_path, headers, **body) == expected


@pytest.mark.parametrize(
    "headers",
    [{"originator": "codex_exec"}, {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils"}],
    ids=["Codex", "opencode"],
)
async def test_coding_agents_get_the_usage_of_the_last_call(
    headers: dict[str, str], tmp_path: Path
) -> None:
    assert await reported_usage("/v1/responses", tmp_path, headers) == LAST_CALL
    asked = {**headers, "X-Sandbox-Usage": "all_calls"}
    assert await reported_usage("/v1/responses", tmp_path / "asked", asked) == SUM


@pytest.mark.parametrize("by", ["sandbox.usage", "X-Sandbox-Usage"])
async def test_invalid_usage_setting_is_refused(by: str, tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        headers = {by: "odd"} if by == "X-Sandbox-Usage" else {}
        body = {} if headers else {"sandbox": {"usage": "odd"}}
        asked = {"model": "fake-model", "messages": [MESSAGE], **body}
        answer = await http.post("/v1/chat/completions", json=asked, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, by)
