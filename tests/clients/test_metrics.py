"""The proxy's metrics in GET /metrics, parsed with the Prometheus client."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from proxy.keys import Key, Keyring
from proxy.metrics import MAX_LABEL_CHARS, MAX_MODELS, Metrics
from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Held, Item, Refusal, scripted_backend
from tests.fakes.server import Kind, running_proxy, single_key

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Work."}]}
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OLD_NAMES = {
    *("sandbox_runs_in_flight", "sandbox_runs_total", "sandbox_turns_total"),
    *("sandbox_llm_calls_total", "sandbox_tool_calls_total", "sandbox_prompt_tokens_total"),
    *("sandbox_cached_tokens_total", "sandbox_env_tokens_total"),
    *("sandbox_completion_tokens_total", "sandbox_reasoning_tokens_total"),
    *("sandbox_trajectory_tokens_total", "sandbox_run_seconds_total"),
    *("sandbox_capability_turns_total", "sandbox_rules_met_total", "sandbox_audit_failures_total"),
    *("sandbox_pool_sandboxes", "sandbox_pool_waiting", "sandbox_pool_hits_total"),
    *("sandbox_pool_misses_total", "sandbox_pool_refused_total", "sandbox_pool_replaced_total"),
    *("sandbox_pool_started_total", "sandbox_pool_failed_total"),
}


def families(answer: httpx.Response) -> list[Metric]:
    assert answer.status_code == 200
    if answer.headers["content-type"] == TEXT:
        return list(text_string_to_metric_families(answer.text))
    assert answer.headers["content-type"] == OPENMETRICS
    return list(openmetrics.text_string_to_metric_families(answer.text))


def sample_name(name: str, labels: Mapping[str, str]) -> str:
    """Return a sample's name with its labels, as written in the text format."""
    text = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{text}}}" if text else name


def numbers(answer: httpx.Response) -> dict[str, float]:
    """Return the value of each sample by its name and labels."""
    samples = [sample for family in families(answer) for sample in family.samples]
    found = {sample_name(sample.name, sample.labels): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


async def metrics_after(
    script: list[Item], tmp_path: Path, *bodies: Mapping[str, Any], **changes: Any
) -> httpx.Response:
    """Send the requests in order and return the metrics afterwards."""
    kind: Kind = changes.pop("kind", "memory")
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, kind, tmp_path, **changes) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        for body in bodies:
            await client.post("/v1/chat/completions", json={**BODY, **body})
        return await client.get("/metrics")


async def test_runs_are_counted_by_stop_reason(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [
        *[tool_reply(call("submit", answer="42")), text_reply("42"), Refusal(400, "no")],
        *[Held(text_reply("42"), release), Held(text_reply("42"), asyncio.Event())],
    ]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(timeout=20) as client,
    ):

        async def ask() -> None:
            await client.post(f"{url}/v1/chat/completions", json=BODY)

        with anyio.fail_after(20):
            for _ in range(3):
                await ask()
            staying = asyncio.create_task(ask())
            await backend.arrived(4)
            leaving = asyncio.create_task(ask())
            seen = await backend.arrived(5)
            during = numbers(await client.get(f"{url}/metrics"))
            leaving.cancel()
            release.set()
            await staying
            await seen.gone.wait()
            await asyncio.wait([leaving])
            in_flight = "llm_sandbox_runs_in_flight"
            while (after := numbers(await client.get(f"{url}/metrics")))[in_flight]:
                pass
    assert during[in_flight] == during["sandbox_runs_in_flight"] == 2
    ended = {name: value for name, value in after.items() if "runs_total" in name and value}
    expected = {"submitted": 1, "answered": 2, "failed": 1, "client_left": 1}
    assert ended == {
        f'{name}_runs_total{{stop_reason="{reason}"}}': count
        for name in ("llm_sandbox", "sandbox")
        for reason, count in expected.items()
    }
    assert sum(value for name, value in after.items() if "run_duration_seconds_count" in name) == 5


TURNS: list[Item] = [tool_reply(call("execute_bash", command="true")), text_reply("done")]


def histogram_samples(answer: httpx.Response, suffix: str) -> dict[str, float]:
    """Return the non-zero histogram samples whose names end with `suffix`."""
    return {
        name.removeprefix("llm_sandbox_"): value
        for name, value in numbers(answer).items()
        if name.partition("{")[0].endswith(suffix) and value
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_histograms_count_runs_and_turns_and_model_calls_and_commands(
    stream: bool, tmp_path: Path
) -> None:
    answer = await metrics_after(TURNS, tmp_path, {"stream": stream}, kind="bubblewrap")
    assert histogram_samples(answer, "_count") == {
        'run_duration_seconds_count{model="m",profile="default"}': 1,
        'turn_duration_seconds_count{model="m",profile="default"}': 2,
        'model_call_duration_seconds_count{model="m"}': 2,
        'command_duration_seconds_count{profile="default",tool="execute_bash"}': 1,
        'time_to_first_token_seconds_count{model="m"}': 2,
        "pool_queue_wait_seconds_count": 1,
        "pool_acquire_seconds_count": 1,
    }
    found = numbers(answer)
    for name, count in histogram_samples(answer, "_count").items():
        labels = name.partition("{")[2].removesuffix("}")
        family = f"llm_sandbox_{name.partition('_count')[0]}"
        release = f",{labels}" if labels else ""
        assert found[f'{family}_bucket{{le="+Inf"{release}}}'] == count
    sums = histogram_samples(answer, "_sum")
    run_s = sums['run_duration_seconds_sum{model="m",profile="default"}']
    turns_s = sums['turn_duration_seconds_sum{model="m",profile="default"}']
    command_s = sums['command_duration_seconds_sum{profile="default",tool="execute_bash"}']
    assert run_s >= turns_s >= sums['model_call_duration_seconds_sum{model="m"}']
    assert turns_s >= command_s >= sums["pool_acquire_seconds_sum"]


async def test_turns_of_each_choice_are_counted(tmp_path: Path) -> None:
    script = [text_reply("one"), text_reply("two"), text_reply("three")]
    counts = histogram_samples(await metrics_after([*script], tmp_path, {"n": 3}), "_count")
    assert counts == {
        'run_duration_seconds_count{model="m",profile="default"}': 1,
        'turn_duration_seconds_count{model="m",profile="default"}': 3,
        'model_call_duration_seconds_count{model="m"}': 3,
        'time_to_first_token_seconds_count{model="m"}': 3,
    }


async def test_unknown_tool_is_counted_as_other(tmp_path: Path) -> None:
    script: list[Item] = [tool_reply(call("made_up", a=1)), text_reply("done")]
    counts = histogram_samples(await metrics_after(script, tmp_path, {}), "_count")
    assert counts['command_duration_seconds_count{profile="default",tool="other"}'] == 1


def models_in(answer: httpx.Response) -> dict[str, float]:
    """Return the number of runs of each model."""
    return {
        sample.labels["model"]: sample.value
        for family in families(answer)
        for sample in family.samples
        if sample.name == "llm_sandbox_run_duration_seconds_count"
    }


async def test_number_of_model_labels_is_bounded(tmp_path: Path) -> None:
    bodies = [{"model": f"m{number}"} for number in range(MAX_MODELS + 2)]
    bodies += [{"model": "configured"}, {"model": "m0"}]
    script: list[Item] = [text_reply("done")] * len(bodies)
    answer = await metrics_after(script, tmp_path, *bodies, metrics=Metrics(["configured"]))
    assert models_in(answer) == {
        "m0": 2,
        **{f"m{number}": 1 for number in range(1, MAX_MODELS)},
        "other": 2,
        "configured": 1,
    }


@pytest.mark.parametrize("model", ["x" * (MAX_LABEL_CHARS + 1), "a\nb", "\ud800", ""])
async def test_invalid_model_name_is_counted_as_other(model: str, tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("done")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        body = json.dumps({**BODY, "model": model}).encode()
        status = (await client.post("/v1/chat/completions", content=body)).status_code
        answer = await client.get("/metrics")
    assert models_in(answer) == ({"other": 1} if status == 200 else {})


async def test_model_that_the_backend_does_not_know_is_counted_as_other(tmp_path: Path) -> None:
    script: list[Item] = [Refusal(404, "no such model"), text_reply("done")]
    answer = await metrics_after(script, tmp_path, {"model": "made up"}, {"model": "m"})
    assert models_in(answer) == {"other": 1, "m": 1}


@pytest.mark.parametrize("count", [-5, 10**400])
async def test_implausible_token_counts_of_the_backend_do_not_break_the_metrics(
    count: int, tmp_path: Path
) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": count, "total_tokens": count}
    answer = await metrics_after([{**text_reply("done"), "usage": usage}], tmp_path, {})
    found = numbers(answer)
    assert found['llm_sandbox_runs_total{stop_reason="answered"}'] == 1
    assert found["llm_sandbox_prompt_tokens_total"] >= 0


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text"])
async def test_deprecated_metric_names_have_the_same_values(accept: str, tmp_path: Path) -> None:
    async with (
        scripted_backend(TURNS) as backend,
        running_proxy(backend, "bubblewrap", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=20, headers={"accept": accept}) as client,
    ):
        await client.post("/v1/chat/completions", json=BODY)
        answer = await client.get("/metrics")
    deprecated = [each for each in families(answer) if each.name.startswith("sandbox_")]
    told_in = {
        f"{each.name}_total" if each.type == "counter" else each.name: each.documentation
        for each in deprecated
    }
    assert told_in == {name: f"Deprecated: use llm_{name}." for name in OLD_NAMES}
    found = numbers(answer)
    samples = [
        (sample, sample_name(sample.name, sample.labels))
        for f in deprecated
        for sample in f.samples
    ]
    for sample, name in samples:
        assert sample.value == found["llm_" + name.replace('"lent"', '"in_use"')]
    assert found["sandbox_turns_total"] == 2


async def test_pool_gauges_count_the_sandbox_of_a_run_until_the_run_ends(tmp_path: Path) -> None:
    release = asyncio.Event()
    script: list[Item] = [TURNS[0], Held(text_reply("done"), release)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "bubblewrap", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        request = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
        await backend.arrived(2)
        during = numbers(await client.get("/metrics"))
        release.set()
        await request
        after = numbers(await client.get("/metrics"))
    assert during['llm_sandbox_pool_sandboxes{state="in_use"}'] == 1
    assert during['sandbox_pool_sandboxes{state="lent"}'] == 1
    assert after["llm_sandbox_pool_started_total"] == 1
    assert after["llm_sandbox_pool_misses_total"] == 1
    assert after['llm_sandbox_pool_sandboxes{state="in_use"}'] == 0
    assert after["llm_sandbox_pool_waiting"] == 0


async def test_metrics_need_the_key(tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=single_key("sk-ours")) as url,
        httpx.AsyncClient() as client,
    ):
        assert (await client.get(f"{url}/metrics")).status_code == 401
        assert (await client.get(f"{url}/v1/capabilities")).status_code == 401
        assert (await client.get(f"{url}/health")).status_code == 200


@pytest.mark.parametrize(
    ("operator", "sent", "status"),
    [
        (None, "sk-a", 403),
        (None, "sk-wrong", 401),
        ("sk-operator", "sk-a", 403),
        ("sk-operator", "sk-operator", 200),
    ],
)
async def test_metrics_need_the_operator_key_if_the_server_has_several_keys(
    operator: str | None, sent: str, status: int, tmp_path: Path
) -> None:
    keyring = Keyring([("sk-a", Key("a")), ("sk-b", Key("b"))], operator_secret=operator)
    headers = {"authorization": f"Bearer {sent}"}
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=keyring) as url,
        httpx.AsyncClient(base_url=url, headers=headers) as client,
    ):
        answer = await client.get("/metrics")
        bodies = await client.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == status
    if status == 403:
        assert "server.operator_key_env" in answer.json()["error"]["message"]
    if sent == operator:
        assert bodies.status_code == 401
