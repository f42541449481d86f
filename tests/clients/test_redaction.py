"""Secrets in what a run says: no client and no backend hears them, in whatever pieces."""

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
from tests.clients.chat import PATH, answer, ask
from tests.clients.watching import PATIENCE_S, audited, observations, watched
from tests.fakes.backend import Raw, by_history, scripted_backend

SECRET = "ghp_" + "q7R2" * 9
HALVES = f"a={SECRET[:20]}; b={SECRET[20:]}"
LONG = "All is well. " * 100
ANSWER = f"{LONG}It is {SECRET}. {LONG}"
SHOWN = f"{LONG}It is [redacted github]. {LONG}"
PROFILE = audited(
    Profile(
        redaction=Redaction(("all",)), watch=RuleSet((Rule("all", "command", "(?s).*echo", "log"),))
    )
)


def script(secret_in_command: str = "") -> Any:
    """The secret in the model's thinking, command, output, file and answer."""
    command = f"{HALVES}; {secret_in_command} echo $a$b; printf $a$b > output/key.txt"
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
async def test_no_client_hears_a_secret_and_neither_does_the_backend(
    tmp_path: Path, stream: bool, steps: str
) -> None:
    headers = {"Idempotency-Key": "k"}
    async with (
        scripted_backend(script(f"echo {SECRET} >&2;")) as backend,
        watched(backend, tmp_path, PROFILE) as http,
    ):
        with anyio.fail_after(PATIENCE_S):
            sandbox = {"steps": steps}
            response = await ask(http, headers, stream=stream, sandbox=sandbox)
            again = await ask(http, headers, stream=not stream, sandbox=sandbox)
            run = await http.get(f"/v1/runs/{response.headers['x-sandbox-run']}")
        told = observations(backend)
    assert answer(response) == answer(again) == SHOWN
    assert SECRET not in response.text + again.text + run.text
    assert [SECRET in each for each in told] == [False]
    assert "[redacted github]" in told[0]
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
async def test_neither_do_clients_of_the_other_apis(
    tmp_path: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    async with (
        scripted_backend(script(f"echo {SECRET} >&2;")) as backend,
        watched(backend, tmp_path, PROFILE) as http,
    ):
        with anyio.fail_after(PATIENCE_S):
            asked = {"model": "fake-model", "stream": stream, **body}
            response = await http.post(path, json=asked)
            kept = (
                await http.get(f"/v1/responses/{response.json().get('id')}") if not stream else None
            )
    assert response.status_code == 200
    assert "[redacted github]" in response.text
    assert SECRET not in response.text + (kept.text if kept else "")


async def test_a_produced_file_is_handed_back_as_it_is(tmp_path: Path) -> None:
    async with (
        scripted_backend(script()) as backend,
        watched(backend, tmp_path, PROFILE) as http,
    ):
        with anyio.fail_after(PATIENCE_S):
            (file,) = (await ask(http)).json()["sandbox"]["files"]
            content = await http.get(file["url"])
    assert content.text == SECRET


async def test_the_answers_of_all_choices_are_without(tmp_path: Path) -> None:
    async with (
        scripted_backend(script()) as backend,
        watched(backend, tmp_path, PROFILE) as http,
    ):
        with anyio.fail_after(PATIENCE_S):
            whole = await ask(http, n=2)
            streamed = await ask(http, n=2, stream=True)
    shown = [choice["message"]["content"] for choice in whole.json()["choices"]]
    assert shown == [SHOWN, SHOWN]
    assert SECRET not in whole.text + streamed.text


async def test_token_by_token_there_is_nothing_that_could_tell(tmp_path: Path) -> None:
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
        watched(backend, tmp_path, PROFILE) as http,
    ):
        with anyio.fail_after(PATIENCE_S):
            response = await ask(http, logprobs=True)
    assert answer(response) == SHOWN.strip()
    assert SECRET not in response.text


async def test_nothing_is_taken_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    async with (
        scripted_backend(script()) as backend,
        watched(backend, tmp_path, Profile()) as http,
    ):
        with anyio.fail_after(PATIENCE_S):
            response = await http.post(
                PATH, json={"model": "m", "messages": [{"role": "user", "content": "Go on."}]}
            )
    assert answer(response) == ANSWER
