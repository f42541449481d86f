"""Chat clients' own utility requests are relayed without a sandbox; users' prompts get one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.chat_http import http_client
from tests.fakes.backend import ScriptedBackend, scripted_backend
from tests.fakes.server import running_proxy
from tests.policies.recorded_requests import Recorded, natural_prompts, recorded_requests

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RECORDED = [each for each in recorded_requests() if not each.body.get("stream")]
NATURAL = natural_prompts()[:17]
"""All of them once had no sandbox, or nearly."""


@asynccontextmanager
async def served(
    state_dir: Path, count: int
) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedBackend]]:
    async with (
        scripted_backend([text_reply("It is done.")] * count) as backend,
        running_proxy(backend, "memory", state_dir) as url,
        http_client(url) as http,
    ):
        yield http, backend


def chat_body(request: Recorded) -> dict[str, object]:
    return {"model": "m", "messages": request.body["messages"], "max_tokens": 50}


async def test_recorded_utility_requests_reach_the_backend_unchanged(tmp_path: Path) -> None:
    chosen = [
        each for each in RECORDED if not each.body.get("tools") and each.body.get("max_tokens") != 1
    ]
    async with served(tmp_path, len(chosen)) as (http, backend):
        routes = [
            (await http.post(CHAT, json=chat_body(each), headers=each.headers)).headers.get(
                "x-sandbox-route"
            )
            for each in chosen
        ]
    assert routes == ["utility"] * len(chosen)
    assert [seen.body for seen in backend.requests] == [chat_body(each) for each in chosen]


async def test_claude_code_probe_has_no_sandbox(tmp_path: Path) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
    async with served(tmp_path, 1) as (http, backend):
        response = await http.post(MESSAGES, json=body)
    assert response.status_code == 200
    assert response.json()["content"][-1]["text"]
    assert "tools" not in backend.requests[0].body


async def test_user_prompts_have_a_sandbox(tmp_path: Path) -> None:
    async with served(tmp_path, len(NATURAL)) as (http, backend):
        routes = []
        for prompt in NATURAL:
            body = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
            routes.append((await http.post(CHAT, json=body)).json()["sandbox"]["route"])
    assert routes == ["auto"] * len(NATURAL)
    assert all(seen.body["tools"] for seen in backend.requests)


@pytest.mark.parametrize("limit", [1, 8])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_request_with_a_small_token_limit_still_has_a_sandbox(
    field: str, limit: int, tmp_path: Path
) -> None:
    steps = [tool_reply(call("execute_bash", command="echo 91")), text_reply("No.")]
    body = {"model": "m", "messages": [{"role": "user", "content": "Is 91 prime?"}], field: limit}
    async with (
        scripted_backend([*steps, text_reply("No.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        response = await http.post(CHAT, json=body)
    answer = response.json()
    assert response.status_code == 200
    assert answer["sandbox"]["route"] == "auto"
    assert answer["choices"][0]["message"]["content"] == "No."
