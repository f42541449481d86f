"""`sandbox-eval run --capture` keeps the turns of a run, and the viewer shows them."""

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from evaluation.results import Result, Step, Trajectories, Trajectory, read_results
from evaluation.trajectories import MAX_TEXT_CHARS
from evaluation.turns import MAX_BODY_BYTES, MAX_ERROR_CHARS, MAX_TURNS
from proxy.models.scripted import call, tool_reply
from tests.evaluation.evaluation_process import report_of, rows, sandbox_eval, sums
from tests.fakes.backend import scripted_backend
from tests.fakes.server import EachKey, running_proxy

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")

MODEL = "fake-model"
SANDBOX = ("--modes", "sandbox")
SCRIPT = [
    {
        "reasoning": "I could list the files.",
        **tool_reply(call("execute_bash", command="echo one"), content="First I look."),
    },
    tool_reply(
        call("execute_bash", command="echo two"), call("execute_bash", command="echo three")
    ),
    tool_reply(call("submit", answer="Answer: 0"), content="Now I know."),
]


def arguments(home: Path, url: str, *more: str) -> list[str]:
    """Return the arguments of a run with a sandbox."""
    where = ("--output", str(home / "output"), "--data", str(home / "data"))
    what = ("--suites", "synthetic", "--models", MODEL, "--max-retries", "0", "--concurrency", "1")
    return ["run", *where, *what, "--base-url", f"{url}/v1", *more]


async def evaluate(
    home: Path, *more: str, script: Sequence[Any] = SCRIPT
) -> tuple[Result, Trajectory]:
    """Evaluate a script with one sum, in a proxy in which each key has its own runs."""
    sums(home / "data")
    async with (
        scripted_backend(script, model=MODEL) as backend,
        running_proxy(backend, "memory", home / "state", keyring=EachKey()) as url,
    ):
        ended = await sandbox_eval(*arguments(home, url, *SANDBOX, *more), OPENAI_API_KEY="sk-own")
    assert ended.returncode == 0, ended.stderr
    return kept(home)


def kept(home: Path) -> tuple[Result, Trajectory]:
    """Return the only result and its trajectory."""
    (result,) = read_results(home / "output")
    trajectory = Trajectories(home / "output").get(result)
    assert trajectory is not None
    return result, trajectory


def commands(steps: list[Step]) -> list[str]:
    return [step.arguments.get("command") or step.tool for step in steps]


async def html_of(home: Path) -> str:
    await report_of(home / "output")
    return (home / "output" / "report.html").read_text("utf-8")


async def test_capture_keeps_the_text_reasoning_and_calls_of_each_turn(tmp_path: Path) -> None:
    _, trajectory = await evaluate(tmp_path, "--capture")
    turns = trajectory.turns
    assert trajectory.turns_error == ""
    assert turns is not None
    assert [(turn.number, turn.text, turn.reasoning) for turn in turns] == [
        (1, "First I look.", "I could list the files."),
        (2, "", ""),
        (3, "Now I know.", ""),
    ]
    assert [commands(trajectory.calls_of(turn)) for turn in turns] == [
        ["echo one"],
        ["echo two", "echo three"],
        ["submit"],
    ]
    # Calls that the answer has too are kept once.
    assert [turn.steps for turn in turns] == [(1,), (2, 3), ()]
    assert [len(turn.other_calls) for turn in turns] == [0, 0, 1]
    assert all(step.observation for step in trajectory.steps)
    html = await html_of(tmp_path)
    assert "<h4>Turns</h4>" in html
    assert "<h4>Steps</h4>" not in html
    texts = ("First I look.", "echo one", "turn 2", "echo two", "echo three", "Now I know.")
    positions = [html.index(text, html.index("<h4>Turns</h4>")) for text in texts]
    assert positions == sorted(positions)


async def test_run_without_capture_keeps_only_steps(tmp_path: Path) -> None:
    _, trajectory = await evaluate(tmp_path)
    assert (trajectory.turns, trajectory.turns_error) == (None, "")
    assert commands(list(trajectory.steps)) == ["echo one", "echo two", "echo three"]
    html = await html_of(tmp_path)
    assert "<h4>Steps</h4>" in html
    assert "The results do not have the turns" in html
    assert "<h4>Turns</h4>" not in html


async def test_captured_turns_have_the_capabilities_that_the_proxy_finds(tmp_path: Path) -> None:
    command = "python3 -c 'print(sum(range(9)))'"
    script = [
        tool_reply(call("execute_bash", command="cat a"), call("execute_bash", command=command)),
        tool_reply(call("execute_bash", command="echo one")),
        tool_reply(call("submit", answer="Answer: 0")),
    ]
    result, trajectory = await evaluate(tmp_path, "--capture", script=script)
    assert trajectory.turns is not None
    found = [turn.capabilities for turn in trajectory.turns]
    assert found == [("computation", "file_management"), (), ()]
    assert result.sandbox is not None
    # The proxy's own counts, of which the classification of the turns is a refinement.
    counts = Counter(name for names in found for name in names or ())
    assert +Counter(result.sandbox.capability_turns) == counts
    report = await report_of(tmp_path / "output")
    shares = ["33.3%", "0.0%", "33.3%", "33.3%"]
    assert rows(report, "### Capabilities")[0] == ["sums", *shares, *shares]


async def test_turns_of_a_proxy_that_does_not_classify_calls_have_no_capabilities(
    tmp_path: Path,
) -> None:
    made = {**native(1), "tool_calls": [{"turn": 1, "step": 1, "name": "a", "arguments": {}}]}
    trajectory = await captured(tmp_path, web.json_response(made))
    assert trajectory.turns_error == ""
    assert trajectory.turns is not None
    assert [turn.capabilities for turn in trajectory.turns] == [None]


async def test_results_without_capture_can_be_continued_with_capture(tmp_path: Path) -> None:
    suite = sums(tmp_path / "data", 2)
    async with (
        scripted_backend([*SCRIPT, *SCRIPT], model=MODEL) as backend,
        running_proxy(backend, "memory", tmp_path / "state") as url,
    ):
        for more in (["--limit", "1"], ["--capture"]):
            ended = await sandbox_eval(*arguments(tmp_path, url, *SANDBOX, *more))
            assert ended.returncode == 0, ended.stderr
    trajectories = Trajectories(tmp_path / "output")
    found = {each.sample: trajectories.get(each) for each in read_results(tmp_path / "output")}
    assert {name: each and each.turns is not None for name, each in found.items()} == {
        suite.samples[0].id: False,
        suite.samples[1].id: True,
    }
    html = await html_of(tmp_path)
    assert (html.count("<h4>Turns</h4>"), html.count("<h4>Steps</h4>")) == (1, 1)


# A proxy whose trajectories are at fault


@asynccontextmanager
async def made_proxy(trajectory: web.Response | None) -> AsyncIterator[str]:
    """Yield the URL of a server that answers each chat request with one step, and requests for
    trajectories with a response; None: it closes the connection."""
    usage = {
        **dict.fromkeys(("turns", "llm_calls", "commands", "env_tokens", "trajectory_tokens"), 1),
        "capabilities": {},
    }
    start = {"kind": "tool_start", "step": 1, "tool": "execute_bash", "arguments": {"command": "a"}}
    end = {"kind": "tool_end", "step": 1, "exit_code": 0, "ms": 1, "observation": "b"}
    completion = {
        "choices": [{"message": {"content": "Answer: 0"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "sandbox": usage},
        "sandbox": {
            "run_id": "run/../1",
            "stop_reason": "submitted",
            "route": "always",
            "events": [start, end],
        },
    }

    async def chat(_: web.Request) -> web.Response:
        return web.json_response(completion)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def trajectory_of_run(request: web.Request) -> web.Response:
        assert request.match_info["run_id"] == "run/../1"
        if trajectory is None:
            assert request.transport is not None
            request.transport.abort()
        return trajectory or web.Response()

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/runs/{run_id}/trajectory", trajectory_of_run)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def captured(home: Path, response: web.Response | None) -> Trajectory:
    """Evaluate a proxy that answers requests for trajectories with a response. Return what is kept
    of it. The sample has an answer in any case."""
    sums(home / "data")
    async with made_proxy(response) as url:
        ended = await sandbox_eval(*arguments(home, url, *SANDBOX, "--capture"))
    assert ended.returncode == 0, ended.stderr
    result, trajectory = kept(home)
    assert (result.status, result.answer, list(result.failures)) == ("answered", "Answer: 0", [])
    return trajectory


def native(turns: int, text: str = "", reply: Any = 0) -> Mapping[str, Any]:
    """Return a trajectory whose turns have one model call each."""
    call = {"reply": reply, "error": None, "duration_s": 0.5}
    return {
        "turns": [{"turn": number} for number in range(1, turns + 1)],
        "model_calls": [{"turn": number, **call} for number in range(1, turns + 1)],
        "messages": [{"role": "assistant", "content": text}],
        "tool_calls": [],
    }


REFUSAL = {"error": {"message": "The trajectory has expired.", "code": "trajectory_expired"}}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (lambda: web.json_response(REFUSAL, status=404), "404: The trajectory has expired."),
        (lambda: web.Response(status=502, text="no"), "502: no"),
        (lambda: web.Response(text="no"), "JSONDecodeError: Expecting value"),
        (lambda: web.json_response({}), "KeyError: "),
        (lambda: web.json_response(native(1, reply=7)), "IndexError: "),
        (
            lambda: web.Response(body=b" " * (MAX_BODY_BYTES + 1)),
            "too_large: the response has more than",
        ),
    ],
    ids=["refused", "other server", "no JSON", "no fields", "no message", "too large"],
)
async def test_failure_to_get_the_turns_is_recorded_beside_the_answer(
    response: Any, reason: str, tmp_path: Path
) -> None:
    trajectory = await captured(tmp_path, response())
    assert trajectory.turns is None
    assert trajectory.turns_error.startswith(reason)
    assert len(trajectory.turns_error) <= MAX_ERROR_CHARS
    assert "\n" not in trajectory.turns_error
    html = await html_of(tmp_path)
    assert "The turns could not be had from the proxy" in html
    assert "<h4>Steps</h4>" in html


async def test_answer_whose_turns_are_lost_with_the_proxy_is_an_infra_error(tmp_path: Path) -> None:
    sums(tmp_path / "data")
    async with made_proxy(None) as url:
        ended = await sandbox_eval(*arguments(tmp_path, url, *SANDBOX, "--capture"))
    assert ended.returncode == 3
    (result,) = read_results(tmp_path / "output")
    assert (result.status, [each.code for each in result.failures]) == (
        "infra_error",
        ["connection_error"],
    )
    assert Trajectories(tmp_path / "output").get(result) is None


@pytest.mark.parametrize(
    ("turns", "text", "kept_turns"),
    [(MAX_TURNS + 5, "short", MAX_TURNS), (60, "x" * MAX_TEXT_CHARS, 50)],
    ids=["many turns", "long turns"],
)
async def test_turns_beyond_the_bounds_are_left_out_and_counted(
    turns: int, text: str, kept_turns: int, tmp_path: Path
) -> None:
    trajectory = await captured(tmp_path, web.json_response(native(turns, text)))
    assert trajectory.turns is not None
    assert (len(trajectory.turns), trajectory.turns_left_out) == (kept_turns, turns - kept_turns)
    assert f"{turns - kept_turns} further turns were not kept." in await html_of(tmp_path)


async def test_html_report_escapes_hostile_text_in_a_turn(tmp_path: Path) -> None:
    hostile = "</pre></template><script>alert(1)</script>"
    await captured(tmp_path, web.json_response(native(1, hostile)))
    html = await html_of(tmp_path)
    assert html.count("<script>") == 1
    assert html.count("&lt;script&gt;alert(1)") == 1


def test_trajectory_record_of_an_earlier_version_is_read_without_turns() -> None:
    step = {"tool": "execute_bash", "arguments": {"command": "ls"}}
    fields = {"model": "m", "mode": "sandbox", "repeat": 0, "sample": "s", "started": "now"}
    found = Trajectory.model_validate_json(json.dumps({**fields, "steps": [step]}))
    assert (found.turns, found.steps[0].number) == (None, 0)
