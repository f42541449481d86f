"""GET /v1/trajectories/export, and the labels in a request's `metadata`."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from policies.profile import AgentSettings, Profile
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.clients.chat_http import PATH, http_client, post_chat
from tests.fakes.backend import Held, Item, Refusal, scripted_backend
from tests.fakes.server import EachKey, running_proxy
from tests.fakes.tokens import logprob_of, prompt_text, text_of_tokens
from tests.processes import kill_sandboxes

ALLOWED = Profiles.only(Profile(agent=AgentSettings(capture_tokens=True)))
CAPTURE: dict[str, Any] = {"sandbox": {"capture": "tokens"}}
STEP = tool_reply(call("execute_bash", command="echo 42"))
ANSWER = text_reply("It is 42.")
FORMATS = ("rows", "verl", "openenv", "sft", "native")


async def exported(http: httpx.AsyncClient, format: str, **params: str) -> list[dict[str, Any]]:
    """Return the objects of an export."""
    found = await http.get("/v1/trajectories/export", params={"format": format, **params})
    assert found.status_code == 200, found.text
    assert found.headers["content-type"].startswith("application/jsonl")
    return [json.loads(line) for line in found.text.splitlines()]


async def reward(http: httpx.AsyncClient, run_id: str, value: float | None) -> None:
    body = {"value": value, "source": "grader"}
    (await http.post(f"/v1/trajectories/{run_id}/reward", json=body)).raise_for_status()


async def test_run_is_one_line_of_an_export_in_each_format(tmp_path: Path) -> None:
    async with (
        scripted_backend([STEP, ANSWER], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=ALLOWED) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, metadata={"group_id": "g1", "task_id": "t1"}, **CAPTURE)
        run_id = answered.headers["x-sandbox-run"]
        await reward(http, run_id, 0.25)
        await reward(http, run_id, 1.0)
        row, verl, openenv, sft, native = [
            line for format in FORMATS for line in await exported(http, format)
        ]
        found = (await http.get(f"/v1/runs/{run_id}/trajectory")).json()
        prompts = [prompt_text(request.body) for request in backend.requests]
    labels = {
        "trajectory_id": run_id,
        "group_id": "g1",
        "task_id": "t1",
        "session_id": None,
        "outcome": "answered",
    }
    (segment,) = found["token_segments"]
    position = {"segment": 0, "segments": 1}
    assert row == {**labels, **position, "model_calls": 2, **segment, "reward": 1.0}
    assert verl == {
        "prompt_ids": segment["prompt_ids"],
        "response_ids": segment["response_ids"],
        "response_mask": segment["response_mask"],
        "response_logprobs": segment["logprobs"],
        "reward_score": 1.0,
        "num_turns": 4,
        "metrics": {},
        "extra_fields": {**labels, **position},
    }
    assert sft == {
        **labels,
        "messages": [*backend.requests[1].body["messages"], found["messages"][-1]],
        "tools": backend.requests[1].body["tools"],
        "reward": 1.0,
    }
    assert native == found
    assert (native["group_id"], native["task_id"]) == ("g1", "t1")
    trace = openenv.pop("trace")
    assert openenv == {**labels, "reward": 1.0}
    assert trace["schema_version"] == 1
    assert [text_of_tokens(turn["prompt_token_ids"]) for turn in trace["turns"]] == prompts
    assert [turn["node_id"] for turn in trace["turns"]] == [f"{run_id}:0", f"{run_id}:1"]
    for turn in trace["turns"]:
        ids = turn["completion_token_ids"]
        assert turn["per_token_logps"] == [logprob_of(each) for each in ids]
        assert turn["loss_mask"] == [0] * len(turn["prompt_token_ids"]) + [1] * len(ids)
        assert turn["response"]["role"] == "assistant"


async def test_sft_line_of_a_submitted_run_ends_with_the_reply_that_calls_submit(
    tmp_path: Path,
) -> None:
    submit = tool_reply(call("submit", answer="It is 42."))
    async with (
        scripted_backend([STEP, submit]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        await post_chat(http, sandbox={"capture": "messages"})
        (line,) = await exported(http, "sft")
    assert line["outcome"] == "submitted"
    assert line["messages"][:-1] == backend.requests[1].body["messages"]
    assert line["messages"][-1]["tool_calls"][0]["function"]["name"] == "submit"


async def test_each_token_segment_is_an_exported_row_with_the_same_reward(tmp_path: Path) -> None:
    async with (
        scripted_backend(
            [{**STEP, "reasoning": "I run echo."}, ANSWER], has_tokens=True
        ) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=ALLOWED) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, **CAPTURE)
        await reward(http, answered.headers["x-sandbox-run"], 0.5)
        rows = await exported(http, "rows")
    assert [(row["segment"], row["segments"], row["reward"]) for row in rows] == [
        (0, 2, 0.5),
        (1, 2, 0.5),
    ]


async def test_export_and_list_are_filtered_by_group_and_task(tmp_path: Path) -> None:
    async with (
        scripted_backend([ANSWER] * 4, has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=ALLOWED) as url,
        http_client(url) as http,
    ):
        ids = []
        for group, task in (("a", "1"), ("a", "2"), ("b", "1")):
            labels = {"group_id": group, "task_id": task}
            ids.append((await post_chat(http, metadata=labels, **CAPTURE)).headers["x-sandbox-run"])
            # Waits until it is stored. Of two at a time either can be the first one.
            await http.get(f"/v1/runs/{ids[-1]}/trajectory")
        await post_chat(http, **CAPTURE)
        in_group = await exported(http, "rows", group_id="a")
        of_task = await exported(http, "rows", task_id="1")
        both = await exported(http, "rows", group_id="a", task_id="1")
        everything = await exported(http, "rows")
        listed = (await http.get("/v1/trajectories", params={"group_id": "a"})).json()["data"]
    assert [row["trajectory_id"] for row in in_group] == ids[:2]
    assert [row["trajectory_id"] for row in of_task] == [ids[0], ids[2]]
    assert [row["trajectory_id"] for row in both] == ids[:1]
    assert [row["group_id"] for row in everything] == ["a", "a", "b", None]
    assert [(each["id"], each["group_id"], each["task_id"]) for each in listed] == [
        (ids[1], "a", "2"),
        (ids[0], "a", "1"),
    ]


async def test_exported_run_whose_sandbox_was_lost_has_no_reward(tmp_path: Path) -> None:
    script: list[Item] = [STEP, STEP, ANSWER]

    def reply(body: dict[str, Any]) -> Item:
        said = sum(message["role"] == "assistant" for message in body["messages"])
        if said == 1:
            kill_sandboxes(os.getpid())
        return script[said]

    async with (
        scripted_backend(reply, has_tokens=True) as backend,
        running_proxy(backend, "bubblewrap", tmp_path, profiles=ALLOWED) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, **CAPTURE)
        await reward(http, answered.headers["x-sandbox-run"], 0.0)
        (row,) = await exported(http, "rows")
        (native,) = await exported(http, "native")
        assert await exported(http, "sft") == []
    assert native["result"]["sandbox_losses"] == 1
    assert (row["outcome"], row["reward"]) == ("infra_error", None)


async def test_exported_failed_run_has_no_reward(tmp_path: Path) -> None:
    async with (
        scripted_backend([STEP, *[Refusal(400, "bad request")] * 5], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=ALLOWED) as url,
        http_client(url) as http,
    ):
        await post_chat(http, **CAPTURE)
        run_id = (await http.get("/v1/trajectories")).json()["data"][0]["id"]
        await reward(http, run_id, 0.0)
        (row,) = await exported(http, "rows")
    assert (row["outcome"], row["reward"]) == ("infra_error", None)


async def test_export_leaves_out_running_and_deleted_trajectories(tmp_path: Path) -> None:
    may_end = asyncio.Event()
    async with (
        scripted_backend([ANSWER, ANSWER, Held(ANSWER, until=may_end)], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=ALLOWED) as url,
        http_client(url) as http,
    ):
        first, second = [(await post_chat(http, **CAPTURE)).headers["x-sandbox-run"] for _ in "12"]
        await http.delete(f"/v1/runs/{second}/trajectory")
        running = asyncio.create_task(post_chat(http, **CAPTURE))
        await backend.arrived(3)
        rows = await exported(http, "rows")
        may_end.set()
        await running
        later = await exported(http, "rows")
    assert [row["trajectory_id"] for row in rows] == [first]
    assert len(later) == 2


async def test_run_without_captured_tokens_is_exported_only_in_the_sft_and_native_formats(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        await post_chat(http, sandbox={"capture": "messages"})
        sizes = [len(await exported(http, format)) for format in FORMATS]
    assert sizes == [0, 0, 0, 1, 1]


async def test_export_has_no_trajectory_of_another_key(tmp_path: Path) -> None:
    other = {"Authorization": "Bearer other"}
    async with (
        scripted_backend([ANSWER], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=ALLOWED, keyring=EachKey()) as url,
        http_client(url) as http,
    ):
        await post_chat(http, **CAPTURE)
        params = {"format": "rows"}
        theirs = await http.get("/v1/trajectories/export", params=params, headers=other)
    assert (theirs.status_code, theirs.text) == (200, "")


@pytest.mark.parametrize("query", ["", "?format=parquet"])
async def test_export_in_an_unknown_format_is_refused(tmp_path: Path, query: str) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        refused = await http.get(f"/v1/trajectories/export{query}")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "format"


async def test_invalid_trajectory_labels_are_ignored(tmp_path: Path) -> None:
    bodies: list[Any] = [{"group_id": 5}, {"group_id": "x" * 513}, {"group_id": ""}]
    async with (
        scripted_backend([ANSWER] * 3, has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=ALLOWED) as url,
        http_client(url) as http,
    ):
        for metadata in bodies:
            await http.post(
                PATH,
                json={
                    "metadata": metadata,
                    "model": "m",
                    **CAPTURE,
                    "messages": [{"role": "user", "content": "?"}],
                },
            )
        rows = await exported(http, "rows")
    assert [row["group_id"] for row in rows] == [None] * 3
