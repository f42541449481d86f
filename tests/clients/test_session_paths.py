"""/sessions/NAME/v1/...: the session of agents that can set a base URL but no header."""

from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.chat_http import BODY, answer_text, http_client
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy, single_key

QUESTION: Any = [{"role": "user", "content": "How many?"}]
CAPTURE = {"sandbox": {"capture": "messages"}}
WRITE = tool_reply(call("execute_bash", command="echo 42 > notes.txt"))
READ = tool_reply(call("execute_bash", command="cat notes.txt"))
DONE = text_reply("Done.")
COMPLETIONS = "/sessions/rollout-7/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_runs_under_one_session_path_share_their_files(tmp_path: Path, stream: bool) -> None:
    async with (
        scripted_backend([WRITE, DONE, READ, DONE]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai.AsyncOpenAI(base_url=f"{url}/sessions/rollout-7/v1", api_key="none") as client,
        http_client(url) as http,
    ):
        for _ in "12":
            answer: Any = await client.chat.completions.create(
                model=BODY["model"], messages=QUESTION, stream=stream, extra_body=CAPTURE
            )
            if stream:
                assert [chunk async for chunk in answer]
        params = {"session_id": "rollout-7"}
        listed = (await http.get("/v1/trajectories", params=params)).json()["data"]
        other = (await http.get("/v1/trajectories", params={"session_id": "rollout"})).json()
    assert "42" in backend.requests[3].body["messages"][-1]["content"]
    assert [each["session_id"] for each in listed] == ["rollout-7", "rollout-7"]
    assert other["data"] == []


async def test_session_path_takes_precedence_over_the_session_header(tmp_path: Path) -> None:
    async with (
        scripted_backend([DONE]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        headers = {"x-sandbox-session": "other"}
        answered = await http.post(COMPLETIONS, json={**BODY, **CAPTURE}, headers=headers)
        (listed,) = (await http.get("/v1/trajectories")).json()["data"]
    assert answer_text(answered) == "Done."
    assert listed["session_id"] == "rollout-7"


async def test_models_and_plain_requests_are_answered_under_a_session_path(tmp_path: Path) -> None:
    async with (
        scripted_backend([DONE]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        models = await http.get("/sessions/rollout-7/v1/models")
        plain = {**BODY, "model": f"{backend.model}:plain"}
        relayed = await http.post(COMPLETIONS, json=plain)
    assert models.json()["data"][0]["id"] == backend.model
    assert answer_text(relayed) == "Done."
    assert "x-sandbox-session" not in backend.requests[0].headers


@pytest.mark.parametrize(
    "path",
    [
        "/sessions/v1/models",
        "/sessions//v1/models",
        "/sessions/a%2Fb/v1/models",
        "/sessions%2Fa/v1/models",
        "/sessions/a/b/v1/models",
        f"/sessions/{'a' * 257}/v1/models",
        "/sessions/a/health",
    ],
)
async def test_malformed_session_path_is_refused(tmp_path: Path, path: str) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        missing = await http.get(path)
    assert missing.status_code == 403
    assert not backend.requests


async def test_session_path_without_the_key_is_refused_with_401(tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=single_key("sk-one")) as url,
        http_client(url) as http,
    ):
        refused = await http.post(COMPLETIONS, json=BODY)
    assert refused.status_code == 401
