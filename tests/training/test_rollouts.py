"""Rollouts of tasks through a proxy, and the rows that TRL gets from them."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from policies.profile import AgentSettings, Profile
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.clients.chat_http import http_client
from tests.fakes.backend import Held, Item, Refusal, ScriptedBackend, scripted_backend
from tests.fakes.server import running_proxy
from tests.training.made_rows import made_row
from training.hardcoded import is_hardcoded
from training.rewards import Attempt, Reward, reward
from training.rollouts import INFRA_ERROR, Rollout, RolloutClient, RolloutError, Segment
from training.rows import TaskRow
from training.trl import prompts_of, reward_of_rollout, rollout_func, trainer_columns

TIMEOUT_S = 30
ALLOWED = Profiles.only(Profile(agent=AgentSettings(capture_tokens=True)))
READ = tool_reply(call("execute_bash", command="cat documents/port.txt"))
RIGHT, WRONG = text_reply("1874"), text_reply("1900")
SUBMIT = tool_reply(call("submit", answer="1874"))


def task(id: str) -> TaskRow:
    file = ("port.txt", "Dredged in 1874.\n")
    return made_row("1874", "number", id, f"When was it dredged ({id})?", file)


def exact(row: TaskRow, attempt: Attempt) -> Reward:
    if attempt.sandbox_lost:
        return Reward(None, "sandbox lost")
    return Reward(float(attempt.answer == row.ground_truth), "function")


@asynccontextmanager
async def proxied(
    script: Any, state_dir: Path, **options: Any
) -> AsyncIterator[tuple[ScriptedBackend, str, RolloutClient]]:
    """Yield a backend, the URL of a proxy before it, and a client of the proxy."""
    async with (
        scripted_backend(script, has_tokens=True) as backend,
        running_proxy(backend, "memory", state_dir, profiles=ALLOWED) as url,
    ):
        client = RolloutClient(f"{url}/v1", backend.model, **{"score": exact, **options})
        yield backend, url, client


async def test_rollout_has_tokens_reward_and_counts(tmp_path: Path) -> None:
    async with (
        proxied([READ, RIGHT], tmp_path, parameters={"temperature": 1.0}) as (backend, url, client),
        http_client(url) as http,
    ):
        (rollout,) = await client.run([task("port-1")])
        stored = (await http.get(f"/v1/runs/{rollout.trajectory_id}/trajectory")).json()
    (segment,) = rollout.segments
    assert (rollout.task_id, rollout.outcome, rollout.reward) == ("port-1", "answered", 1.0)
    assert (rollout.answer, rollout.turns, rollout.tool_calls) == ("1874", 2, 1)
    assert 0 < segment.sampled_count < len(segment.response_ids)
    assert backend.requests[0].body["temperature"] == 1.0
    assert "Dredged in 1874." in backend.requests[1].body["messages"][-1]["content"]
    assert (stored["task_id"], stored["group_id"]) == ("port-1", rollout.group_id)
    assert [each["value"] for each in stored["rewards"]] == [1.0]


async def test_model_call_for_the_final_answer_of_a_rollout_does_not_count_as_a_turn(
    tmp_path: Path,
) -> None:
    sandbox = {"limits": {"max_turns": 1}}
    async with proxied([READ, RIGHT], tmp_path, sandbox=sandbox) as (backend, _, client):
        (rollout,) = await client.run([task("port-1")])
    assert (rollout.outcome, rollout.answer) == ("max_turns", "1874")
    assert (len(backend.requests), rollout.turns) == (2, 1)


async def test_documents_of_a_task_are_in_the_prompt_and_not_in_files_if_placement_is_prompt(
    tmp_path: Path,
) -> None:
    look = tool_reply(call("execute_bash", command="find . -name port.txt"))
    async with proxied([look, RIGHT], tmp_path, placement="prompt") as (backend, _, client):
        await client.run([task("port-1")])
    _, user, _, observation = backend.requests[1].body["messages"]
    text = str(user["content"])
    assert "BEGIN DOCUMENT" in text
    assert "Dredged in 1874." in text
    assert "port.txt" not in observation["content"]


async def test_rollouts_keep_the_order_of_the_rows_and_share_a_group_per_task(
    tmp_path: Path,
) -> None:
    def reply(body: dict[str, Any]) -> Item:
        return RIGHT if "(a)" in str(body["messages"]) else WRONG

    async with proxied(reply, tmp_path, concurrency=4) as (_, _, client):
        rollouts = await client.run([task("a"), task("b"), task("a"), task("b")])
    assert [each.task_id for each in rollouts] == ["a", "b", "a", "b"]
    assert [each.reward for each in rollouts] == [1.0, 0.0, 1.0, 0.0]
    assert rollouts[0].group_id == rollouts[2].group_id != rollouts[1].group_id


async def test_rollout_that_fails_at_the_backend_is_repeated(tmp_path: Path) -> None:
    script = [*[Refusal(500)] * 3, RIGHT]  # the proxy itself asks three times
    async with proxied(script, tmp_path, retry_delays_s=[0.0]) as (_, _, client):
        (rollout,) = await client.run([task("port-1")])
    assert (rollout.outcome, rollout.reward) == ("answered", 1.0)


async def test_rollout_that_fails_each_time_has_no_reward(tmp_path: Path) -> None:
    script = [Refusal(500)] * 6
    async with proxied(script, tmp_path, retry_delays_s=[0.0]) as (_, _, client):
        (rollout,) = await client.run([task("port-1")])
    assert (rollout.outcome, rollout.reward) == (INFRA_ERROR, None)
    assert (rollout.trajectory_id, rollout.segments) == (None, ())


async def test_rollout_waits_for_the_end_of_a_pause(tmp_path: Path) -> None:
    async with (
        proxied([RIGHT] * 2, tmp_path, retry_delays_s=[]) as (_, url, client),
        http_client(url) as http,
    ):
        runs_at_work = await client.pause(timeout_s=1)
        rollouts = await client.run([task("port-1")])
        await client.pause()
        paused = (await http.get("/v1/pause")).json()
        await client.resume()
        rollouts += await client.run([task("port-2")])
    assert runs_at_work == 0
    assert [each.outcome for each in rollouts] == ["answered"] * 2
    assert (paused["paused"], 1 < paused["ends_in_s"] <= 600) == (True, True)


async def test_pause_with_drain_waits_for_runs_in_progress(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with (
        proxied([Held(RIGHT, release), RIGHT], tmp_path, retry_delays_s=[]) as (
            backend,
            url,
            client,
        ),
        http_client(url) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            running = asyncio.create_task(client.run([task("port-1")]))
            await backend.arrived(1)
            pausing = asyncio.create_task(client.pause(drain=True))
            while not (await http.get("/v1/pause")).json()["paused"]:
                pass
            is_waiting = not pausing.done()
            release.set()
            runs_at_work = await pausing
            await client.resume("step-2")
            rollouts = [*await running, *await client.run([task("port-2")])]
        found = [
            (await http.get(f"/v1/trajectories/{each.trajectory_id}")).json() for each in rollouts
        ]
    assert (is_waiting, runs_at_work) == (True, 0)
    versions = [each["model_calls"][0]["weight_version"] for each in found]
    assert versions == [None, "step-2"]


async def test_drain_that_outlasts_the_pause_raises_rollout_error(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with proxied([Held(RIGHT, release)], tmp_path, retry_delays_s=[]) as (backend, _, client):
        with anyio.fail_after(TIMEOUT_S):
            running = asyncio.create_task(client.run([task("port-1")]))
            await backend.arrived(1)
            with pytest.raises(
                RolloutError, match=r"^The pause ended while runs were still in progress \(1\)\.$"
            ):
                await client.pause(timeout_s=0.01, drain=True)
            release.set()
            await running


async def test_profile_that_does_not_allow_token_capture_raises_rollout_error(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        client = RolloutClient(f"{url}/v1", backend.model, score=exact)
        with pytest.raises(RolloutError, match=r"403.*does not allow sandbox\.capture: tokens"):
            await client.run([task("a"), task("b")])


async def test_request_without_a_sandbox_raises_rollout_error(tmp_path: Path) -> None:
    async with proxied([], tmp_path) as (backend, url, _):
        client = RolloutClient(f"{url}/v1", f"{backend.model}:plain", score=exact)
        with pytest.raises(RolloutError, match=r"400.*needs a sandbox"):
            await client.run([task("a")])


async def test_backend_without_token_ids_raises_rollout_error(tmp_path: Path) -> None:
    async with (
        scripted_backend([RIGHT]) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=ALLOWED) as url,
    ):
        client = RolloutClient(f"{url}/v1", backend.model, score=exact)
        with pytest.raises(RolloutError, match="The backend sent no token ids"):
            await client.run([task("a")])


async def test_rollout_that_captures_messages_does_not_require_token_ids(tmp_path: Path) -> None:
    async with (
        scripted_backend([RIGHT]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        sandbox = {"capture": "messages"}
        client = RolloutClient(f"{url}/v1", backend.model, score=exact, sandbox=sandbox)
        (rollout,) = await client.run([task("a")])
    assert (rollout.reward, rollout.segments) == (1.0, ())


async def test_builtin_reward_requires_a_submitted_answer(tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="the extra `training` is not installed")
    script = [RIGHT, SUBMIT]
    async with proxied(script, tmp_path, score=reward, concurrency=1) as (_, _, client):
        rollouts = await client.run([task("a"), task("b")])
    assert [(each.outcome, each.reward) for each in rollouts] == [
        ("answered", 0.0),
        ("submitted", 1.0),
    ]


async def test_hardcoded_answer_is_marked_in_the_rollout_the_reward_and_the_trainers_log(
    tmp_path: Path,
) -> None:
    def score(row: TaskRow, attempt: Attempt) -> Reward:
        return Reward(1.0, "function", is_hardcoded(attempt.commands))

    constant = tool_reply(call("execute_bash", command="echo 1874 > answer.txt"))
    rows = [task("read"), task("constant")]
    rollouts = list[Rollout]()
    trainer = SimpleNamespace(
        _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        processing_class=SimpleNamespace(eos_token_id=9),
    )
    script = [READ, SUBMIT, constant, SUBMIT]
    async with (
        proxied(script, tmp_path, score=score, concurrency=1) as (_, url, client),
        http_client(url) as http,
    ):
        roll_out = rollout_func(client, rows, rollouts.extend)
        await anyio.to_thread.run_sync(roll_out, [row.id for row in rows], trainer)
        stored = [
            (await http.get(f"/v1/runs/{each.trajectory_id}/trajectory")).json()
            for each in rollouts
        ]
    assert [each.is_hardcoded for each in rollouts] == [False, True]
    assert [[given["reason"] for given in each["rewards"]] for each in stored] == [
        ["function"],
        ["function; hardcoded"],
    ]
    assert trainer._metrics["train"]["rollouts/hardcoded_rate"] == [0.5]


async def test_malformed_name_of_a_reward_function_raises_rollout_error(tmp_path: Path) -> None:
    score = partial(reward, function="no colon")
    async with proxied([RIGHT], tmp_path, score=score, retry_delays_s=[]) as (_, _, client):
        with pytest.raises(RolloutError, match=r"^no colon: not of the form package"):
            await client.run([task("a")])


def test_trainer_row_of_a_rollout_is_its_segment_with_the_most_sampled_tokens() -> None:
    short = Segment([1], [2], [1], [-0.5])
    long = Segment([3], [4, 5, 6], [1, 0, 1], [-0.25, 0.0, -0.75])
    split = Rollout("a", "g", "answered", 0.5, "run_1", segments=(short, long))
    lost = Rollout("a", "g", INFRA_ERROR, None)
    assert trainer_columns([split, lost], filler_token=9) == {
        "prompt_ids": [[3], [9]],
        "completion_ids": [[4, 5, 6], [9]],
        "env_mask": [[1, 0, 1], [0]],
        "logprobs": [[-0.25, 0.0, -0.75], [0.0]],
        "rollout_reward": [0.5, None],
        "trajectory_id": ["run_1", None],
    }
    assert reward_of_rollout([], [], [0.5, None]) == [0.5, None]
    assert prompts_of([task("a"), task("b")]) == [{"prompt": "a"}, {"prompt": "b"}]
