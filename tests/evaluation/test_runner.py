"""`sandbox-eval run` and `report` against a proxy: retries, errors, settings and repeats."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

from evaluation.results import (
    RESULTS_FILE,
    RUN_FILE,
    Result,
    RunInfo,
    RunSettings,
    Trajectories,
    open_results,
    read_results,
    read_run_info,
)
from evaluation.samples import Draft, write_suite
from proxy.models.scripted import call, text_reply, tool_reply
from tests.evaluation.evaluation_process import (
    COMMAND,
    ENVIRONMENT,
    TIMEOUT_S,
    report_of,
    rows,
    sample,
    sandbox_eval,
    sums,
)
from tests.fakes.backend import Item, Raw, Refusal, scripted_backend
from tests.fakes.server import running_proxy

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")

MODEL = "fake-model"
PLAIN = ("--modes", "plain")
RIGHT = text_reply("Answer: 0")
OVERFLOW = Refusal(400, "too long", code="context_length_exceeded")
HEADING = "### Results without an ordinary grade"


def arguments(home: Path, url: str, *more: str) -> list[str]:
    """Return the arguments of a run of the suite of sums."""
    where = ("--output", str(home / "output"), "--data", str(home / "data"))
    what = ("--suites", "synthetic", "--models", MODEL, "--max-retries", "0", "--concurrency", "1")
    return ["run", *where, *what, "--base-url", f"{url}/v1", *more]


async def evaluate(home: Path, script: Sequence[Item], *more: str) -> tuple[int, str, list[Result]]:
    """Evaluate a scripted backend with one sum. Return the exit code, the messages and the
    results."""
    sums(home / "data")
    async with (
        scripted_backend(script, model=MODEL) as backend,
        running_proxy(backend, "memory", home / "state") as url,
    ):
        ended = await sandbox_eval(*arguments(home, url, *more))
    return ended.returncode or 0, ended.stderr, read_results(home / "output")


async def on_terminal(command: Sequence[str]) -> tuple[int, str]:
    """Run a command whose standard error is a terminal. Return its exit code and what the terminal
    shows."""
    screen, terminal = os.openpty()
    shown = bytearray()

    def read_screen() -> None:
        with suppress(OSError):  # the end: no process has the terminal open
            while part := os.read(screen, 4096):
                shown.extend(part)

    try:
        with anyio.fail_after(TIMEOUT_S):
            async with (
                anyio.create_task_group() as group,
                await anyio.open_process(
                    command, stderr=terminal, env={**ENVIRONMENT, "TERM": "xterm"}
                ) as process,
            ):
                os.close(terminal)
                group.start_soon(anyio.to_thread.run_sync, read_screen)
                code = await process.wait()
    finally:
        os.close(screen)
    return code, shown.decode()


async def test_failed_attempt_is_repeated_and_recorded(tmp_path: Path) -> None:
    script = [Refusal(503, "busy", code="busy"), RIGHT]
    code, _, (result,) = await evaluate(tmp_path, script, *PLAIN, "--max-retries", "1")
    assert (code, result.status, result.answer) == (0, "answered", "Answer: 0")
    assert [(each.status, each.code) for each in result.failures] == [(503, "busy")]
    assert result.first_started
    assert result.first_started < result.started
    assert rows(await report_of(tmp_path / "output"), "### Errors") == [
        ["sums", "plain", "busy", "0", "1"]
    ]


async def test_refused_request_is_not_repeated(tmp_path: Path) -> None:
    script = [Refusal(400, "no", code="invalid_value"), RIGHT]
    code, _, (result,) = await evaluate(tmp_path, script, *PLAIN, "--max-retries", "5")
    assert (code, result.status) == (3, "infra_error")
    assert [each.code for each in result.failures] == ["invalid_value"]
    assert result.first_started is None


async def test_infra_error_is_counted_apart_and_the_next_run_repeats_its_request(
    tmp_path: Path,
) -> None:
    code, messages, (result,) = await evaluate(tmp_path, [Refusal(500, "broken")], *PLAIN)
    assert (code, result.status) == (3, "infra_error")
    assert "1 requests have no answer because of infrastructure errors." in messages
    report = await report_of(tmp_path / "output")
    assert rows(report, f"## {MODEL}")[0] == ["sums", "-", "-", "-", "-", "-"]
    assert rows(report, HEADING)[0] == ["sums", "plain", "1", "0", "0", "0", "0", "0", "0", "1"]
    code, _, (result,) = await evaluate(tmp_path, [RIGHT], *PLAIN)
    assert (code, result.status) == (0, "answered")
    report = await report_of(tmp_path / "output")
    assert rows(report, f"## {MODEL}")[0] == ["sums", "100.0", "-", "-", "-", "-"]
    assert rows(report, HEADING)[0] == ["sums", "plain", "1", "1", "0", "0", "0", "0", "0", "0"]


async def test_lone_surrogates_in_a_response_do_not_stop_a_run(tmp_path: Path) -> None:
    body = {"choices": [{"message": {"content": "2"}, "finish_reason": "\ud800" + 200 * "x"}]}
    script = [Raw(200, json.dumps(body).encode(), {"content-type": "application/json"})]
    code, _, (result,) = await evaluate(tmp_path, script, *PLAIN)
    assert (code, result.status, result.finish_reason) == (0, "answered", "?" + 99 * "x")


NULL_USAGE = (
    b'{"choices": [{"message": {"content": "2"}, "finish_reason": "stop"}],'
    b' "usage": {"prompt_tokens": null, "completion_tokens": 1, "total_tokens": 1}}'
)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"choices": []}', "application/json"),
        (b"{}", "application/json"),
        (b"Hi", "text/plain"),
        (100_000 * b"[" + 100_000 * b"]", "application/json"),
        (NULL_USAGE, "application/json"),
    ],
)
async def test_response_that_is_no_completion_is_an_infra_error(
    body: bytes, content_type: str, tmp_path: Path
) -> None:
    script = [Raw(200, body, {"content-type": content_type})]
    code, _, (result,) = await evaluate(tmp_path, script, *PLAIN)
    assert (code, result.status, result.failures[0].code) == (3, "infra_error", "bad_response")


async def test_context_overflow_counts_as_wrong(tmp_path: Path) -> None:
    code, _, (result,) = await evaluate(tmp_path, [OVERFLOW], *PLAIN)
    assert (code, result.status) == (0, "context_overflow")
    report = await report_of(tmp_path / "output")
    assert rows(report, f"## {MODEL}")[0][1] == "0.0"
    assert rows(report, HEADING)[0] == ["sums", "plain", "1", "1", "0", "1", "0", "0", "0", "0"]


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        (
            400,
            {
                "code": 400,
                "message": "request (21886 tokens) exceeds the available context size (8192"
                " tokens), try increasing it",
                "type": "exceed_context_size_error",
            },
            "context_overflow",
        ),
        (
            400,
            {
                "code": 400,
                "message": "This model's maximum context length is 4096 tokens. However, you"
                " requested 5000 tokens.",
                "type": "BadRequestError",
            },
            "context_overflow",
        ),
        (400, {"code": "invalid_value", "message": "temperature is negative"}, "infra_error"),
        (500, {"message": "context size: the worker died"}, "infra_error"),
    ],
    ids=["llama.cpp", "vLLM", "another refusal", "failure of the server"],
)
async def test_context_overflow_is_recognized_by_the_error_message_of_the_server(
    status: int, error: Mapping[str, Any], expected: str, tmp_path: Path
) -> None:
    body = json.dumps({"error": error}).encode()
    script = [Raw(status, body, {"content-type": "application/json"})]
    _, _, (result,) = await evaluate(tmp_path, script, *PLAIN)
    assert result.status == expected


async def test_result_of_a_sandbox_run_has_its_route_and_stop_reason_and_counts(
    tmp_path: Path,
) -> None:
    script = [
        tool_reply(call("execute_bash", command="exit 3")),
        tool_reply(call("submit", answer="Answer: 0")),
    ]
    _, _, (result,) = await evaluate(tmp_path, script, "--modes", "sandbox")
    assert result.sandbox is not None
    assert result.sandbox.stop_reason == "submitted"
    assert result.sandbox.route == "always"
    assert (result.sandbox.turns, result.sandbox.model_calls) == (2, 2)
    assert (result.sandbox.tool_calls, result.sandbox.failed_tool_calls) == (1, 1)


async def test_run_with_a_sandbox_keeps_its_trajectory(tmp_path: Path) -> None:
    command = "echo 0 > /testbed/output/a.txt; exit 3"
    script = [
        tool_reply(call("execute_bash", command=command), content="I count."),
        tool_reply(call("submit", answer="Answer: 0")),
    ]
    _, _, (result,) = await evaluate(tmp_path, script, "--modes", "sandbox")
    trajectory = Trajectories(tmp_path / "output").get(result)
    assert trajectory is not None
    assert "I count." in trajectory.reasoning
    (step,) = trajectory.steps
    assert (step.tool, step.arguments) == ("execute_bash", {"command": command})
    assert "Exit code: 3" in step.observation
    assert step.exit_code == 3
    assert [file.path for file in trajectory.files] == ["/testbed/output/a.txt"]


async def test_seed_of_a_request_is_the_given_seed_plus_its_repeat_number(tmp_path: Path) -> None:
    sums(tmp_path / "data")
    more = (*PLAIN, "--repeats", "2", "--seed", "7", "--request", '{"temperature": 0.5}')
    async with (
        scripted_backend([RIGHT, text_reply("Answer: 1")], model=MODEL) as backend,
        running_proxy(backend, "memory", tmp_path / "state") as url,
    ):
        await sandbox_eval(*arguments(tmp_path, url, *more))
    sent = [(seen.body["seed"], seen.body["temperature"]) for seen in backend.requests]
    assert sent == [(7, 0.5), (8, 0.5)]
    assert rows(await report_of(tmp_path / "output"), f"## {MODEL}")[0][1] == "50.0"


async def test_error_names_a_model_that_the_proxy_does_not_serve(tmp_path: Path) -> None:
    code, messages, results = await evaluate(tmp_path, [], "--models", "other-model")
    assert (code, results) == (1, [])
    assert (
        "The proxy does not serve the model other-model:plain. Its models: fake-model" in messages
    )


async def test_run_with_other_settings_does_not_continue_the_results(tmp_path: Path) -> None:
    await evaluate(tmp_path, [RIGHT], *PLAIN)
    code, messages, _ = await evaluate(tmp_path, [RIGHT], *PLAIN, "--seed", "1")
    assert code == 1
    assert "its results have seed null, not 1. Use the same value, or another --output" in messages


async def test_run_json_is_replaced_atomically(tmp_path: Path) -> None:
    settings = RunSettings(suites={}, sandbox={}, request={}, seed=None)
    info = RunInfo(settings=settings, data="", concurrency=1, versions={})
    with open_results(tmp_path, info):
        (tmp_path / "earlier.json").hardlink_to(tmp_path / RUN_FILE)
    later = info.model_copy(update={"concurrency": 2})
    with open_results(tmp_path, later):
        pass
    # A file that was written over would have changed under both names.
    earlier = RunInfo.model_validate_json((tmp_path / "earlier.json").read_bytes())
    assert (earlier, read_run_info(tmp_path)) == (info, later)


async def test_limit_option_takes_problems_of_each_kind_in_turn(tmp_path: Path) -> None:
    kinds = ["optics", "optics", "optics", "waves", "heat"]
    drafts = [
        Draft(sample(id=f"{number}-{kind}", problem=f"{number}?", kind=kind))
        for number, kind in enumerate(kinds)
    ]
    write_suite(tmp_path / "data" / "synthetic", "synthetic", drafts, licence="none", source="test")
    sent = []
    async with (
        scripted_backend([RIGHT] * 5, model=MODEL) as backend,
        running_proxy(backend, "memory", tmp_path / "state") as url,
    ):
        for limit in (["--limit", "3"], ["--limit", "4"], []):
            ended = await sandbox_eval(*arguments(tmp_path, url, *PLAIN, *limit))
            assert ended.returncode == 0, ended.stderr
            lines = (tmp_path / "output" / RESULTS_FILE).read_text("utf-8").splitlines()
            sent.append([json.loads(line)["sample"] for line in lines])
    first = ["0-optics", "3-waves", "4-heat"]
    assert sent == [first, [*first, "1-optics"], [*first, "1-optics", "2-optics"]]


async def test_each_part_of_a_continued_run_has_its_own_totals_and_concurrency(
    tmp_path: Path,
) -> None:
    sums(tmp_path / "data", 3)
    messages = []
    async with (
        scripted_backend([RIGHT] * 3, model=MODEL) as backend,
        running_proxy(backend, "memory", tmp_path / "state") as url,
    ):
        for more in (["--limit", "1"], ["--concurrency", "2", "--price", f"{MODEL}=1,1"]):
            ended = await sandbox_eval(*arguments(tmp_path, url, *PLAIN, *more))
            messages.append(ended.stderr.splitlines()[-1])
    results = read_results(tmp_path / "output")
    assert [each.concurrency for each in results] == [1, 2, 2]
    tokens = [each.prompt_tokens + each.completion_tokens for each in results]
    cost_usd = sum(tokens[1:]) / 1e6
    assert messages == [
        f"1 of 1 requests; in this run: 0 infra errors, {tokens[0]} tokens",
        f"3 of 3 requests; in this run: 0 infra errors, {sum(tokens[1:])} tokens,"
        f" {cost_usd:.4f} USD",
    ]
    report = await report_of(tmp_path / "output")
    assert "With 1 or 2 requests at a time." in report
    minutes = sum(each.latency_s / (each.concurrency or 0) for each in results) / 60
    assert rows(report, "## Speed")[0][4] == f"{3 / minutes:.1f}"


async def test_progress_bar_on_a_terminal_counts_the_requests_and_their_errors(
    tmp_path: Path,
) -> None:
    sums(tmp_path / "data", 3)
    async with (
        scripted_backend([RIGHT, Refusal(400, "no"), RIGHT], model=MODEL) as backend,
        running_proxy(backend, "memory", tmp_path / "state") as url,
    ):
        code, shown = await on_terminal([*COMMAND, *arguments(tmp_path, url, *PLAIN)])
    assert code == 3
    bars = [line for line in re.split(r"[\r\n]", shown) if "━" in line]
    assert "0 infra errors" in bars[0]
    assert "0/3" in bars[0]
    assert "1 infra errors" in bars[-1]
    assert "2/3" in bars[-1]


async def test_run_is_refused_while_another_process_writes_to_its_directory(tmp_path: Path) -> None:
    settings = RunSettings(suites={}, sandbox={}, request={}, seed=None)
    info = RunInfo(settings=settings, data="", concurrency=1, versions={})
    with open_results(tmp_path / "output", info):
        code, messages, _ = await evaluate(tmp_path, [RIGHT], *PLAIN)
    assert code == 1
    assert messages.endswith("another process writes to it.\n")


async def test_evaluation_fails_if_an_input_file_of_its_suite_is_missing(tmp_path: Path) -> None:
    drafts = [Draft(sample(), {"a.txt": "one"})]
    data = tmp_path / "data" / "synthetic"
    suite = write_suite(data, "synthetic", drafts, licence="none", source="a test")
    path = data / "files" / suite.samples[0].files[0].sha256
    path.unlink()
    async with (
        scripted_backend([], model=MODEL) as backend,
        running_proxy(backend, "memory", tmp_path / "state") as url,
    ):
        ended = await sandbox_eval(*arguments(tmp_path, url))
    assert ended.returncode == 1
    assert f"{path}: No such file or directory. Prepare the suite again." in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_error_names_the_line_of_a_malformed_result(tmp_path: Path) -> None:
    await evaluate(tmp_path, [RIGHT], *PLAIN)
    with (tmp_path / "output" / RESULTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"model": MODEL}) + "\n")
    ended = await sandbox_eval("report", tmp_path / "output")
    assert ended.returncode == 1
    assert f"{RESULTS_FILE}:2: mode: Field required" in ended.stderr


async def test_error_names_a_proxy_that_does_not_answer(tmp_path: Path) -> None:
    sums(tmp_path / "data")
    ended = await sandbox_eval(*arguments(tmp_path, "http://127.0.0.1:9", *PLAIN))
    assert ended.returncode == 1
    assert "sandbox-eval: http://127.0.0.1:9/v1 does not answer: Cannot connect" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("body", ["<html>", "[]", '{"data": [{}]}', '{"data": [{"id": null}]}'])
async def test_error_names_a_server_that_returns_no_list_of_models(
    body: str, tmp_path: Path
) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text=body)

    sums(tmp_path / "data")
    async with scripted_backend([], elsewhere=page) as server:
        ended = await sandbox_eval(*arguments(tmp_path, server.base_url, *PLAIN))
    assert ended.returncode == 1
    expected = f"sandbox-eval: {server.base_url}/v1/models does not return a list of models.\n"
    assert ended.stderr.endswith(expected)
