"""The audit log: its contents, its order relative to the answer, and runs whose log cannot be
written.
"""

import asyncio
import hashlib
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from policies.profile import Profile
from policies.rules import Rule
from proxy.audit.audit_log import Finding, verify
from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.audit_server import (
    TIMEOUT_S,
    audit_server,
    post_once,
    profile_with_rules,
    with_audit,
)
from tests.clients.chat_http import PATH, chunks, post_chat
from tests.clients.test_metrics import numbers
from tests.fakes.backend import Held, Refusal, by_history, scripted_backend

DONE = tool_reply(call("submit", answer="Done."))
COMMAND = "printf 'a\\n' > output/a.txt; cat output/a.txt"
FULL_AT = 400_000
TOO_LONG = "true " + "#" * FULL_AT


def bash(command: str) -> dict[str, Any]:
    return tool_reply(call("execute_bash", command=command))


def findings(home: Path) -> list[Finding]:
    """Return the verifier's findings for the logs of runs."""
    found = verify(home / "audit", None, (), keep_days=90)
    return [finding for finding in found if not finding.name.endswith("/index")]


def entries(home: Path, run_id: str) -> list[dict[str, Any]]:
    (log,) = (home / "audit").glob(f"*/{run_id}.jsonl")
    return [json.loads(line) for line in log.read_text("utf-8").splitlines()]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow beyond FULL_AT bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_audit_log_records_a_run_from_request_to_produced_files(tmp_path: Path) -> None:
    profile = with_audit(profile_with_rules(Rule("reading", "command", "^cat|; cat", "log")))
    tool = {"type": "function", "function": {"name": "mine", "parameters": {"type": "object"}}}
    async with scripted_backend([bash(COMMAND), DONE]) as backend:
        response = await post_once(backend, tmp_path, profile, tools=[tool])
    run_id = response.headers["x-sandbox-run"]
    (file,) = response.json()["sandbox"]["files"]
    request, prompt, ran, rule, outcome, submit, submitted, result = entries(tmp_path, run_id)
    assert (request["kind"], request["run"], request["model"], request["profile"]) == (
        ("request", run_id, "fake-model", "default")
    )
    assert request["client_tools"] == ["mine"]
    assert "How many?" not in json.dumps(request)
    system_prompt = backend.requests[0].body["messages"][0]["content"]
    assert (prompt["kind"], prompt["sha256"]) == ("prompt", sha256(system_prompt))
    assert (ran["kind"], ran["tool"], ran["arguments"]) == (
        ("call", "execute_bash", {"command": COMMAND})
    )
    assert (rule["kind"], rule["rule"], rule["action"]) == ("rule", "reading", "log")
    assert (outcome["exit_code"], outcome["observation"]) == (
        (0, sha256("Exit code: 0\n[stdout]\na"))
    )
    assert (submit["tool"], submitted["kind"]) == ("submit", "outcome")
    (choice,) = result["choices"]
    assert result["last"] is True
    assert (choice["stop_reason"], choice["answer"]) == ("submitted", sha256("Done."))
    assert choice["tally"]["tool_calls"] == response.json()["usage"]["sandbox"]["tool_calls"] == 2
    (kept,) = choice["files"]
    assert (kept["path"], kept["sha256"]) == ("/testbed/output/a.txt", file["sha256"])
    (finding,) = findings(tmp_path)
    assert (finding.state, finding.detail) == ("ok", "8 lines, submitted")


async def test_profile_without_audit_writes_no_log(tmp_path: Path) -> None:
    async with scripted_backend([DONE]) as backend:
        await post_once(backend, tmp_path, Profile())
    assert not (tmp_path / "audit").exists()


@pytest.mark.parametrize("stream", [False, True])
async def test_audit_log_is_complete_when_the_response_ends(tmp_path: Path, stream: bool) -> None:
    async with (
        scripted_backend(by_history([bash("ls"), DONE])) as backend,
        audit_server(backend, tmp_path, with_audit()) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            async with http.stream("POST", PATH, json=chat_body(stream=stream)) as response:
                async for _ in response.aiter_bytes():
                    pass
                assert [finding.state for finding in findings(tmp_path)] == ["ok"]


def chat_body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "How many?"}]
    return {"model": "fake-model", "messages": messages, **more}


async def test_concurrent_runs_write_separate_logs(tmp_path: Path) -> None:
    script = by_history([bash("ls"), bash("pwd"), DONE])
    async with (
        scripted_backend(script) as backend,
        audit_server(backend, tmp_path, with_audit()) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            await asyncio.gather(*(post_chat(http) for _ in range(12)))
    assert [finding.detail for finding in findings(tmp_path)] == ["9 lines, submitted"] * 12


async def test_choices_of_one_request_share_a_log(tmp_path: Path) -> None:
    async with scripted_backend(by_history([bash("ls"), DONE])) as backend:
        response = await post_once(backend, tmp_path, with_audit(), n=2)
    log = entries(tmp_path, response.headers["x-sandbox-run"])
    calls = [entry for entry in log if entry["kind"] == "call"]
    assert sorted(entry.get("choice", 0) for entry in calls) == [0, 0, 1, 1]
    assert len(log[-1]["choices"]) == 2


async def test_failed_run_ends_its_log_with_the_error(tmp_path: Path) -> None:
    async with scripted_backend([bash("ls"), Refusal(400, "no")]) as backend:
        await post_once(backend, tmp_path, with_audit())
    (finding,) = findings(tmp_path)
    assert (finding.state, finding.detail) == ("ok", "5 lines, failed: BackendError")


async def test_run_of_a_disconnected_client_ends_its_log_as_cancelled(tmp_path: Path) -> None:
    script = [Held(text_reply("Never said."), asyncio.Event())]
    async with (
        scripted_backend(script) as backend,
        audit_server(backend, tmp_path, with_audit()) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            async with http.stream("POST", PATH, json=chat_body(stream=True)):
                await backend.arrived(1)
    (finding,) = findings(tmp_path)
    assert (finding.state, finding.detail) == ("ok", "3 lines, failed: CancelledError")


async def test_answer_without_a_sandbox_is_logged(tmp_path: Path) -> None:
    body = {"model": "fake-model", "input": "Hello.", "tool_choice": "none"}
    async with (
        scripted_backend([text_reply("Hello.")]) as backend,
        audit_server(backend, tmp_path, with_audit()) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            await http.post("/v1/responses", json=body)
    assert [finding.detail for finding in findings(tmp_path)] == ["2 lines, answered"]


@pytest.mark.parametrize("stream", [False, True])
async def test_command_that_cannot_be_logged_on_a_full_disk_is_not_started(
    tmp_path: Path, stream: bool
) -> None:
    async with scripted_backend([bash(TOO_LONG), DONE]) as backend:
        with full_disk():
            options = {"stream": stream, "sandbox": {"steps": "events"}}
            response = await post_once(backend, tmp_path, with_audit(), **options)
        assert len(backend.requests) == 1
    assert "tool_start" not in response.text
    body = chunks(response)[-1] if stream else response.json()
    assert response.status_code == (200 if stream else 503)
    assert body["error"]["code"] == "audit_unavailable"
    assert [finding.state for finding in findings(tmp_path)] == ["unfinished"]


async def test_run_fails_before_the_model_call_when_its_log_cannot_be_created(
    tmp_path: Path,
) -> None:
    (tmp_path / "audit").write_text("no directory", encoding="utf-8")
    async with scripted_backend([DONE]) as backend:
        response = await post_once(backend, tmp_path, with_audit())
        assert backend.requests == []
    assert response.json()["error"]["code"] == "audit_unavailable"


async def test_failed_write_of_an_optional_log_is_counted_and_does_not_end_the_run(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([bash(TOO_LONG), DONE]) as backend,
        audit_server(backend, tmp_path, with_audit(required=False)) as http,
    ):
        with anyio.fail_after(TIMEOUT_S), full_disk():
            response = await post_chat(http)
        found = numbers(await http.get("/metrics"))
    assert response.json()["choices"][0]["message"]["content"] == "Done."
    assert found["llm_sandbox_audit_failures_total"] == 1
    assert [finding.state for finding in findings(tmp_path)] == ["unfinished"]
