"""One client key reaches for what another key has stored, at the backend and at the proxy.

The backend keeps objects as OpenAI does, all of them under the operator's key.
"""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from aiohttp import web

from proxy.models.scripted import text_reply
from tests.attacks.report import Finding
from tests.attacks.server import ATTACKER, NEIGHBOUR, attacked_server
from tests.clients.test_passthrough_tenants import STATEFUL_PATHS
from tests.fakes.backend import Item, scripted_backend

BACKEND = "bubblewrap"
SECRET = "what-the-neighbour-stored"
PLAIN = {"model": "fake-model:plain"}
FORMS = ("/v1/{}", "/{}", "/openai/v1/{}", "/v1/{}/", "/v1//{}", "/v1/./{}", "/v1/%2e/{}", "/V1/{}")
"""Spellings of a path; servers disagree on the meaning of some of them."""


@dataclass
class ObjectStore:
    """A backend's stored objects by path, which everybody with its key can list and delete."""

    objects: dict[str, str] = field(default_factory=dict)

    async def serve(self, request: web.Request) -> web.Response:
        """Answer a request as a server does that resolves dots and repeated slashes."""
        parts = [part for part in request.path.lower().split("/") if part not in ("", ".")]
        path = "/".join(part for part in parts if part not in ("openai", "v1"))
        if request.method == "DELETE" and path in self.objects:
            del self.objects[path]
            return web.json_response({"deleted": True})
        if path in self.objects:
            if request.method != "GET":
                self.objects[path] = "changed"
            return web.json_response({"id": path, "content": self.objects[path]})
        below = [value for name, value in self.objects.items() if name.startswith(f"{path}/")]
        return web.json_response({"object": "list", "data": below})


async def attacks() -> AsyncIterator[Finding]:
    """Reach for each kind of stored object with the key of another client."""
    store = ObjectStore()
    async with (
        scripted_backend(_echo, elsewhere=store.serve) as model,
        attacked_server(BACKEND, model.base_url) as server,
        httpx.AsyncClient(base_url=server.url, timeout=20, follow_redirects=True) as client,
    ):
        for name in (*STATEFUL_PATHS, "responses", "files", "containers", "conversations"):
            yield await _reach_backend(client, store, name)
        for kind, created in (await _store_at_proxy(client)).items():
            yield await _reach_proxy(client, kind, created)


def _echo(body: dict[str, Any]) -> Item:
    """Return a reply with all messages of the request, so that a client sees what is in them."""
    return text_reply(json.dumps(body["messages"]))


async def _reach_backend(client: httpx.AsyncClient, store: ObjectStore, name: str) -> Finding:
    """List, read, change and delete an object of the backend, in all spellings of its path."""
    made = f"{name}/made_1"
    store.objects = {made: SECRET}
    statuses: dict[int, int] = {}
    is_shown = False
    for form in FORMS:
        for method, path in (("GET", name), ("GET", made), ("POST", made), ("DELETE", made)):
            request = client.build_request(method, "/", headers=_bearer(ATTACKER), json=PLAIN)
            # httpx would resolve the dots.
            target = form.format(path).encode()
            request.url = request.url.copy_with(raw_path=target)
            answer = await client.send(request)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            is_shown |= SECRET in answer.text
    held = store.objects == {made: SECRET} and not is_shown
    return Finding(f"the backend's {name}", "-", held, f"answers {_counts(statuses)}")


@dataclass(frozen=True, slots=True)
class _Stored:
    """An object that the neighbour stored at the proxy."""

    collection: str
    id: str
    below: tuple[str, ...] = ()
    """Paths below the object."""


async def _store_at_proxy(client: httpx.AsyncClient) -> Mapping[str, _Stored]:
    """Store one object of each kind as the neighbour."""
    own = {"headers": _bearer(NEIGHBOUR)}
    content = {"file": (f"{SECRET}.txt", SECRET.encode()), "purpose": (None, "user_data")}
    file = await client.post("/v1/files", files=content, **own)
    response = await client.post(
        "/v1/responses", json={"model": "m", "input": SECRET, "store": True}, **own
    )
    container = await client.post("/v1/containers", json={"name": SECRET}, **own)
    item = {"type": "message", "role": "user", "content": SECRET}
    conversation = await client.post("/v1/conversations", json={"items": [item]}, **own)
    body = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
    detached = {**own["headers"], "X-Sandbox-On-Disconnect": "detach"}
    run = await client.post(
        "/v1/chat/completions", json={**body, "sandbox": {"capture": "messages"}}, headers=detached
    )
    return {
        "upload": _Stored("files", file.json()["id"], ("content",)),
        "response": _Stored("responses", response.json()["id"], ("input_items", "cancel")),
        "container": _Stored("containers", container.json()["id"], ("files",)),
        "conversation": _Stored("conversations", conversation.json()["id"], ("items",)),
        "run": _Stored("runs", run.headers["x-sandbox-run"], ("trajectory", "events")),
    }


async def _reach_proxy(client: httpx.AsyncClient, kind: str, stored: _Stored) -> Finding:
    """List, read, change and delete an object of the neighbour; it must still be there."""
    one = f"/v1/{stored.collection}/{stored.id}"
    answers = [
        await client.request(method, path, headers=_bearer(ATTACKER), json=PLAIN)
        for method, path in (
            ("GET", f"/v1/{stored.collection}"),
            *((method, one) for method in ("GET", "POST", "DELETE")),
            *((method, f"{one}/{each}") for each in stored.below for method in ("GET", "POST")),
        )
    ]
    references: list[dict[str, Any]] = [
        {"previous_response_id": stored.id},
        {"conversation": stored.id},
        {"sandbox": {"container_id": stored.id}},
        {"sandbox": {"file_ids": [stored.id]}},
    ]
    for fields in references:
        body = {"model": "m", "input": "Hello.", **fields}
        answers.append(await client.post("/v1/responses", headers=_bearer(ATTACKER), json=body))
    kept = await client.get(one, headers=_bearer(NEIGHBOUR))
    is_shown = any(SECRET in each.text and each.status_code < 400 for each in answers)
    statuses: dict[int, int] = {}
    for each in answers:
        statuses[each.status_code] = statuses.get(each.status_code, 0) + 1
    held = kept.status_code == 200 and not is_shown
    return Finding(f"the proxy's {kind}", "-", held, f"answers {_counts(statuses)}")


def _counts(statuses: Mapping[int, int]) -> str:
    return ", ".join(f"{status} ({count})" for status, count in sorted(statuses.items()))


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
