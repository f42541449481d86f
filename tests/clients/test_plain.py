"""`:plain` models: requests and answers are relayed to the backend unchanged."""

import asyncio
import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Frames, Held, Item, Raw, Refusal, chunk, frames, scripted_backend
from tests.fakes.server import BACKEND_KEY, running_proxy

HELLO: list[Any] = [{"role": "user", "content": "Hello."}]
BODY = {
    "model": "fake-model:plain",
    "messages": HELLO,
    "tools": [{"type": "function", "function": {"name": "submit", "parameters": {}}}],
    "n": 2,
    "max_tokens": 7,
    "response_format": {"type": "json_object"},
    "logit_bias": {"50256": -100},
    "of_the_backend_alone": {"deep": [1, None, "é", 1e-7]},
}
ODD_JSON = b'{ "id":"x",\n"choices" : [ ],"prompt_logprobs":null, "unknown": {"a":1.0} }\n\n'
ODD_FRAMES = Frames(
    [
        b": a comment of the backend\n\n",
        b'event: odd\ndata: {"no": "chunk"}\n\n',
        b"data:",
        b'{"choices": [], "unknown": "\xc3\xa9"}\r\n\r\n',
        *frames(chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}), "[DONE]"),
    ]
)


async def post(url: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": "Bearer sk-of-the-client", "x-request-tag": "seen"}
    with anyio.fail_after(10):
        async with httpx.AsyncClient(headers=headers) as client:
            return await client.post(f"{url}/chat/completions", json=body)


@pytest.mark.parametrize(
    ("answer", "stream"),
    [
        (text_reply("Hello you."), False),
        (text_reply("Hello you."), True),
        (tool_reply(call("submit", answer="of the client's own tool")), False),
        (Raw(200, ODD_JSON, {"content-type": "application/json; charset=utf-8"}), False),
        (Raw(418, b"<h1>teapot</h1>", {"content-type": "text/html"}), False),
        (ODD_FRAMES, True),
        (Refusal(429, "later", headers={"Retry-After": "7", "x-ratelimit-limit": "1"}), True),
        (Refusal(500, "broken", headers={"x-request-id": "req-1"}), False),
    ],
)
async def test_plain_answer_equals_the_backend_answer(
    answer: Item, stream: bool, tmp_path: Path
) -> None:
    body = {**BODY, "stream": stream}
    async with scripted_backend(lambda _: answer) as backend:
        direct = await post(backend.base_url, {**body, "model": "fake-model"})
        async with running_proxy(backend, "memory", tmp_path) as url:
            relayed = await post(f"{url}/v1", body)
    first, second = (request.body for request in backend.requests)
    # The fake backend numbers its answers.
    relayed_content = relayed.content.replace(b"script-1", b"script-0").replace(
        b"call_1", b"call_0"
    )
    assert (relayed.status_code, relayed_content) == (direct.status_code, direct.content)
    for name in ("content-type", "retry-after", "x-ratelimit-limit"):
        assert relayed.headers.get(name) == direct.headers.get(name)
    assert direct.headers.get("x-request-id") in (None, relayed.headers["x-request-id"])
    assert list(second.items()) == list(first.items())


async def test_plain_request_has_the_backends_key_and_the_other_client_headers(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([text_reply("Hello you.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        await post(f"{url}/v1", BODY)
    headers = backend.requests[0].headers
    assert headers["authorization"] == f"Bearer {BACKEND_KEY}"
    assert headers["x-request-tag"] == "seen"


async def test_plain_stream_is_relayed_in_pieces(tmp_path: Path) -> None:
    rest = asyncio.Event()
    script = [Held(Frames(frames(chunk({"content": "Hel"}), chunk({"content": "lo"}))), rest, 1)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with anyio.fail_after(10):
            stream = await client.chat.completions.create(
                model="fake-model:plain", messages=HELLO, stream=True
            )
            pieces = []
            async for piece in stream:
                pieces.append(piece.choices[0].delta.content)
                rest.set()  # only after the first piece arrived
    assert pieces == ["Hel", "lo"]


async def test_request_with_tool_choice_none_is_relayed_without_a_sandbox(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("Hello you.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        body = {"model": "fake-model", "messages": HELLO, "tool_choice": "none"}
        answer = json.loads((await post(f"{url}/v1", body)).content)
    assert backend.requests[0].body == body
    assert "sandbox" not in answer
