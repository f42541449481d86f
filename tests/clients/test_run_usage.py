"""Cost and resource use of a run, in the answer's usage and in the metrics."""

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.test_metrics import numbers
from tests.fakes.backend import by_history, scripted_backend
from tests.fakes.server import running_proxy

MESSAGE = {"role": "user", "content": "Work."}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [MESSAGE]},
    "/v1/responses": {"input": "Work."},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 100},
}


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }


SCRIPT = by_history(
    [
        {
            **tool_reply(
                call("execute_bash", command="python3 -c 'print(6 * 7)' > output/a.txt"),
                call("execute_bash", command="ls"),
            ),
            "usage": usage(100, 20, 0),
        },
        {**text_reply("42"), "usage": usage(160, 20, 120)},
    ]
)
EXPECTED = {
    "llm_calls": 2,
    "tool_calls": 2,
    "turns": 2,
    "context_tokens": 160,
    "env_tokens": 40,
    "prompt_tokens": 260,
    "completion_tokens": 40,
    "reasoning_tokens": 10,
    "cached_tokens": 120,
    "trajectory_tokens": 180,
    "env_permille": 222,
    "capabilities": {
        "external_resources": {"turns": 0, "permille": 0},
        "file_management": {"turns": 1, "permille": 500},
        "computation": {"turns": 1, "permille": 500},
    },
}
TIMES = {"wall_ms", "model_ms", "sandbox_ms", "own_ms", "cpu_ms", "peak_mem_bytes"}


def are_integers(usage_fields: dict[str, Any]) -> bool:
    """Return True if every value is an integer: LangChain adds up usages and warns about other
    types.
    """
    return all(
        are_integers(value) if isinstance(value, dict) else type(value) is int
        for value in usage_fields.values()
    )


def check_usage(usage_fields: dict[str, Any]) -> None:
    assert are_integers(usage_fields)
    assert {name: usage_fields.get(name) for name in EXPECTED} == EXPECTED
    assert all(usage_fields[name] >= 0 for name in TIMES)
    assert (
        usage_fields["wall_ms"]
        == usage_fields["model_ms"] + usage_fields["sandbox_ms"] + usage_fields["own_ms"]
    )


@pytest.mark.parametrize("path", BODIES)
async def test_usage_reports_cost_and_resources_of_a_run(path: str, tmp_path: Path) -> None:
    with anyio.fail_after(20):
        async with (
            scripted_backend(SCRIPT) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            asked = {"model": "fake-model", **BODIES[path]}
            check_usage((await http.post(path, json=asked)).json()["usage"]["sandbox"])


async def test_run_record_contains_the_usage(tmp_path: Path) -> None:
    with anyio.fail_after(20):
        async with (
            scripted_backend(SCRIPT) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            asked = {"model": "fake-model", **BODIES["/v1/chat/completions"]}
            headers = {"Idempotency-Key": "one", "X-Sandbox-Usage": "last_call"}
            answer = await http.post("/v1/chat/completions", json=asked, headers=headers)
            run = (await http.get(f"/v1/runs/{answer.headers['x-sandbox-run']}")).json()
    assert run["completion"]["usage"] == answer.json()["usage"]
    assert run["completion"]["usage"]["prompt_tokens"] == 160
    check_usage(run["completion"]["usage"]["sandbox"])


async def test_metrics_sum_the_usage_of_all_runs(tmp_path: Path) -> None:
    with anyio.fail_after(20):
        async with (
            scripted_backend(SCRIPT) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            before = numbers(await http.get("/metrics"))
            asked = {"model": "fake-model", **BODIES["/v1/chat/completions"]}
            one = (await http.post("/v1/chat/completions", json=asked)).json()
            two = (await http.post("/v1/chat/completions", json={**asked, "n": 2})).json()
            after = numbers(await http.get("/metrics"))
    ours = {name: value for name, value in before.items() if name.startswith("llm_sandbox_")}
    counted = {name: after[name] for name, value in ours.items() if after[name] != value}
    times = {name: counted.pop(name) for name in list(counted) if "run_seconds" in name}
    assert counted == {
        'llm_sandbox_runs_total{stop_reason="answered"}': 2,
        "llm_sandbox_turns_total": 6,
        "llm_sandbox_llm_calls_total": 6,
        "llm_sandbox_tool_calls_total": 6,
        "llm_sandbox_prompt_tokens_total": 780,
        "llm_sandbox_cached_tokens_total": 360,
        "llm_sandbox_env_tokens_total": 120,
        "llm_sandbox_completion_tokens_total": 120,
        "llm_sandbox_reasoning_tokens_total": 30,
        "llm_sandbox_trajectory_tokens_total": 540,
        'llm_sandbox_capability_turns_total{capability="file_management"}': 3,
        'llm_sandbox_capability_turns_total{capability="computation"}': 3,
    }
    spent = [each["usage"]["sandbox"] for each in (one, two)]
    for name in ("model", "sandbox", "own"):
        told_s = sum(each[f"{name}_ms"] for each in spent) / 1000
        counter = f'llm_sandbox_run_seconds_total{{spent="{name}"}}'
        assert times.get(counter, 0) == pytest.approx(told_s)
    assert before['llm_sandbox_capability_turns_total{capability="external_resources"}'] == 0


async def test_answer_without_tools_counts_as_one_turn(tmp_path: Path) -> None:
    reply = {**text_reply("42"), "usage": usage(100, 20, 0)}
    with anyio.fail_after(20):
        async with (
            scripted_backend([reply]) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            asked = {"model": "fake-model", "input": "Hello.", "tool_choice": "none"}
            usage_fields = (await http.post("/v1/responses", json=asked)).json()["usage"]["sandbox"]
    counts = ("turns", "llm_calls", "prompt_tokens", "trajectory_tokens", "env_permille")
    assert [usage_fields[name] for name in counts] == [1, 1, 100, 120, 0]
    assert usage_fields["wall_ms"] == usage_fields["model_ms"] + usage_fields["own_ms"]
