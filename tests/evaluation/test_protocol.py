"""`sandbox-eval run` with the protocols of the suites, and with options that replace them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evaluation.results import Result, read_results
from evaluation.samples import Draft, EvaluationProtocol, write_suite
from proxy.models.scripted import call, text_reply, tool_reply
from tests.evaluation.evaluation_process import sample, sandbox_eval
from tests.fakes.backend import Item, ScriptedBackend, scripted_backend
from tests.fakes.server import running_proxy

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")

MODEL = "fake-model"
PROTOCOL = EvaluationProtocol(
    repeats=2, temperature=0.5, max_tokens=100, sandbox={"limits": {"max_turns": 1}}
)
ONCE = ("--repeats", "1")
PLAIN, SANDBOX = ("--modes", "plain"), ("--modes", "sandbox")
RIGHT = text_reply("Answer: 0")


def suite_with_protocol(data: Path, name: str = "sums", **changes: Any) -> None:
    drafts = [Draft(sample(id=f"{name}/0", **changes))]
    write_suite(data / name, name, drafts, licence="none", source="a test", protocol=PROTOCOL)


async def run(
    home: Path, script: Sequence[Item], *more: str
) -> tuple[ScriptedBackend, list[Result]]:
    """Run the prepared suites. Return the backend with its requests, and the results."""
    async with (
        scripted_backend(script, model=MODEL) as backend,
        running_proxy(backend, "memory", home / "state") as url,
    ):
        ended = await sandbox_eval(
            *("run", "--output", home / "output", "--data", home / "data", "--models", MODEL),
            *("--base-url", f"{url}/v1", "--concurrency", "1", *more),
        )
    assert ended.returncode == 0, ended.stderr
    return backend, read_results(home / "output")


async def test_evaluation_sends_the_sampling_fields_and_repeats_that_the_suites_protocol_sets(
    tmp_path: Path,
) -> None:
    suite_with_protocol(tmp_path / "data")
    backend, results = await run(tmp_path, [RIGHT, RIGHT], *PLAIN)
    assert [result.repeat for result in results] == [0, 1]
    sent = [(seen.body["temperature"], seen.body["max_tokens"]) for seen in backend.requests]
    assert sent == [(0.5, 100)] * 2


async def test_options_override_fields_of_the_protocol_and_null_removes_a_field(
    tmp_path: Path,
) -> None:
    suite_with_protocol(tmp_path / "data")
    options = ("--request", '{"temperature": null, "max_tokens": 7, "top_p": 0.9}', *ONCE)
    backend, results = await run(tmp_path, [RIGHT], *PLAIN, *options)
    (seen,) = backend.requests
    fields = {name: seen.body.get(name) for name in ("max_tokens", "top_p")}
    assert (fields, "temperature" in seen.body, len(results)) == (
        {"max_tokens": 7, "top_p": 0.9},
        False,
        1,
    )


@pytest.mark.parametrize(
    ("options", "stop_reason"),
    [((), "max_turns"), (("--sandbox", '{"limits": null}'), "submitted")],
)
async def test_requests_have_the_sandbox_object_of_the_protocol(
    options: Sequence[str], stop_reason: str, tmp_path: Path
) -> None:
    suite_with_protocol(tmp_path / "data")
    script = [
        tool_reply(call("execute_bash", command="true")),
        tool_reply(call("submit", answer="Answer: 0")),
    ]
    _, (result,) = await run(tmp_path, script, *SANDBOX, *ONCE, *options)
    assert result.sandbox is not None
    assert result.sandbox.stop_reason == stop_reason


async def test_plain_mode_sends_its_own_problem_text(tmp_path: Path) -> None:
    suite_with_protocol(tmp_path / "data", plain_problem="Think: 0 + 0?")
    backend, _ = await run(tmp_path, [RIGHT], *ONCE, *PLAIN)
    assert backend.requests[0].body["messages"] == [{"role": "user", "content": "Think: 0 + 0?"}]


async def test_evaluation_with_another_protocol_is_not_continued(tmp_path: Path) -> None:
    suite_with_protocol(tmp_path / "data")
    await run(tmp_path, [RIGHT], *PLAIN, *ONCE)
    path = tmp_path / "data" / "sums" / "manifest.json"
    path.write_text(path.read_text("utf-8").replace("0.5", "0.6"), "utf-8")
    ended = await sandbox_eval(
        *("run", "--output", tmp_path / "output", "--data", tmp_path / "data", "--models", MODEL)
    )
    assert ended.returncode == 1
    assert "its results have protocols " in ended.stderr


async def test_all_prepared_suites_run_by_default(tmp_path: Path) -> None:
    for name in ("one", "two"):
        suite_with_protocol(tmp_path / "data", name)
    (tmp_path / "data" / "incomplete").mkdir()
    _, results = await run(tmp_path, [RIGHT, RIGHT], *PLAIN, *ONCE)
    assert [result.sample for result in results] == ["one/0", "two/0"]


async def test_error_names_a_directory_without_a_prepared_suite(tmp_path: Path) -> None:
    ended = await sandbox_eval(
        *("run", "--output", tmp_path / "out", "--data", tmp_path, "--models", MODEL)
    )
    assert (ended.returncode, ended.stderr) == (
        1,
        f"sandbox-eval: {tmp_path}: no prepared suite. Prepare the suites: sandbox-eval prepare\n",
    )
