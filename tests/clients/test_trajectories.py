"""`sandbox.capture`, GET and DELETE /v1/runs/{id}/trajectory and /v1/trajectories/{id}."""

import asyncio
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from policies.artifacts import ArtifactLimits
from policies.profile import Profile
from policies.redaction import Redaction
from policies.sessions import TrajectorySettings
from proxy.audit.audit import AuditLogs
from proxy.files import FileStore
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from proxy.runs.manager import RunManager
from tests.clients.audit_server import AUDIT
from tests.clients.chat_http import BODY, PATH, answer_text, http_client, post_chat
from tests.fakes.backend import Held, Refusal, scripted_backend
from tests.fakes.manual_clock import ManualClock
from tests.fakes.paper import paper
from tests.fakes.server import EachKey, running_proxy
from tests.stores import connected, open_store, sqlite_only, writes_blocked

TIMEOUT_S = 20
CAPTURE: dict[str, Any] = {"sandbox": {"capture": "messages"}}
QUESTION = {"role": "user", "content": "How many?"}
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
COMMAND = "echo 42; echo data > output/data.csv"
STEP = {**tool_reply(call("execute_bash", command=COMMAND)), "usage": USAGE}
ANSWER = {**text_reply("It is 42."), "usage": USAGE}
OBSERVATION = "Exit code: 0\n[stdout]\n42"
SECRET = "ghp_" + "q7R2" * 9
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
TIMES = ("started_s", "duration_s")
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (PATH, {"messages": [QUESTION]}),
    "streamed": (PATH, {"messages": [QUESTION], "stream": True}),
    "messages": ("/v1/messages", {"messages": [QUESTION], "max_tokens": 100}),
    "responses": ("/v1/responses", {"input": "How many?"}),
    "background": ("/v1/responses", {"input": "How many?", "background": True, "stream": True}),
}


async def get_trajectory(
    http: httpx.AsyncClient, run_id: str, format: str = "native", **headers: str
) -> httpx.Response:
    url = f"/v1/runs/{run_id}/trajectory"
    return await http.get(url, params={"format": format}, headers=headers)


async def trajectory(http: httpx.AsyncClient, answered: httpx.Response) -> Any:
    """Return the native trajectory of a response's run."""
    found = await get_trajectory(http, answered.headers["x-sandbox-run"])
    assert found.status_code == 200, found.text
    return found.json()


def error_code(found: httpx.Response) -> tuple[int, str]:
    return found.status_code, found.json()["error"]["code"]


def without_times(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for each in objects:
        assert all(each[name] >= 0 for name in TIMES)
    return [{k: v for k, v in each.items() if k not in TIMES} for each in objects]


async def test_trajectory_has_each_message_once_and_the_calls_and_the_result(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([STEP, ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, temperature=0.5, **CAPTURE)
        found = await trajectory(http, answered)
        first, second = (request.body for request in backend.requests)
    reply = {"role": "assistant", "content": "It is 42."}
    assert found["messages"] == [*second["messages"], reply]
    assert found["segments"] == [[0, 1, 2, 3]]
    assert [(each["temperature"], each["tools"]) for each in found["settings"]] == [
        (0.5, first["tools"])
    ]
    assert [turn["turn"] for turn in found["turns"]] == [1, 2]
    in_segment = {"segment": 0, "settings": 0, "usage": USAGE, "error": None}
    assert without_times(found["model_calls"]) == [
        {**in_segment, "turn": 1, "prompt_messages": 2, "reply": 2, "finish_reason": "tool_calls"},
        {**in_segment, "turn": 2, "prompt_messages": 4, "reply": 4, "finish_reason": "stop"},
    ]
    assert without_times(found["tool_calls"]) == [
        {
            "turn": 1,
            "model_call": 0,
            "step": 1,
            "id": "call_0_0",
            "name": "execute_bash",
            "arguments": {"command": COMMAND},
            "capabilities": ["file_management"],
            "observation": OBSERVATION,
            "exit_code": 0,
            "output_lines": 1,
        }
    ]
    result = found["result"]
    assert (result["answer"], result["stop_reason"]) == ("It is 42.", "answered")
    assert result["usage"]["total_tokens"] == 30
    assert result["stats"]["capability_turns"]["file_management"] == 1
    (file,) = result["files"]
    assert (file["filename"], file["bytes"], "url" in file) == ("data.csv", 5, False)
    assert (found["id"], found["status"]) == (answered.headers["x-sandbox-run"], "completed")
    assert (found["model"], found["profile"], found["error"]) == ("fake-model", "default", None)


async def test_trajectory_is_returned_in_the_openai_and_reference_formats(tmp_path: Path) -> None:
    async with (
        scripted_backend([{**STEP, "content": "I count."}, ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        run_id = (await post_chat(http, **CAPTURE)).headers["x-sandbox-run"]
        openai = (await get_trajectory(http, run_id, "openai")).json()
        reference = (await get_trajectory(http, run_id, "reference")).json()
        unknown = await get_trajectory(http, run_id, "yaml")
        last = backend.requests[-1].body
    reply = {"role": "assistant", "content": "It is 42."}
    assert openai == {
        "id": run_id,
        "model": "fake-model",
        "messages": [*last["messages"], reply],
        "tools": last["tools"],
    }
    times = [step["metadata"].pop("exec_time") for step in reference["steps"]]
    assert all(seconds >= 0 for seconds in times)
    assert reference == {
        "problem_statement": "How many?",
        "steps": [
            {
                "thought": "I count.",
                "reasoning_content": "",
                "action": {"function": "execute_bash", "parameters": {"command": COMMAND}},
                "observation": OBSERVATION,
                "metadata": {"step": 1},
            },
            {
                "thought": "It is 42.",
                "reasoning_content": "",
                "action": {"function": "", "parameters": {}},
                "observation": "",
                "metadata": {"step": 2},
            },
        ],
        "metadata": {"total_steps": 2},
    }
    assert unknown.status_code == 400


async def test_reference_format_of_a_trajectory_has_the_steps_and_the_problem_without_the_prompt(
    tmp_path: Path,
) -> None:
    script = [{**STEP, "content": "I count."}, tool_reply(call("submit"))]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(paper())) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, **CAPTURE)
        found = await trajectory(http, answered)
        reference = (await get_trajectory(http, found["id"], "reference")).json()
        prompts = [request.body["messages"] for request in backend.requests]
    segment = [found["messages"][index] for index in found["segments"][0]]
    assert [segment[: each["prompt_messages"]] for each in found["model_calls"]] == prompts
    # The prompts have the number of steps that remain; the problem does not.
    assert prompts[0][1]["content"] != "How many?"
    assert reference["problem_statement"] == "How many?"
    assert [step["action"]["function"] for step in reference["steps"]] == ["execute_bash", "submit"]
    assert reference["steps"][0]["thought"] == "I count."


async def test_openai_format_ends_in_the_submitted_answer(tmp_path: Path) -> None:
    submit = tool_reply(call("submit", answer="42"))
    async with (
        scripted_backend([submit]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        run_id = (await post_chat(http, **CAPTURE)).headers["x-sandbox-run"]
        messages = (await get_trajectory(http, run_id, "openai")).json()["messages"]
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "assistant")
    ]
    assert messages[-1]["content"] == "42"


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS)
async def test_every_api_captures_a_trajectory_that_survives_a_restart(
    path: str, body: dict[str, Any], restarted: bool, tmp_path: Path
) -> None:
    serve = partial(running_proxy, state_dir=tmp_path, kind="memory")
    async with scripted_backend([STEP, ANSWER]) as backend:
        async with serve(backend) as url, http_client(url) as http:
            answered = await http.post(path, json={"model": "fake-model", **body, **CAPTURE})
            found = await trajectory(http, answered)
        if restarted:
            async with serve(backend) as url, http_client(url) as http:
                found = await trajectory(http, answered)
    assert (found["status"], found["result"]["answer"]) == ("completed", "It is 42.")
    assert [each["observation"] for each in found["tool_calls"]] == [OBSERVATION]
    roles = [message["role"] for message in found["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


async def test_each_choice_has_a_trajectory(tmp_path: Path) -> None:
    async with (
        scripted_backend([ANSWER] * 3) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, n=3, **CAPTURE)
        ids = [choice["sandbox"]["run_id"] for choice in answered.json()["choices"]]
        found = [(await get_trajectory(http, run_id)).json() for run_id in ids]
    assert [each["id"] for each in found] == ids
    assert [(each["choice"], each["result"]["answer"]) for each in found] == [
        (index, "It is 42.") for index in range(3)
    ]
    assert [len(each["model_calls"]) for each in found] == [1, 1, 1]


async def test_idempotent_retry_has_the_trajectory_of_the_first_attempt(tmp_path: Path) -> None:
    key = {"Idempotency-Key": "order-1"}
    async with (
        scripted_backend([STEP, ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        first = await trajectory(http, await post_chat(http, key, **CAPTURE))
        again = await trajectory(http, await post_chat(http, key, **CAPTURE))
        different = await post_chat(http, key)
    assert first == again
    assert different.status_code == 422


async def test_trajectory_after_client_tool_results_names_the_suspended_run(
    tmp_path: Path,
) -> None:
    script = [tool_reply(call("execute_bash", command="echo 1")), tool_reply(call("weather"))]
    async with (
        scripted_backend([*script, ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        asked = await post_chat(http, tools=[WEATHER], **CAPTURE)
        message = asked.json()["choices"][0]["message"]
        first = await trajectory(http, asked)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5 °C"}
        messages = [QUESTION, {**message, "content": None}, result]
        answered = await post_chat(http, messages=messages, tools=[WEATHER], **CAPTURE)
        second = await trajectory(http, answered)
        last = backend.requests[-1].body
    assert (first["continues"], second["continues"]) == (None, first["id"])
    assert first["result"]["stop_reason"] == "client_tool_calls"
    assert first["result"]["tool_calls"][0]["function"]["name"] == "weather"
    # The second trajectory has the whole history: of the first run, and its own.
    assert second["messages"][:-1] == last["messages"]
    assert [each["name"] for each in first["tool_calls"]] == ["execute_bash"]
    assert second["tool_calls"] == []


async def test_run_without_capture_has_no_trajectory(tmp_path: Path) -> None:
    async with (
        scripted_backend([ANSWER] * 2) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=EachKey()) as url,
        http_client(url) as http,
    ):
        plain = await post_chat(http)
        none = await post_chat(http, sandbox={"capture": "none"})
        found = [
            await get_trajectory(http, answered.headers["x-sandbox-run"])
            for answered in (plain, none)
        ]
        unknown = await get_trajectory(http, "0" * 32)
    assert [error_code(each) for each in found] == [(404, "trajectory_not_captured")] * 2
    assert "sandbox.capture" in found[0].json()["error"]["message"]
    assert error_code(unknown) == (404, "not_found")


async def test_unknown_value_of_capture_is_refused(tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        refused = await post_chat(http, sandbox={"capture": "everything"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "sandbox.capture"
    assert "'none', 'messages'" in refused.json()["error"]["message"]


async def test_relayed_request_has_no_run_and_no_trajectory(tmp_path: Path) -> None:
    async with (
        scripted_backend([ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        relayed = await post_chat(http, model="fake-model:plain", **CAPTURE)
        listed = (await http.get("/v1/trajectories")).json()["data"]
    assert relayed.status_code == 200
    assert "x-sandbox-run" not in relayed.headers
    assert listed == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "How many?", "store": False}),
        ("/v1/messages", {"messages": [QUESTION], "max_tokens": 100, "stream": True}),
    ],
)
async def test_run_of_one_model_call_has_a_trajectory(
    path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    sandbox = {"enabled": "never", "capture": "messages"}
    async with (
        scripted_backend([ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        answered = await http.post(path, json={"model": "fake-model", **body, "sandbox": sandbox})
        found = await trajectory(http, answered)
    reply = {"role": "assistant", "content": "It is 42."}
    assert found["messages"] == [QUESTION, reply]
    assert (found["segments"], len(found["model_calls"])) == ([[0]], 1)
    assert (found["turns"], found["tool_calls"]) == ([], [])
    assert (found["route"], found["result"]["answer"]) == ("never", "It is 42.")


async def test_only_the_owner_reads_and_deletes_a_trajectory(tmp_path: Path) -> None:
    other = {"authorization": "Bearer sk-other"}
    async with (
        scripted_backend([ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=EachKey()) as url,
        http_client(url) as http,
    ):
        run_id = (await post_chat(http, **CAPTURE)).headers["x-sandbox-run"]
        foreign = await get_trajectory(http, run_id, **other)
        deleted = await http.delete(f"/v1/runs/{run_id}/trajectory", headers=other)
        await http.delete(f"/v1/runs/{run_id}", headers=other)
        mine = await get_trajectory(http, run_id)
    assert error_code(foreign) == (404, "not_found")
    assert (deleted.status_code, mine.status_code) == (404, 200)


async def test_trajectory_is_also_served_at_v1_trajectories(tmp_path: Path) -> None:
    async with (
        scripted_backend([ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        run_id = (await post_chat(http, **CAPTURE)).headers["x-sandbox-run"]
        for format in ("native", "openai", "reference"):
            found = await http.get(f"/v1/trajectories/{run_id}", params={"format": format})
            assert found.status_code == 200
            assert found.json() == (await get_trajectory(http, run_id, format)).json()
        other = await http.get("/v1/trajectories/other")
    assert error_code(other) == (404, "not_found")


@pytest.mark.parametrize(
    "path", ["/v1/runs/{}/trajectory", "/v1/trajectories/{}", "/v1/responses/resp_{}"]
)
async def test_deleted_trajectory_is_a_404_with_the_code_trajectory_deleted(
    path: str, tmp_path: Path
) -> None:
    async with (
        scripted_backend([ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        body = {"model": "fake-model", "input": "How many?", **CAPTURE}
        run_id = (await http.post("/v1/responses", json=body)).headers["x-sandbox-run"]
        deleted = await http.delete(path.format(run_id))
        found = await get_trajectory(http, run_id)
        again = await http.delete(f"/v1/runs/{run_id}/trajectory")
    assert deleted.status_code == 200, deleted.text
    assert error_code(found) == (404, "trajectory_deleted")
    assert again.status_code == 404


async def test_trajectory_of_a_cancelled_run_has_the_turns_up_to_its_end(tmp_path: Path) -> None:
    async with (
        scripted_backend([STEP, Held(ANSWER, asyncio.Event())]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
        http_client(url) as other,
    ):
        body = {**BODY, **CAPTURE, "stream": True}
        with anyio.fail_after(TIMEOUT_S):
            async with http.stream("POST", PATH, json=body) as answered:
                run_id = answered.headers["x-sandbox-run"]
                await backend.arrived(2)
                cancelled = await other.delete(f"/v1/runs/{run_id}")
        found = (await get_trajectory(http, run_id)).json()
    assert cancelled.json()["status"] == "cancelled"
    assert found["status"] == "cancelled"
    assert [each["observation"] for each in found["tool_calls"]] == [OBSERVATION]


@pytest.mark.parametrize("later_s", [3599, 3600])
async def test_expired_trajectory_is_a_404_with_the_code_trajectory_expired(
    later_s: int, tmp_path: Path
) -> None:
    clock = ManualClock()

    def files() -> FileStore:
        settings = TrajectorySettings(retention_hours=1)
        store = open_store(tmp_path, trajectories=settings, now=clock.time)
        return FileStore(store, limits=ArtifactLimits())

    async with scripted_backend([ANSWER]) as backend:
        async with (
            running_proxy(backend, "memory", tmp_path, files=files()) as url,
            http_client(url) as http,
        ):
            run_id = (await post_chat(http, **CAPTURE)).headers["x-sandbox-run"]
        clock.advance(later_s)
        kept = files()
        async with (
            running_proxy(backend, "memory", tmp_path, files=kept) as url,
            http_client(url) as http,
        ):
            found = await get_trajectory(http, run_id)
            await kept.store.sweep()
            swept = await get_trajectory(http, run_id)
    if later_s < 3600:
        assert (found.status_code, swept.status_code) == (200, 200)
    else:
        assert error_code(found) == error_code(swept) == (404, "trajectory_expired")
        assert "has expired" in found.json()["error"]["message"]


async def test_oldest_trajectories_beyond_the_quota_are_404s_with_the_code_trajectory_expired(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path, trajectories=TrajectorySettings(quota_mib=1))
    digits = random.Random(0)
    async with (
        scripted_backend([ANSWER] * 4) as backend,
        running_proxy(
            backend, "memory", tmp_path, files=FileStore(store, limits=ArtifactLimits())
        ) as url,
        http_client(url) as http,
    ):
        run_ids = []
        for _ in range(4):  # each trajectory has about 0.4 MiB
            question = {"role": "user", "content": digits.randbytes(350_000).hex()}
            answered = await post_chat(http, messages=[question], **CAPTURE)
            run_ids.append(answered.headers["x-sandbox-run"])
            await trajectory(http, answered)  # waits until it is stored
        found = [await get_trajectory(http, run_id) for run_id in run_ids]
        listed = (await http.get("/v1/trajectories")).json()["data"]
    assert [each.status_code for each in found] == [404, 404, 200, 200]
    assert [error_code(each) for each in found[:2]] == [(404, "trajectory_expired")] * 2
    for each in found[:2]:
        assert "deleted for newer ones (trajectories.quota_mib)" in each.json()["error"]["message"]
    assert {each["id"] for each in listed} == set(run_ids[2:])


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [([STEP, Refusal(400)], "failed", "BadRequestError"), ([STEP], "cancelled", None)],
)
async def test_trajectory_of_a_failed_or_cancelled_run_keeps_the_earlier_tool_calls(
    script: list[Any], status: str, code: str | None, tmp_path: Path
) -> None:
    held = Held(ANSWER, asyncio.Event())
    async with (
        scripted_backend(script if code else [*script, held]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            if code:
                run_id = (await post_chat(http, **CAPTURE)).headers["x-sandbox-run"]
            else:
                body = {**BODY, **CAPTURE, "stream": True}
                async with http.stream("POST", PATH, json=body) as answered:
                    run_id = answered.headers["x-sandbox-run"]
                    await backend.arrived(2)
            while (found := (await get_trajectory(http, run_id)).json())["status"] == "running":
                await anyio.lowlevel.checkpoint()
    assert (found["status"], found["result"]) == (status, None)
    assert [each["observation"] for each in found["tool_calls"]] == [OBSERVATION]
    assert [each["error"] is None for each in found["model_calls"]] == [True, False]
    assert (found["error"] is None) == (code is None)


@sqlite_only
async def test_trajectory_of_a_running_run_has_the_tool_calls_so_far(
    tmp_path: Path,
) -> None:
    release = asyncio.Event()
    async with (
        scripted_backend([STEP, Held(ANSWER, release)]) as backend,
        running_proxy(backend, "memory", tmp_path / "first") as url,
        http_client(url) as http,
        http_client(url) as other,
    ):
        body = {**BODY, **CAPTURE, "stream": True}
        with anyio.fail_after(TIMEOUT_S):
            async with http.stream("POST", PATH, json=body) as answered:
                run_id = answered.headers["x-sandbox-run"]
                await backend.arrived(2)
                found = (await get_trajectory(other, run_id)).json()
                # The data directory of a server that is killed at this moment:
                await asyncio.to_thread(shutil.copytree, tmp_path / "first", tmp_path / "second")
                release.set()
                await answered.aread()
        async with (
            running_proxy(backend, "memory", tmp_path / "second") as restarted,
            http_client(restarted) as http_again,
        ):
            (lost_owner,) = (tmp_path / "first" / "owners").iterdir()
            (tmp_path / "second" / "owners" / lost_owner.name).unlink()
            lost = (await get_trajectory(http_again, run_id)).json()
        ended = (await get_trajectory(http, run_id)).json()
    assert [each["observation"] for each in found["tool_calls"]] == [OBSERVATION]
    assert (found["status"], lost["status"], ended["status"]) == ("running", "failed", "completed")
    assert lost["tool_calls"] == ended["tool_calls"] == found["tool_calls"]


async def test_deleted_trajectory_of_a_running_run_is_not_created_again(
    tmp_path: Path,
) -> None:
    release = asyncio.Event()
    async with (
        scripted_backend([STEP, Held(ANSWER, release)]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
        http_client(url) as other,
    ):
        body = {**BODY, **CAPTURE, "stream": True}
        with anyio.fail_after(TIMEOUT_S):
            async with http.stream("POST", PATH, json=body) as answered:
                run_id = answered.headers["x-sandbox-run"]
                await backend.arrived(2)
                deleted = await other.delete(f"/v1/runs/{run_id}/trajectory")
                release.set()
                await answered.aread()
        found = await get_trajectory(http, run_id)
    assert deleted.json() == {"id": run_id, "object": "run.trajectory.deleted", "deleted": True}
    assert error_code(found) == (404, "trajectory_deleted")


@pytest.mark.parametrize("table", ["trajectories", "trajectory_parts"])
async def test_run_whose_trajectory_cannot_be_stored_still_answers(
    table: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        scripted_backend([STEP, ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        with connected(tmp_path) as database:
            database.exec_driver_sql(f"DROP TABLE {table}")
        answered = await post_chat(http, **CAPTURE)
    assert answer_text(answered) == "It is 42."
    errors = [each.message for each in caplog.records if each.levelname == "ERROR"]
    run_id = answered.headers["x-sandbox-run"]
    assert errors == [
        f"run {run_id}: its trajectory cannot be stored",
        f"run {run_id}: its trajectory cannot be marked as failed",
    ]


NO_PARTS = {
    "sqlite": "CREATE TRIGGER no_parts BEFORE INSERT ON trajectory_parts"
    " BEGIN SELECT RAISE(FAIL, 'the disk is full'); END",
    "postgresql": "ALTER TABLE trajectory_parts ADD CHECK (false) NOT VALID",
}
NO_MARKS = {
    "sqlite": "CREATE TRIGGER no_marks BEFORE UPDATE OF deletion_reason ON trajectories"
    " BEGIN SELECT RAISE(FAIL, 'the disk is full'); END",
    "postgresql": "ALTER TABLE trajectories ADD CHECK (deletion_reason IS NULL) NOT VALID",
}


@pytest.mark.parametrize("is_marked", [True, False])
async def test_trajectory_that_could_not_be_stored_does_not_count_as_running(
    is_marked: bool, tmp_path: Path
) -> None:
    release = asyncio.Event()
    async with (
        scripted_backend([STEP, Held(ANSWER, release)]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
        http_client(url) as other,
    ):
        body = {**BODY, **CAPTURE, "stream": True}
        with anyio.fail_after(TIMEOUT_S):
            async with http.stream("POST", PATH, json=body) as answered:
                run_id = answered.headers["x-sandbox-run"]
                await backend.arrived(2)
                running = await get_trajectory(other, run_id)
                with connected(tmp_path) as database:
                    for failing in [NO_PARTS] if is_marked else [NO_PARTS, NO_MARKS]:
                        database.exec_driver_sql(failing[database.dialect.name])
                release.set()
                text = (await answered.aread()).decode()
        found = await get_trajectory(http, run_id)
    assert "It is 42." in text
    assert running.json()["status"] == "running"
    if is_marked:
        assert error_code(found) == (404, "trajectory_not_stored")
    else:
        assert found.json()["status"] == "failed"


async def test_deletion_of_the_first_choice_deletes_the_trajectories_of_all_choices(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([ANSWER] * 2) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, n=2, **CAPTURE)
        ids = [choice["sandbox"]["run_id"] for choice in answered.json()["choices"]]
        await http.delete(f"/v1/runs/{ids[0]}/trajectory")
        found = [await get_trajectory(http, run_id) for run_id in ids]
    assert [error_code(each) for each in found] == [(404, "trajectory_deleted")] * 2


async def test_trajectory_can_be_read_while_a_write_to_the_store_is_blocked(tmp_path: Path) -> None:
    async with (
        scripted_backend([ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
        http_client(url) as other,
    ):
        run_id = (await post_chat(http, **CAPTURE)).headers["x-sandbox-run"]
        await get_trajectory(http, run_id)  # waits until it is stored
        with anyio.fail_after(TIMEOUT_S):
            with writes_blocked(tmp_path):
                deleting = asyncio.create_task(other.delete(f"/v1/runs/{run_id}/trajectory"))
                for _ in range(10):  # during the first one, the deletion reaches the store
                    found = await get_trajectory(http, run_id)
                has_waited = not deleting.done()
            deleted = await deleting
    assert has_waited
    assert (found.status_code, deleted.status_code) == (200, 200)


async def test_run_whose_audit_log_cannot_be_created_has_a_failed_trajectory(
    tmp_path: Path,
) -> None:
    (tmp_path / "audit").write_text("no directory")
    files = FileStore(open_store(tmp_path), limits=ArtifactLimits())
    make_runs: Any = partial(
        RunManager,
        audit_logs=AuditLogs(tmp_path / "audit", keep_days=90),
        trajectories=files.store.trajectories,
    )
    async with (
        scripted_backend([]) as backend,
        running_proxy(
            backend,
            "memory",
            tmp_path,
            profiles=Profiles.only(Profile(audit=AUDIT)),
            files=files,
            make_runs=make_runs,
        ) as url,
        http_client(url) as http,
    ):
        failed = await post_chat(http, **CAPTURE)
        found = await trajectory(http, failed)
    assert error_code(failed) == (503, "audit_unavailable")
    assert (found["status"], found["error"]["code"]) == ("failed", "audit_unavailable")


async def test_secrets_are_redacted_in_every_part_of_a_trajectory(tmp_path: Path) -> None:
    script = [
        {
            "reasoning": f"So it is {SECRET}, I think.",
            "content": f"I write {SECRET}.",
            "tool_calls": [
                call("execute_bash", command=f"echo {SECRET} > output/key.txt", **{SECRET: SECRET})
            ],
        },
        tool_reply(call("submit", answer=f"It is {SECRET}.")),
    ]
    profiles = Profiles.only(Profile(redaction=Redaction(("all",))))
    messages = [{"role": "user", "content": f"What is {SECRET}?"}]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=profiles) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, messages=messages, user=SECRET, **CAPTURE)
        run_id = answered.headers["x-sandbox-run"]
        texts = [
            (await get_trajectory(http, run_id, name)).text
            for name in ("native", "openai", "reference")
        ]
    assert [SECRET in text for text in texts] == [False] * 3
    assert texts[0].count("[redacted github]") >= 6


async def test_secrets_are_redacted_in_the_error_of_a_failed_run(tmp_path: Path) -> None:
    profiles = Profiles.only(Profile(redaction=Redaction(("all",))))
    async with (
        scripted_backend([STEP, Refusal(400, f"{SECRET} is no key")]) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=profiles) as url,
        http_client(url) as http,
    ):
        failed = await post_chat(http, **CAPTURE)
        found = await get_trajectory(http, failed.headers["x-sandbox-run"])
    assert found.json()["status"] == "failed"
    assert "[redacted github] is no key" in found.text
    assert SECRET not in found.text
