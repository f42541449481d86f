"""Environments for trainers that run the agent loop: the proxy runs their tool calls."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from bench.servers import free_port
from policies.limits import Limits
from policies.profile import AgentSettings, Profile
from proxy.profiles import Profiles
from tests.clients.chat_http import http_client
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy
from tests.training.test_rollouts import exact, task
from training.rollouts import INFRA_ERROR, Rollout, RolloutClient, RolloutError
from training.trl import (
    RUN_ENDED_TEXT,
    SandboxEnvironment,
    SandboxEnvironments,
    reward_of_environment,
)
from training.turn_server import TrainerRollout

PROFILE = Profile(
    agent=AgentSettings(capture_tokens=True), limits=Limits(max_turns=4, final_question=False)
)
SPOILT = Rollout("port-1", "group", INFRA_ERROR, None)
TIMEOUT_S = 30
READ = "cat documents/port.txt"


@asynccontextmanager
async def environments(
    state_dir: Path, *, is_listed: bool = True
) -> AsyncIterator[tuple[httpx.AsyncClient, SandboxEnvironments]]:
    """Yield a client of a proxy, and environments whose tool calls the proxy runs."""
    port = free_port()
    allowed = (f"http://127.0.0.1:{port}/rollouts",) if is_listed else ()
    async with (
        scripted_backend([]) as backend,
        running_proxy(
            backend, "memory", state_dir, profiles=Profiles.only(PROFILE), upstreams=allowed
        ) as url,
        http_client(url) as http,
    ):
        client = RolloutClient(f"{url}/v1", backend.model, score=exact)
        made = SandboxEnvironments(client, [task("port-1"), task("port-2")], port=port)
        await anyio.to_thread.run_sync(made.__enter__)
        try:
            yield http, made
        finally:
            await anyio.to_thread.run_sync(made.__exit__, None, None, None)
    assert backend.requests == []


async def started(made: SandboxEnvironments, task_id: str = "port-1") -> SandboxEnvironment:
    environment = made()
    await in_thread(environment.reset, task_id=task_id)
    return environment


async def in_thread(method: Any, *arguments: Any, **fields: Any) -> Any:
    return await anyio.to_thread.run_sync(lambda: method(*arguments, **fields))


async def rewards(completions: list[Any], *ended: SandboxEnvironment) -> list[float | None]:
    return list(await in_thread(reward_of_environment, [], completions, ended))


async def stored(http: httpx.AsyncClient) -> dict[str, Any]:
    """Return the newest trajectory."""
    newest = (await http.get("/v1/trajectories", params={"limit": 1})).json()["data"][0]
    return dict((await http.get(f"/v1/runs/{newest['id']}/trajectory")).json())


async def test_submitted_answer_is_rewarded(tmp_path: Path) -> None:
    async with environments(tmp_path) as (http, made):
        environment = made()
        prompt = await in_thread(environment.reset, prompt=[], task_id="port-1")
        observation = await in_thread(environment.execute_bash, READ)
        await in_thread(environment.submit, answer="1874")
        after = await in_thread(environment.execute_bash, READ)
        (reward,) = await rewards([[{"role": "assistant", "content": "Done."}]], environment)
        trajectory = await stored(http)
    assert "When was it dredged (port-1)?" in prompt
    assert "Dredged in 1874." in observation
    assert after == RUN_ENDED_TEXT
    assert reward == 1.0
    assert (trajectory["outcome"], trajectory["task_id"]) == ("submitted", "port-1")
    assert [call["name"] for call in trajectory["tool_calls"]] == ["execute_bash", "submit"]
    assert [each["value"] for each in trajectory["rewards"]] == [1.0]


async def test_last_text_is_the_answer_of_a_run_without_submit(tmp_path: Path) -> None:
    async with environments(tmp_path) as (http, made):
        first, second = await started(made), await started(made, "port-2")
        await in_thread(first.execute_bash, READ)
        texts = [[{"role": "assistant", "content": text}] for text in ("1874", "1900")]
        found = await rewards(texts, first, second)
        trajectories = (await http.get("/v1/trajectories")).json()["data"]
    assert found == [1.0, 0.0]
    assert len(trajectories) == 2


async def test_run_without_any_text_has_reward_0(tmp_path: Path) -> None:
    async with environments(tmp_path) as (_, made):
        environment = await started(made)
        call = {"type": "function", "function": {"name": "execute_bash", "arguments": {}}}
        found = await rewards([[{"role": "assistant", "tool_calls": [call]}]], environment)
    assert found == [0.0]


async def test_training_environment_keeps_files_between_tool_calls_until_its_reset(
    tmp_path: Path,
) -> None:
    async with environments(tmp_path) as (_, made):
        environment = await started(made)
        await in_thread(
            environment.str_replace_editor, "create", "/testbed/note.txt", file_text="north"
        )
        assert "north" in await in_thread(environment.execute_bash, "cat /testbed/note.txt")
        await in_thread(environment.reset, task_id="port-2")
        assert "north" not in await in_thread(environment.execute_bash, "cat /testbed/note.txt")


async def test_training_run_that_reaches_max_turns_ends_with_reward_0(tmp_path: Path) -> None:
    async with environments(tmp_path) as (http, made):
        environment = await started(made)
        seen = [await in_thread(environment.execute_bash, "true") for _ in range(6)]
        found = await rewards([[{"role": "assistant", "content": "1874"}]], environment)
        trajectory = await stored(http)
    assert seen[-1] == RUN_ENDED_TEXT
    assert trajectory["outcome"] == "max_turns"
    assert found == [0.0]


async def test_training_without_a_reachable_proxy_raises_rollout_error(tmp_path: Path) -> None:
    client = RolloutClient(f"http://127.0.0.1:{free_port()}/v1", "none", score=exact)
    with SandboxEnvironments(client, [task("port-1")], port=free_port()) as made:
        environment = await started(made)
        assert await in_thread(environment.execute_bash, READ) == RUN_ENDED_TEXT
        with pytest.raises(RolloutError, match="All 1 rollouts"):
            await rewards([[]], environment)
        with pytest.raises(RolloutError, match="began no run"):
            await in_thread(made.prompts)


async def test_turn_server_that_the_proxy_does_not_allow_as_upstream_raises_rollout_error(
    tmp_path: Path,
) -> None:
    async with environments(tmp_path, is_listed=False) as (_, made):
        with pytest.raises(RolloutError, match=r"sandbox\.upstream"):
            await started(made)


async def test_prompts_begin_with_the_proxys_system_message(tmp_path: Path) -> None:
    async with environments(tmp_path) as (_, made):
        first, second = await in_thread(made.prompts)
    assert [first["task_id"], second["task_id"]] == ["port-1", "port-2"]
    system, user = first["prompt"]
    assert system["role"] == "system"
    assert "execute_bash" in system["content"]
    assert user == {"role": "user", "content": ""}


def test_every_public_method_of_the_environment_is_a_tool_with_documented_arguments() -> None:
    found = dict(inspect.getmembers(SandboxEnvironment, inspect.isfunction))
    tools = {name for name in found if not name.startswith("_")} - {"reset"}
    assert tools == {"execute_bash", "str_replace_editor", "submit"}
    for name in tools:
        names = list(inspect.signature(found[name]).parameters)[1:]
        assert all(f"{each}: " in (found[name].__doc__ or "") for each in names)


async def test_tool_call_in_the_text_of_the_last_turn_is_run_only_once(tmp_path: Path) -> None:
    text = '<tool_call>{"name": "execute_bash", "arguments": {"command": "date"}}</tool_call>'
    async with environments(tmp_path) as (http, made):
        environment = await started(made)
        found = await rewards([[{"role": "assistant", "content": text}]], environment)
        trajectory = await stored(http)
    assert found == [0.0]
    assert len(trajectory["tool_calls"]) == 1


async def test_repeated_model_call_gets_the_same_turn() -> None:
    ends = asyncio.Event()

    async def run() -> Rollout:
        await ends.wait()
        return SPOILT

    rollout = TrainerRollout(run(), SPOILT)
    first = [{"role": "user", "content": "When?"}]
    with anyio.fail_after(TIMEOUT_S):
        answered = asyncio.create_task(rollout.turn_after(first))
        assert await in_thread(rollout.prompt) == first
        calling = asyncio.create_task(in_thread(rollout.call_tool, "execute_bash", {}))
        turn = await answered
        assert await rollout.turn_after(list(first)) == turn
        second = [*first, turn, {"role": "tool", "content": "In 1874."}]
        waiting = asyncio.create_task(rollout.turn_after(second))
        assert await calling == "In 1874."
        ending = asyncio.create_task(rollout.end("1874"))
        assert (await waiting)["content"] == "1874"
        ends.set()
        assert await ending == SPOILT


async def test_cancelled_rollout_yields_no_observation_and_no_reward(tmp_path: Path) -> None:
    async with environments(tmp_path) as (_, made):
        environment = await started(made)
        rollout = environment.rollout
        assert rollout
        await in_thread(environment.reset, task_id="port-2")
        assert await in_thread(rollout.call_tool, "execute_bash", {"command": READ}) is None
        assert "Dredged" in await in_thread(environment.execute_bash, READ)
        with pytest.raises(RolloutError, match="All 1 rollouts"):
            await in_thread(made.end, [rollout], [""])


async def test_rollouts_of_a_task_form_one_group_per_batch(tmp_path: Path) -> None:
    async with environments(tmp_path) as (http, made):
        both = [await started(made), await started(made)]
        await rewards([[], []], *both)
        await in_thread(both[0].reset, task_id="port-1")
        await rewards([[]], both[0])
        listed = (await http.get("/v1/trajectories")).json()["data"]
        stored = [(await http.get(f"/v1/trajectories/{each['id']}")).json() for each in listed]
    third, *others = [each["group_id"] for each in stored]
    assert others[0] == others[1] != third


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{", (400, "The body is not a JSON object with messages.")),
        (b"[]", (400, "The body is not a JSON object with messages.")),
        (b'{"messages": [], "stream": true}', (400, "This server does not stream.")),
        (b'{"messages": []}', (404, "There is no such rollout.")),
    ],
)
async def test_turn_server_refuses_malformed_requests_and_unknown_rollouts(
    body: bytes, error: tuple[int, str], tmp_path: Path
) -> None:
    async with environments(tmp_path) as (http, made):
        environment = await started(made)
        answered = await http.post(f"{made.url}/unknown/v1/chat/completions", content=body)
        assert "Dredged" in await in_thread(environment.execute_bash, READ)
    assert (answered.status_code, answered.json()["error"]["message"]) == error


async def test_turn_server_with_an_invalid_api_key_does_not_start() -> None:
    client = RolloutClient("http://127.0.0.1:1/v1", "none", api_key="schlüssel\u2028")
    with pytest.raises(UnicodeEncodeError):
        await in_thread(SandboxEnvironments(client, [], port=free_port()).__enter__)
