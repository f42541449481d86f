"""GET /v1/trajectories."""

from pathlib import Path
from typing import Any

import httpx

from proxy.models.scripted import text_reply
from tests.clients.chat_http import http_client, post_chat
from tests.fakes.backend import scripted_backend
from tests.fakes.server import EachKey, running_proxy

CAPTURE: dict[str, Any] = {"sandbox": {"capture": "messages"}}


async def listed(http: httpx.AsyncClient, **params: Any) -> Any:
    found = await http.get("/v1/trajectories", params=params)
    assert found.status_code == 200, found.text
    return found.json()


async def test_list_has_pages_and_no_deleted_trajectory(tmp_path: Path) -> None:
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


async def test_list_has_no_trajectory_of_another_key(tmp_path: Path) -> None:
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
