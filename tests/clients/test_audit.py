"""The audit log of a run: what it says, that it is there before anybody hears of the end, and what
becomes of a run that cannot be written down."""

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
from tests.clients.chat import PATH, ask, chunks
from tests.clients.test_metrics import numbers
from tests.clients.watching import PATIENCE_S, answered, audited, ruled, watched
from tests.fakes.backend import Held, Refusal, by_history, scripted_backend

DONE = tool_reply(call("submit", answer="Done."))
COMMAND = "printf 'a\\n' > output/a.txt; cat output/a.txt"
FULL_AT = 400_000
TOO_LONG = "true " + "#" * FULL_AT


def bash(command: str) -> dict[str, Any]:
    return tool_reply(call("execute_bash", command=command))


def findings(home: Path) -> list[Finding]:
    """What the verifier says of the logs of runs."""
    found = verify(home / "audit", None, (), keep_days=90)
    return [finding for finding in found if not finding.name.endswith("/index")]


def entries(home: Path, run_id: str) -> list[dict[str, Any]]:
    (log,) = (home / "audit").glob(f"*/{run_id}.jsonl")
    return [json.loads(line) for line in log.read_text("utf-8").splitlines()]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may become larger than FULL_AT."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_run_is_written_down_from_its_request_to_its_files(tmp_path: Path) -> None:
    profile = audited(ruled(Rule("reading", "command", "^cat|; cat", "log")))
    tool = {"type": "function", "function": {"name": "mine", "parameters": {"type": "object"}}}
    async with scripted_backend([bash(COMMAND), DONE]) as backend:
        response = await answered(backend, tmp_path, profile, tools=[tool])
    run_id = response.headers["x-sandbox-run"]
    (file,) = response.json()["sandbox"]["files"]
    request, prompt, ran, rule, outcome, submit, submitted, result = entries(tmp_path, run_id)
    assert (request["kind"], request["run"], request["model"], request["profile"]) == (
        ("request", run_id, "fake-model", "default")
    )
    assert request["client_tools"] == ["mine"]
    assert "How many?" not in json.dumps(request)
    told = backend.requests[0].body["messages"][0]["content"]
    assert (prompt["kind"], prompt["sha256"]) == ("prompt", sha256(told))
    assert (ran["kind"], ran["tool"], ran["arguments"]) == (
        ("call", "execute_bash", {"command": COMMAND})
    )
    assert (rule["kind"], rule["rule"], rule["action"]) == ("rule", "reading", "log")
    assert (outcome["exit_code"], outcome["observation"]) == (
        (0, sha256("Exit code: 0\n[stdout]\na"))
    )
    assert (submit["tool"], submitted["kind"]) == ("submit", "outcome")
    (told,) = result["choices"]
    assert result["last"] is True
    assert (told["stop_reason"], told["answer"]) == ("submitted", sha256("Done."))
    assert told["tally"]["tool_calls"] == response.json()["usage"]["sandbox"]["tool_calls"] == 2
    (kept,) = told["files"]
    assert (kept["path"], kept["sha256"]) == ("/testbed/output/a.txt", file["sha256"])
    (finding,) = findings(tmp_path)
    assert (finding.state, finding.words) == ("ok", "8 lines, submitted")


async def test_nothing_is_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    async with scripted_backend([DONE]) as backend:
        await answered(backend, tmp_path, Profile())
    assert not (tmp_path / "audit").exists()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_is_whole_when_the_client_hears_of_the_end(
    tmp_path: Path, stream: bool
) -> None:
    async with (
        scripted_backend(by_history([bash("ls"), DONE])) as backend,
        watched(backend, tmp_path, audited()) as http,
    ):
        with anyio.fail_after(PATIENCE_S):
            async with http.stream("POST", PATH, json=asked(stream=stream)) as response:
                async for _ in response.aiter_bytes():
                    pass
                assert [finding.state for finding in findings(tmp_path)] == ["ok"]


def asked(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "How many?"}]
    return {"model": "fake-model", "messages": messages, **more}


async def test_many_runs_at_once_have_a_log_each(tmp_path: Path) -> None:
    script = by_history([bash("ls"), bash("pwd"), DONE])
    async with (
        scripted_backend(script) as backend,
        watched(backend, tmp_path, audited()) as http,
    ):
        with anyio.fail_after(PATIENCE_S):
            await asyncio.gather(*(ask(http) for _ in range(12)))
    assert [finding.words for finding in findings(tmp_path)] == ["9 lines, submitted"] * 12


async def test_the_choices_of_a_request_are_in_one_log(tmp_path: Path) -> None:
    async with scripted_backend(by_history([bash("ls"), DONE])) as backend:
        response = await answered(backend, tmp_path, audited(), n=2)
    told = entries(tmp_path, response.headers["x-sandbox-run"])
    calls = [entry for entry in told if entry["kind"] == "call"]
    assert sorted(entry.get("choice", 0) for entry in calls) == [0, 0, 1, 1]
    assert len(told[-1]["choices"]) == 2


async def test_a_run_that_fails_says_so_at_its_end(tmp_path: Path) -> None:
    async with scripted_backend([bash("ls"), Refusal(400, "no")]) as backend:
        await answered(backend, tmp_path, audited())
    (finding,) = findings(tmp_path)
    assert (finding.state, finding.words) == ("ok", "5 lines, failed: BackendError")


async def test_a_run_whose_client_leaves_says_so_at_its_end(tmp_path: Path) -> None:
    script = [Held(text_reply("Never said."), asyncio.Event())]
    async with (
        scripted_backend(script) as backend,
        watched(backend, tmp_path, audited()) as http,
    ):
        with anyio.fail_after(PATIENCE_S):
            async with http.stream("POST", PATH, json=asked(stream=True)):
                await backend.arrived(1)
    (finding,) = findings(tmp_path)
    assert (finding.state, finding.words) == ("ok", "3 lines, failed: CancelledError")


async def test_the_models_own_answer_is_written_down_too(tmp_path: Path) -> None:
    body = {"model": "fake-model", "input": "Hello.", "tool_choice": "none"}
    async with (
        scripted_backend([text_reply("Hello.")]) as backend,
        watched(backend, tmp_path, audited()) as http,
    ):
        with anyio.fail_after(PATIENCE_S):
            await http.post("/v1/responses", json=body)
    assert [finding.words for finding in findings(tmp_path)] == ["2 lines, answered"]


@pytest.mark.parametrize("stream", [False, True])
async def test_on_a_full_disk_a_run_fails_before_it_does_what_cannot_be_written_down(
    tmp_path: Path, stream: bool
) -> None:
    async with scripted_backend([bash(TOO_LONG), DONE]) as backend:
        with full_disk():
            told = {"stream": stream, "sandbox": {"steps": "events"}}
            response = await answered(backend, tmp_path, audited(), **told)
        assert len(backend.requests) == 1
    assert "tool_start" not in response.text
    body = chunks(response)[-1] if stream else response.json()
    assert response.status_code == (200 if stream else 503)
    assert body["error"]["code"] == "audit_unavailable"
    assert [finding.state for finding in findings(tmp_path)] == ["unfinished"]


async def test_a_log_that_cannot_be_begun_ends_the_run_before_the_model_is_asked(
    tmp_path: Path,
) -> None:
    (tmp_path / "audit").write_text("no directory", encoding="utf-8")
    async with scripted_backend([DONE]) as backend:
        response = await answered(backend, tmp_path, audited())
        assert backend.requests == []
    assert response.json()["error"]["code"] == "audit_unavailable"


async def test_where_it_is_not_required_a_run_goes_on_and_the_gap_is_counted(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([bash(TOO_LONG), DONE]) as backend,
        watched(backend, tmp_path, audited(required=False)) as http,
    ):
        with anyio.fail_after(PATIENCE_S), full_disk():
            response = await ask(http)
        found = numbers(await http.get("/metrics"))
    assert response.json()["choices"][0]["message"]["content"] == "Done."
    assert found["llm_sandbox_audit_failures_total"] == 1
    assert [finding.state for finding in findings(tmp_path)] == ["unfinished"]
