"""Clients that send their own backend keys, which the proxy verifies at the backend."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from aiohttp import web

from policies.budgets import Budgets, DailyBudget
from policies.profile import Profile
from proxy.keys import CACHE_S, ClientKeyVerifier, Keyring
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.scripted import call, tool_reply
from proxy.profiles import Profiles
from tests.clients.openai_errors import MESSAGES
from tests.fakes.backend import Item, by_history, scripted_backend
from tests.fakes.server import running_proxy

BASH = tool_reply(call("execute_bash", command="true"))
SUBMIT = tool_reply(call("submit", answer="Forty-two."))
TURNS = by_history([BASH, SUBMIT])
ADA, BOB = "sk-ada-key-of-hers", "sk-bob-key-of-his"
WRONG = "sk-made-up"


@dataclass
class KeyGate:
    """A backend gate that accepts requests by key, as OpenAI does."""

    keys: set[str] = field(default_factory=lambda: {ADA, BOB})
    seen: list[tuple[str, str]] = field(default_factory=list)
    """Key and path of each request."""
    models: int = 200
    """Status of GET /v1/models for a known key."""
    lists_to_all: bool = False
    """True if GET /v1/models needs no key."""
    organizations: tuple[str, ...] = ()
    """Organizations that the known keys may use."""

    def __call__(self, request: web.Request) -> web.Response | None:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        self.seen.append((key, request.path))
        if self.lists_to_all and request.path == "/v1/models":
            return None
        if key not in self.keys and self.keys:
            return refusal(401, "Incorrect API key provided: sk-***.", "invalid_api_key")
        if request.headers.get("openai-organization", "") not in ("", *self.organizations):
            return refusal(401, "No such organization.", "mismatched_organization")
        if request.path == "/v1/models" and self.models != 200:
            return refusal(self.models, "You have insufficient permissions.", None)
        if request.content_length == 2:  # {}
            return refusal(400, "you must provide a model parameter", None)
        return None

    def checks(self) -> list[str]:
        """Return the client keys whose verification reached GET /v1/models."""
        ours = (ADA, BOB, WRONG)
        return [key for key, path in self.seen if path == "/v1/models" and key in ours]


def refusal(status: int, message: str, code: str | None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


@dataclass
class Clock:
    """A callable clock whose time the test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ProxyServer:
    """A proxy in front of the gated backend."""

    url: str
    backend: Item
    clock: Clock
    http: httpx.AsyncClient

    def client(self, key: str, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=self.http, **more
        )


async def elsewhere(request: web.Request) -> web.Response:
    if request.path == "/v1/embeddings":
        return web.json_response({"object": "list", "data": [], "model": "m"})
    return web.Response(status=404)


@asynccontextmanager
async def proxy_server(
    gate: KeyGate,
    tmp_path: Path,
    script: Sequence[Item] | Callable[[dict[str, Any]], Item] = TURNS,
    *,
    max_cached: int = 100,
    **changes: Any,
) -> AsyncIterator[ProxyServer]:
    clock = Clock()
    async with scripted_backend(script, elsewhere=elsewhere, let_in=gate) as backend:
        door = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=20)
        changes = {
            "keyring": Keyring(is_closed=True),
            "client_keys": ClientKeyVerifier(door, now=clock, max_cached=max_cached),
            **changes,
        }
        try:
            async with (
                running_proxy(backend, "memory", tmp_path, **changes) as url,
                httpx.AsyncClient(base_url=url) as http,
            ):
                with anyio.fail_after(60):
                    yield ProxyServer(url, backend, clock, http)
        finally:
            await door.aclose()


async def complete(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": "fake-model", "messages": MESSAGES, **fields}
    completion = await client.chat.completions.create(**asked)
    return completion.choices[0].message.content


async def test_operator_key_is_not_sent_to_the_backend(tmp_path: Path) -> None:
    gate = KeyGate()
    keyring = Keyring(is_closed=True, operator_secret="sk-operator")
    async with proxy_server(gate, tmp_path, keyring=keyring) as there:
        for path, status in (("/metrics", 200), ("/v1/chat/completions", 401)):
            method = "GET" if status == 200 else "POST"
            headers = {"authorization": "Bearer sk-operator"}
            answer = await there.http.request(method, path, headers=headers, json=MESSAGES)
            assert answer.status_code == status
    assert "sk-operator" not in [key for key, _ in gate.seen]


async def test_each_backend_call_carries_the_client_key(tmp_path: Path) -> None:
    gate = KeyGate(organizations=("org-1",))
    async with proxy_server(gate, tmp_path) as proxy:
        ada = proxy.client(ADA, organization="org-1", project="proj-1")
        assert await complete(ada) == "Forty-two."
        await complete(ada, stream=False, model="fake-model:plain")
        await ada.models.list()
        await ada.embeddings.create(model="m", input="Hello.", encoding_format="float")
    stranger, *others = (
        key for key, _ in gate.seen
    )  # a random key, verified before the first client key
    assert stranger not in (ADA, BOB)
    assert set(others) == {ADA}
    assert {"/v1/chat/completions", "/v1/embeddings", "/v1/models"} <= {p for _, p in gate.seen}
    sent = [seen.headers for seen in proxy.backend.requests]
    assert {(each["openai-organization"], each["openai-project"]) for each in sent} == {
        ("org-1", "proj-1")
    }


async def test_x_api_key_header_carries_the_client_key(tmp_path: Path) -> None:
    gate = KeyGate()
    body = {"model": "fake-model", "messages": MESSAGES, "max_tokens": 100}
    async with proxy_server(gate, tmp_path) as proxy:
        answer = await proxy.http.post("/v1/messages", json=body, headers={"x-api-key": ADA})
        wrong = await proxy.http.post("/v1/messages", json=body, headers={"x-api-key": WRONG})
    assert answer.json()["content"][0]["text"] == "Forty-two."
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    assert all(seen.headers["authorization"] == f"Bearer {ADA}" for seen in proxy.backend.requests)


async def test_request_with_a_rejected_key_gets_the_backend_error_and_stores_nothing(
    tmp_path: Path,
) -> None:
    gate = KeyGate()
    async with proxy_server(gate, tmp_path) as proxy:
        client = proxy.client(WRONG)
        for ask in (
            lambda: complete(client),
            lambda: complete(client, model="fake-model:plain"),
            lambda: client.files.create(file=b"mine", purpose="user_data"),
            lambda: client.containers.create(name="mine"),
            lambda: client.conversations.create(),
            lambda: client.models.list(),
        ):
            with pytest.raises(openai.AuthenticationError) as caught:
                await ask()
            assert "Incorrect API key provided" in caught.value.message
            assert caught.value.code == "invalid_api_key"
            assert WRONG not in caught.value.message
        gate.keys.add(WRONG)
        proxy.clock.now = CACHE_S
        assert [each.id async for each in client.files.list()] == []
        assert [each.id async for each in client.containers.list()] == []
    assert proxy.backend.requests == []
    assert gate.checks() == [WRONG, WRONG]


async def test_result_of_a_key_check_is_cached_for_five_minutes(tmp_path: Path) -> None:
    gate = KeyGate()
    async with proxy_server(gate, tmp_path) as proxy:
        ada = proxy.client(ADA)
        for now in (0.0, CACHE_S - 1, CACHE_S, CACHE_S + 1):
            proxy.clock.now = now
            await ada.files.list()
        gate.keys.remove(ADA)
        proxy.clock.now = 2 * CACHE_S
        with pytest.raises(openai.AuthenticationError):
            await ada.files.list()
    assert CACHE_S == 300
    assert gate.checks() == [ADA] * 3


async def test_concurrent_requests_verify_a_key_once(tmp_path: Path) -> None:
    gate = KeyGate()
    async with proxy_server(gate, tmp_path) as proxy:
        headers = {"Authorization": f"Bearer {ADA}"}
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(partial(proxy.http.get, "/v1/files", headers=headers))
    assert gate.checks() == [ADA]


async def test_key_cache_is_bounded(tmp_path: Path) -> None:
    gate = KeyGate()
    async with proxy_server(gate, tmp_path, max_cached=2) as proxy:
        for key in (ADA, BOB, ADA):
            await proxy.client(key).files.list()
        with pytest.raises(openai.AuthenticationError):
            await proxy.client(WRONG).files.list()
        for key in (BOB, ADA):
            await proxy.client(key).files.list()
    assert gate.checks() == [ADA, BOB, WRONG, ADA]


async def test_each_key_has_its_own_files_and_daily_budget(tmp_path: Path) -> None:
    one_run = Profiles.only(Profile(budgets=Budgets(DailyBudget(runs=1))))
    async with proxy_server(KeyGate(), tmp_path, profiles=one_run) as proxy:
        ada, bob = proxy.client(ADA), proxy.client(BOB)
        mine = await ada.files.create(file=("a.txt", b"mine"), purpose="user_data")
        with pytest.raises(openai.NotFoundError):
            await bob.files.retrieve(mine.id)
        assert [each.id async for each in ada.files.list()] == [mine.id]
        assert [await complete(each) for each in (ada, bob)] == ["Forty-two."] * 2
        with pytest.raises(openai.RateLimitError):
            await complete(ada)


async def test_detached_run_keeps_its_client_key(tmp_path: Path) -> None:
    gate = KeyGate()
    leaves = {"sandbox": {"on_disconnect": "detach"}}
    async with proxy_server(gate, tmp_path) as proxy:
        headers = {"Authorization": f"Bearer {ADA}"}
        body = {"model": "fake-model", "messages": MESSAGES, "stream": True, **leaves}
        async with (
            httpx.AsyncClient(base_url=proxy.url, headers=headers) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            run_id = answer.headers["x-sandbox-run"]
        second = await proxy.backend.arrived(2)
        await second.answered.wait()
        with pytest.raises(openai.NotFoundError):
            await proxy.client(BOB).get(f"/runs/{run_id}", cast_to=object)
    assert second.headers["authorization"] == f"Bearer {ADA}"


async def test_request_without_a_key_is_refused_with_401(tmp_path: Path) -> None:
    gate = KeyGate()
    async with proxy_server(gate, tmp_path) as proxy:
        statuses = [
            (
                await proxy.http.request(method, path, json={"model": "m", "messages": MESSAGES})
            ).status_code
            for method, path in (
                ("POST", "/v1/chat/completions"),
                ("GET", "/v1/models"),
                ("GET", "/v1/files"),
                ("POST", "/v1/embeddings"),
            )
        ]
        health = await proxy.http.get("/health", headers={"Authorization": f"Bearer {WRONG}"})
    assert statuses == [401] * 4
    assert health.status_code == 200
    assert gate.seen == []


@pytest.mark.parametrize("key", ["k\u00e9y", "a\tb", "k" * 5000])
async def test_malformed_key_is_refused_without_asking_the_backend(
    key: str, tmp_path: Path
) -> None:
    gate = KeyGate()
    async with proxy_server(gate, tmp_path) as proxy:
        header = f"Bearer {key}".encode("latin-1")
        answer = await proxy.http.get("/v1/files", headers={b"Authorization": header})
    assert answer.status_code == 401
    assert gate.seen == []


@pytest.mark.parametrize("models", [403, 404, 405])
async def test_key_without_permission_to_list_models_is_accepted(
    models: int, tmp_path: Path
) -> None:
    gate = KeyGate(models=models)
    async with proxy_server(gate, tmp_path) as proxy:
        assert await complete(proxy.client(ADA)) == "Forty-two."
        with pytest.raises(openai.AuthenticationError):
            await complete(proxy.client(WRONG))


async def test_wrong_key_is_refused_if_the_backend_lists_its_models_without_a_key(
    tmp_path: Path,
) -> None:
    gate = KeyGate(lists_to_all=True)
    async with proxy_server(gate, tmp_path) as proxy:
        assert await complete(proxy.client(ADA)) == "Forty-two."
        with pytest.raises(openai.AuthenticationError):
            await proxy.client(WRONG).files.create(file=b"mine", purpose="user_data")


async def test_backend_that_accepts_any_key_cannot_verify_keys(tmp_path: Path) -> None:
    gate = KeyGate(keys=set())
    async with proxy_server(gate, tmp_path) as proxy:
        with pytest.raises(openai.APIStatusError, match="accepts any key") as caught:
            await proxy.client(ADA).files.create(file=b"mine", purpose="user_data")
    assert caught.value.status_code == 502


async def test_key_is_verified_together_with_its_organization(tmp_path: Path) -> None:
    gate = KeyGate(organizations=("org-1",))
    async with proxy_server(gate, tmp_path) as proxy:
        with pytest.raises(openai.AuthenticationError):
            await proxy.client(ADA, organization="org-2").files.list()
        await proxy.client(ADA, organization="org-1").files.list()
        with pytest.raises(openai.AuthenticationError):
            await proxy.client(ADA, organization="org-2").files.list()
    assert gate.checks() == [ADA, ADA]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_key_check_that_the_backend_cannot_answer_is_not_cached(
    status: int, tmp_path: Path
) -> None:
    gate = KeyGate(models=status)
    async with proxy_server(gate, tmp_path) as proxy:
        ada = proxy.client(ADA)
        with pytest.raises(openai.APIStatusError) as caught:
            await ada.files.list()
        gate.models = 200
        await ada.files.list()
    assert caught.value.status_code == status


async def test_client_key_is_neither_stored_nor_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with proxy_server(KeyGate(), tmp_path) as proxy:
        ada = proxy.client(ADA)
        await ada.files.create(file=("a.txt", b"mine"), purpose="user_data")
        await complete(ada, extra_headers={"Idempotency-Key": "k1"})
        with pytest.raises(openai.AuthenticationError):
            await complete(proxy.client(WRONG))
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    said = "".join(each.getMessage() for each in caplog.records if each.name.startswith("proxy"))
    for key in (ADA, WRONG):
        assert key.encode() not in kept
        assert key not in said
