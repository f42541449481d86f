"""/v1/trajectories: the list and the rewards."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.models.scripted import text_reply
from proxy.store.trajectories import MAX_REWARDS
from tests.clients.chat_http import http_client, post_chat
from tests.fakes.backend import scripted_backend
from tests.fakes.server import EachKey, running_proxy

CAPTURE: dict[str, Any] = {"sandbox": {"capture": "messages"}}


async def listed(http: httpx.AsyncClient, **params: Any) -> Any:
    found = await http.get("/v1/trajectories", params=params)
    assert found.status_code == 200, found.text
    return found.json()


async def test_trajectory_list_has_pages_and_no_deleted_trajectory(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("One.")] * 4) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        empty = await listed(http)
        answers = [await post_chat(http, **CAPTURE) for _ in range(3)]
        await post_chat(http)
        ids = [answer.headers["x-sandbox-run"] for answer in answers]
        first = await listed(http, limit=2)
        second = await listed(http, limit=2, after=first["last_id"])
        await http.delete(f"/v1/runs/{ids[1]}/trajectory")
        remaining = await listed(http)
        after_deleted = await listed(http, after=ids[1])
        unknown = await http.get("/v1/trajectories", params={"after": "unknown"})
    assert empty == {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}
    assert [each["id"] for each in first["data"]] == [ids[2], ids[1]]
    assert (first["first_id"], first["last_id"], first["has_more"]) == (ids[2], ids[1], True)
    assert [each["id"] for each in second["data"]] == [ids[0]]
    assert second["has_more"] is False
    summary = second["data"][0]
    assert summary["object"] == "run.trajectory.summary"
    assert summary["ended_at"] >= summary["created_at"]
    assert summary["bytes"] > 0
    assert [each["id"] for each in remaining["data"]] == [ids[2], ids[0]]
    assert [each["id"] for each in after_deleted["data"]] == [ids[0]]
    assert unknown.status_code == 400


async def test_trajectory_list_has_no_trajectory_of_another_key(tmp_path: Path) -> None:
    other = {"Authorization": "Bearer other"}
    async with (
        scripted_backend([text_reply("One.")] * 2) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=EachKey()) as url,
        http_client(url) as http,
    ):
        mine = (await post_chat(http, **CAPTURE)).headers["x-sandbox-run"]
        theirs = (await post_chat(http, other, **CAPTURE)).headers["x-sandbox-run"]
        my_list = await listed(http)
        their_list = (await http.get("/v1/trajectories", headers=other)).json()
        foreign = await http.get("/v1/trajectories", params={"after": theirs})
    assert [each["id"] for each in my_list["data"]] == [mine]
    assert [each["id"] for each in their_list["data"]] == [theirs]
    assert foreign.status_code == 400


async def test_number_of_rewards_is_limited_and_rewards_add_to_the_size_of_the_trajectory(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([text_reply("One.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        run_id = (await post_chat(http, **CAPTURE)).headers["x-sandbox-run"]
        path = f"/v1/trajectories/{run_id}/reward"
        before = await listed(http)
        first = await http.post(path, json={"value": 1, "source": "grader", "reason": "exact"})
        for _ in range(MAX_REWARDS - 1):
            assert (await http.post(path, json={"value": None})).status_code == 200
        full = await listed(http)
        beyond = await http.post(path, json={"value": 0.5})
        after = await listed(http)
        rewards = (await http.get(f"/v1/runs/{run_id}/trajectory")).json()["rewards"]
        await http.delete(f"/v1/runs/{run_id}/trajectory")
        deleted = await http.post(path, json={"value": 1})
    assert first.json() == rewards[0]
    assert rewards[0].items() >= {"value": 1.0, "source": "grader", "reason": "exact"}.items()
    assert [each["value"] for each in rewards] == [1.0, *[None] * (MAX_REWARDS - 1)]
    assert full["data"][0]["bytes"] > before["data"][0]["bytes"] + MAX_REWARDS
    assert after == full
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (400, "too_many_rewards")
    assert deleted.status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        '{"source": "grader"}',
        '{"value": "1"}',
        '{"value": true}',
        '{"value": NaN}',
        '{"value": 1e999}',
        '{"value": 1, "source": 7}',
        f'{{"value": 1, "reason": "{"x" * 513}"}}',
        "[]",
    ],
)
async def test_invalid_reward_is_refused(tmp_path: Path, body: str) -> None:
    async with (
        scripted_backend([text_reply("One.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        run_id = (await post_chat(http, **CAPTURE)).headers["x-sandbox-run"]
        refused = await http.post(f"/v1/trajectories/{run_id}/reward", content=body)
        rewards = (await http.get(f"/v1/runs/{run_id}/trajectory")).json()["rewards"]
    assert refused.status_code == 400
    assert rewards == []


async def test_reward_for_a_trajectory_of_another_key_is_refused_with_404(tmp_path: Path) -> None:
    other = {"Authorization": "Bearer other"}
    async with (
        scripted_backend([text_reply("One.")]) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=EachKey()) as url,
        http_client(url) as http,
    ):
        mine = (await post_chat(http, **CAPTURE)).headers["x-sandbox-run"]
        path = f"/v1/trajectories/{mine}/reward"
        foreign = await http.post(path, json={"value": 1}, headers=other)
        unknown = await http.post("/v1/trajectories/unknown/reward", json={"value": 1})
        rewards = (await http.get(f"/v1/runs/{mine}/trajectory")).json()["rewards"]
    assert [foreign.status_code, unknown.status_code] == [404, 404]
    assert rewards == []
