"""Secrets in the output of a run are redacted for clients and backend, however they are split."""

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from policies.profile import Profile
from policies.redaction import Redaction
from policies.rules import Rule, RuleSet
from policies.steps import STEPS_MODES
from proxy.models.scripted import call, tool_reply
from tests.clients.audit_server import TIMEOUT_S, audit_server, observations, with_audit
from tests.clients.chat_http import PATH, answer_text, post_chat
from tests.fakes.backend import Raw, by_history, scripted_backend

SECRET = "ghp_" + "q7R2" * 9
SPLIT_SECRET = f"a={SECRET[:20]}; b={SECRET[20:]}"
LONG = "All is well. " * 100
ANSWER = f"{LONG}It is {SECRET}. {LONG}"
REDACTED_ANSWER = f"{LONG}It is [redacted github]. {LONG}"
PROFILE = with_audit(
    Profile(
        redaction=Redaction(("all",)), watch=RuleSet((Rule("all", "command", "(?s).*echo", "log"),))
    )
)


def script(secret_in_command: str = "") -> Any:
    """Return a script with the secret in reasoning, command, output, file and answer."""
    command = f"{SPLIT_SECRET}; {secret_in_command} echo $a$b; printf $a$b > output/key.txt"
    return by_history(
        [
            {
                "reasoning": f"{LONG} So it is {SECRET}, I think.",
                "content": f"I write {SECRET}.",
                "tool_calls": [call("execute_bash", command=command)],
            },
            tool_reply(call("submit", answer=ANSWER)),
        ]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", STEPS_MODES)
async def test_secret_is_redacted_for_client_backend_and_log(
    tmp_path: Path, stream: bool, steps: str
) -> None:
    headers = {"Idempotency-Key": "k"}
    async with (
        scripted_backend(script(f"echo {SECRET} >&2;")) as backend,
        audit_server(backend, tmp_path, PROFILE) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            sandbox = {"steps": steps}
            response = await post_chat(http, headers, stream=stream, sandbox=sandbox)
            again = await post_chat(http, headers, stream=not stream, sandbox=sandbox)
            run = await http.get(f"/v1/runs/{response.headers['x-sandbox-run']}")
        observed = observations(backend)
    assert answer_text(response) == answer_text(again) == REDACTED_ANSWER
    assert SECRET not in response.text + again.text + run.text
    assert [SECRET in each for each in observed] == [False]
    assert "[redacted github]" in observed[0]
    (log,) = (tmp_path / "audit").glob("*/[!i]*.jsonl")
    assert "[redacted github]" in log.read_text("utf-8")
    assert SECRET not in log.read_text("utf-8")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/responses",
            {
                "input": "Go on.",
                "tools": [{"type": "shell", "environment": {"type": "container_auto"}}],
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 1000,
                "messages": [{"role": "user", "content": "Go on."}],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "tools": [{"type": "code_execution_20250825", "name": "code_execution"}],
            },
        ),
    ],
)
async def test_secret_is_redacted_by_the_responses_and_messages_apis(
    tmp_path: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    async with (
        scripted_backend(script(f"echo {SECRET} >&2;")) as backend,
        audit_server(backend, tmp_path, PROFILE) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            asked = {"model": "fake-model", "stream": stream, **body}
            response = await http.post(path, json=asked)
            kept = (
                await http.get(f"/v1/responses/{response.json().get('id')}") if not stream else None
            )
    assert response.status_code == 200
    assert "[redacted github]" in response.text
    assert SECRET not in response.text + (kept.text if kept else "")


async def test_produced_file_is_not_redacted(tmp_path: Path) -> None:
    async with (
        scripted_backend(script()) as backend,
        audit_server(backend, tmp_path, PROFILE) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            (file,) = (await post_chat(http)).json()["sandbox"]["files"]
            content = await http.get(file["url"])
    assert content.text == SECRET


async def test_secret_is_redacted_in_each_choice(tmp_path: Path) -> None:
    async with (
        scripted_backend(script()) as backend,
        audit_server(backend, tmp_path, PROFILE) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            whole = await post_chat(http, n=2)
            streamed = await post_chat(http, n=2, stream=True)
    shown = [choice["message"]["content"] for choice in whole.json()["choices"]]
    assert shown == [REDACTED_ANSWER, REDACTED_ANSWER]
    assert SECRET not in whole.text + streamed.text


async def test_log_probabilities_are_dropped_under_redaction(tmp_path: Path) -> None:
    logprobs = {"content": [{"token": SECRET, "logprob": -0.1, "top_logprobs": []}]}
    reply = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "fake-model",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": ANSWER},
                "logprobs": logprobs,
            }
        ],
    }
    raw = Raw(200, json.dumps(reply).encode(), {"content-type": "application/json"})
    async with (
        scripted_backend([raw, raw]) as backend,
        audit_server(backend, tmp_path, PROFILE) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            response = await post_chat(http, logprobs=True)
    assert answer_text(response) == REDACTED_ANSWER.strip()
    assert SECRET not in response.text


async def test_profile_without_redaction_keeps_the_secret(tmp_path: Path) -> None:
    async with (
        scripted_backend(script()) as backend,
        audit_server(backend, tmp_path, Profile()) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            response = await http.post(
                PATH, json={"model": "m", "messages": [{"role": "user", "content": "Go on."}]}
            )
    assert answer_text(response) == ANSWER
