"""/v1/pause and /v1/resume."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.profile import AgentSettings, Profile
from proxy.keys import Key, Keyring
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.clients.chat_http import answer_text, http_client, post_chat
from tests.clients.test_token_capture import trajectory
from tests.fakes.backend import Held, scripted_backend
from tests.fakes.server import running_proxy, single_key
from tests.fakes.tokens import WEIGHT_VERSION
from tests.stores import writes_blocked

TIMEOUT_S = 20
ANSWER = text_reply("It is 42.")


def state(answered: httpx.Response) -> tuple[bool, int]:
    found = answered.raise_for_status().json()
    assert found["object"] == "pause"
    assert found["paused"] == (found["ends_in_s"] > 0)
    return found["paused"], found["runs_at_work"]


async def test_paused_server_refuses_new_runs_and_completes_running_ones(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with (
        scripted_backend([Held(ANSWER, release), ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            before = state(await http.get("/v1/pause"))
            at_work = asyncio.create_task(post_chat(http))
            await backend.arrived(1)
            paused = state(await http.post("/v1/pause"))
            refused = await post_chat(http)
            streamed = await post_chat(http, stream=True)
            response = await http.post(
                "/v1/responses", json={"model": "fake-model", "input": "How many?"}
            )
            health = await http.get("/health")
            release.set()
            answered = await at_work
            idle = state(await http.get("/v1/pause"))
            resumed = state(await http.post("/v1/resume"))
            again = await post_chat(http)
    assert (before, paused, idle, resumed) == ((False, 0), (True, 1), (True, 0), (False, 0))
    assert refused.json()["error"] == {
        "message": "The operator has paused the start of runs. Ask again.",
        "type": "server_error",
        "param": None,
        "code": "runs_paused",
    }
    for each in (refused, streamed, response):
        assert (each.status_code, each.headers["retry-after"]) == (503, "5")
    assert health.status_code == 200
    assert answer_text(answered) == answer_text(again) == "It is 42."
    assert len(backend.requests) == 2


async def test_relayed_request_and_retry_are_answered_during_a_pause(tmp_path: Path) -> None:
    key = {"Idempotency-Key": "order-1"}
    async with (
        scripted_backend([ANSWER] * 2) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        await post_chat(http, key)
        await http.post("/v1/pause")
        retry = await post_chat(http, key)
        relayed = await post_chat(http, model="fake-model:plain")
        new = await post_chat(http, {"Idempotency-Key": "order-2"})
    assert answer_text(retry) == answer_text(relayed) == "It is 42."
    assert new.status_code == 503


async def test_pause_ends_after_its_timeout(tmp_path: Path) -> None:
    async with (
        scripted_backend([ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            await http.post("/v1/pause", params={"timeout_s": 600})
            refused = await post_chat(http)
            await http.post("/v1/pause", params={"timeout_s": 0.01})
            while (answered := await post_chat(http)).status_code == 503:
                pass
    assert refused.status_code == 503
    assert answer_text(answered) == "It is 42."


@pytest.mark.parametrize("timeout_s", ["0", "-1", "3601", "nan", "soon"])
async def test_pause_with_an_invalid_timeout_is_refused(timeout_s: str, tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        refused = await http.post("/v1/pause", params={"timeout_s": timeout_s})
        after = state(await http.get("/v1/pause"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "timeout_s")
    assert after == (False, 0)


ALLOWED = Profiles.only(Profile(agent=AgentSettings(capture_tokens=True)))
STEP = tool_reply(call("execute_bash", command="echo 42"))
EXPECTED_VERSIONS = {
    "vllm": [[None, "step-2"], ["step-2"]],
    "sglang": [[WEIGHT_VERSION, WEIGHT_VERSION], [WEIGHT_VERSION]],  # it reports its own
}


@pytest.mark.parametrize("style", EXPECTED_VERSIONS)
async def test_resume_sets_the_weight_version_of_model_calls_unless_the_backend_reports_one(
    tmp_path: Path, style: Any
) -> None:
    release, sandbox = asyncio.Event(), {"capture": "tokens"}
    async with (
        scripted_backend(
            [Held(STEP, release), ANSWER, ANSWER], style=style, has_tokens=True
        ) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=ALLOWED) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            at_work = asyncio.create_task(post_chat(http, sandbox=sandbox))
            await backend.arrived(1)
            await http.post("/v1/pause")
            resumed = await http.post("/v1/resume", params={"weight_version": "step-2"})
            release.set()
            first = await at_work
            await http.post("/v1/pause")
            later = await http.post("/v1/resume")
            answers = [first, await post_chat(http, sandbox=sandbox)]
        versions = [
            [each["weight_version"] for each in (await trajectory(http, answered))["model_calls"]]
            for answered in answers
        ]
    assert [each.json()["weight_version"] for each in (resumed, later)] == ["step-2"] * 2
    assert versions == EXPECTED_VERSIONS[style]


@pytest.mark.parametrize("version", ["", "v" * 201])
async def test_resume_with_an_invalid_weight_version_is_refused(
    version: str, tmp_path: Path
) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        await http.post("/v1/pause")
        refused = await http.post("/v1/resume", params={"weight_version": version})
        after = state(await http.get("/v1/pause"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "weight_version")
    assert after == (True, 0)


KEYS = [("sk-a", Key("a")), ("sk-b", Key("b"))]


@pytest.mark.parametrize(
    ("keyring", "sent", "status"),
    [
        (single_key("sk-a"), "sk-a", 200),
        (single_key("sk-a"), "sk-wrong", 401),
        (Keyring(KEYS), "sk-a", 403),
        (Keyring(KEYS, operator_secret="sk-operator"), "sk-a", 403),
        (Keyring(KEYS, operator_secret="sk-operator"), "sk-operator", 200),
    ],
)
async def test_only_the_operator_key_can_pause_the_server(
    keyring: Keyring, sent: str, status: int, tmp_path: Path
) -> None:
    headers = {"authorization": f"Bearer {sent}"}
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=keyring) as url,
        http_client(url) as http,
    ):
        answers = [
            await http.request(method, path, headers=headers)
            for method, path in (
                ("GET", "/v1/pause"),
                ("POST", "/v1/pause"),
                ("POST", "/v1/resume"),
            )
        ]
    assert [each.status_code for each in answers] == [status] * 3


async def test_request_still_in_preparation_when_a_pause_begins_gets_503_and_starts_no_run(
    tmp_path: Path,
) -> None:
    key = {"Idempotency-Key": "order-1"}
    async with (
        scripted_backend([ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
        http_client(url) as other,
    ):
        with anyio.fail_after(TIMEOUT_S):
            with writes_blocked(tmp_path):
                waiting = asyncio.create_task(post_chat(http, key))
                for _ in range(10):  # meanwhile the request gets as far as the store
                    await other.get("/v1/pause")
                paused = state(await other.post("/v1/pause"))
            refused = await waiting
            await other.post("/v1/resume")
            again = await post_chat(http, key)
    assert paused == (True, 0)
    assert refused.status_code == 503
    assert answer_text(again) == "It is 42."
    assert len(backend.requests) == 1
