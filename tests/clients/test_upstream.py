"""`sandbox.upstream`: the model calls of a run go through a gateway that the request names."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from proxy.models.scripted import call, text_reply, tool_reply
from proxy.models.tool_support import ToolSupportSettings, ToolVerdicts
from tests.clients.chat_http import BODY, answer_text, http_client, post_chat
from tests.fakes.backend import ScriptedBackend, by_history, scripted_backend
from tests.fakes.server import BACKEND_KEY, running_proxy

DOWN = "http://127.0.0.1:1/v1"
REPLIES = [tool_reply(call("execute_bash", command="seq 42 | wc -l")), text_reply("It is 42.")]


@dataclass
class Gateway:
    """A server that forwards chat completions, and keeps their paths and keys."""

    url: str = ""
    refusal: str = ""
    """The error message of all answers with status 400; empty: calls are forwarded."""
    calls: list[tuple[str, str]] = field(default_factory=list)


@asynccontextmanager
async def gateway(backend: ScriptedBackend, refusal: str = "") -> AsyncIterator[Gateway]:
    """Run a gateway in front of a backend, with a base URL for each rollout."""
    seen = Gateway(refusal=refusal)

    async def forward(request: web.Request) -> web.Response:
        seen.calls.append((request.path, request.headers.get("authorization", "")))
        if seen.refusal:
            return web.json_response({"error": {"message": seen.refusal}}, status=400)
        async with httpx.AsyncClient() as http:
            answered = await http.post(
                f"{backend.base_url}/chat/completions", content=await request.read()
            )
        kind = answered.headers["content-type"]
        return web.Response(
            status=answered.status_code, body=answered.content, headers={"content-type": kind}
        )

    async with scripted_backend([], elsewhere=forward) as server:
        seen.url = server.base_url.removesuffix("/v1")
        yield seen


@pytest.mark.parametrize("stream", [False, True])
async def test_model_calls_of_a_run_go_to_its_upstream(stream: bool, tmp_path: Path) -> None:
    async with (
        scripted_backend(by_history(REPLIES)) as backend,
        gateway(backend) as between,
        running_proxy(backend, "memory", tmp_path, upstreams=(f"{between.url}/sessions",)) as url,
        http_client(url) as http,
    ):
        answers = [
            await post_chat(
                http, stream=stream, sandbox={"upstream": f"{between.url}/sessions/{name}/v1"}
            )
            for name in ("a-1", "b.2")
        ]
        direct = await post_chat(http, stream=stream)
    assert [answer_text(each) for each in (*answers, direct)] == ["It is 42."] * 3
    assert between.calls == [
        (f"/sessions/{name}/v1/chat/completions", f"Bearer {BACKEND_KEY}")
        for name in ("a-1", "a-1", "b.2", "b.2")
    ]
    assert len(backend.requests) == 6


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "How many?"}),
        ("/v1/messages", {"messages": BODY["messages"], "max_tokens": 100}),
    ],
)
async def test_responses_and_messages_requests_can_name_their_upstream(
    path: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    async with (
        scripted_backend(by_history(REPLIES)) as backend,
        gateway(backend) as between,
        running_proxy(backend, "memory", tmp_path, upstreams=(between.url,)) as url,
        http_client(url) as http,
    ):
        sandbox = {"upstream": f"{between.url}/a/v1/"}
        answered = await http.post(path, json={"model": "fake-model", "sandbox": sandbox, **fields})
    assert "It is 42." in answered.raise_for_status().text
    assert [each for each, _ in between.calls] == ["/a/v1/chat/completions"] * 2


@pytest.mark.parametrize(
    "upstream",
    [
        "{url}/v1",
        "{url}/sessions-of-others/v1",
        "{url}/sessions/../v1",
        "{url}/sessions/%2e%2e/v1",
        "{url}/sessions//v1",
        "{url}/sessions/a?to=/v1",
        "{url}/sessions/a#/v1",
        "{url}/sessions/a\n/v1",
        "{url}.example.com/sessions/a/v1",
        "http://user@127.0.0.1:1/sessions/v1",
        "file:///etc/passwd",
        "",
    ],
)
async def test_upstream_url_that_is_not_allowed_is_refused(upstream: str, tmp_path: Path) -> None:
    async with (
        scripted_backend(by_history(REPLIES)) as backend,
        gateway(backend) as between,
        running_proxy(backend, "memory", tmp_path, upstreams=(f"{between.url}/sessions/",)) as url,
        http_client(url) as http,
    ):
        named = upstream.format(url=between.url)
        refused = await post_chat(http, sandbox={"upstream": named})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (403, "sandbox.upstream")
    assert "backend.upstreams" in error["message"]
    assert not backend.requests
    assert not between.calls


async def test_upstream_is_refused_by_default(tmp_path: Path) -> None:
    async with (
        scripted_backend(REPLIES) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        http_client(url) as http,
    ):
        refused = await post_chat(http, sandbox={"upstream": backend.base_url})
    assert refused.status_code == 403
    assert not backend.requests


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sandbox": {"upstream": 7}}, "Invalid type"),
        ({"sandbox": {"upstream": DOWN}, "model": "fake-model:plain"}, "needs a sandbox"),
        ({"sandbox": {"upstream": DOWN, "enabled": "never"}}, "needs a sandbox"),
    ],
)
async def test_request_with_an_unusable_upstream_is_refused(
    body: dict[str, Any], message: str, tmp_path: Path
) -> None:
    async with (
        scripted_backend(REPLIES) as backend,
        running_proxy(backend, "memory", tmp_path, upstreams=(DOWN,)) as url,
        http_client(url) as http,
    ):
        refused = await post_chat(http, **body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "sandbox.upstream")
    assert message in error["message"]
    assert not backend.requests


@pytest.mark.parametrize(
    "refusal",
    [
        "Streaming is not supported.",
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
    ],
)
async def test_refusal_by_another_upstream_does_not_change_requests_to_the_configured_backend(
    refusal: str, tmp_path: Path
) -> None:
    async with (
        scripted_backend(by_history(REPLIES)) as backend,
        gateway(backend, refusal) as between,
        running_proxy(
            backend,
            "memory",
            tmp_path,
            upstreams=(between.url,),
            make_verdicts=lambda *_: ToolVerdicts(ToolSupportSettings("probe")),
        ) as url,
        http_client(url) as http,
    ):
        refused = await post_chat(http, sandbox={"upstream": f"{between.url}/a/v1"})
        answered = await post_chat(http)
    assert refused.status_code == 400
    assert len(between.calls) > 1  # asked again without a stream, or without tools
    assert answer_text(answered) == "It is 42."
    for seen in backend.requests:
        assert seen.body["stream"] is True
        assert seen.body["tools"]


async def test_unreachable_upstream_is_a_502(tmp_path: Path) -> None:
    async with (
        scripted_backend(REPLIES) as backend,
        running_proxy(backend, "memory", tmp_path, upstreams=(DOWN,)) as url,
        http_client(url) as http,
    ):
        failed = await post_chat(http, sandbox={"upstream": DOWN})
        answered = await post_chat(http)
    assert failed.status_code == 502
    assert answer_text(answered) == "It is 42."
