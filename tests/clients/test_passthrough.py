"""Paths relayed to the backend: what it receives, what the client gets, and what is refused."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from aiohttp import web

from proxy.app import create_app
from proxy.inputs import InputLoader
from proxy.models.scripted import ScriptedModel
from tests.fakes.backend import Handler, scripted_backend
from tests.fakes.server import (
    BACKEND_KEY,
    make_services,
    open_sandboxes,
    running_proxy,
    serve,
    single_key,
)

ODD_JSON = b'{ "input":"\\u00e9",\n"big" : 123456789012345678901234567890, "input": 1.0e0 }\r\n'
ANSWER = b'{"odd" :  [1 ,]}\n\xff\x00'


@dataclass
class Recorder:
    """A handler that records its requests and returns a fixed answer."""

    answer: bytes = ANSWER
    status: int = 207
    headers: dict[str, str] = field(default_factory=dict)
    seen: list[web.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def record(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        self.seen.append(request)
        return web.Response(status=self.status, headers=self.headers, body=self.answer)


@asynccontextmanager
async def before(
    handler: Handler, tmp_path: Path, *, prefix: str = "", **changes: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve in front of a backend with that handler and yield a client."""
    async with scripted_backend([], elsewhere=handler) as backend:
        backend.base_url = backend.base_url.removesuffix("/v1") + prefix + "/v1"
        async with (
            running_proxy(backend, "memory", tmp_path, **changes) as url,
            httpx.AsyncClient(base_url=url, timeout=20) as client,
        ):
            yield client


@pytest.mark.parametrize(
    ("method", "path", "headers", "body"),
    [
        ("GET", "/version", {}, b""),
        ("GET", "/v1/fine_tuning/jobs?limit=2&after=a%2Fb&x=%C3%A9&empty=", {"etag": '"1"'}, b""),
        ("POST", "/v1/embeddings", {"content-type": "application/json"}, ODD_JSON),
        ("POST", "/tokenize", {"content-type": "application/json; charset=utf-8"}, b"[NaN ]"),
        ("POST", "/v1/images/edits", {"content-type": "multipart/form-data; boundary=x"}, b"--x"),
        ("POST", "/v1/score", {"content-type": "application/json"}, b""),
        ("POST", "/v1/audio/translations", {}, b"\x00\xff" * 70_000),
        ("PUT", "/invocations", {"content-type": "application/octet-stream"}, b"\x00"),
        ("PATCH", "/a:b@c!$&'()*+,=~-._/d", {"range": "bytes=0-1"}, b"x"),
        ("DELETE", "/v1/batches/batch_1", {"accept": "x/y", "user-agent": "mine"}, b""),
        ("OPTIONS", "/pooling", {"origin": "https://app.test"}, b""),
    ],
)
async def test_request_and_answer_are_relayed_unchanged(
    method: str, path: str, headers: dict[str, str], body: bytes, tmp_path: Path
) -> None:
    response_headers = {
        "content-type": "odd/type",
        "x-of-the-backend": "1",
        "content-disposition": "x",
    }
    backend = Recorder(headers=response_headers)
    async with before(backend.record, tmp_path, passthrough="all") as client:
        request = client.build_request(method, path, headers=headers, content=body)
        answer = await client.send(request)
    (seen,) = backend.seen
    assert (seen.method, seen.raw_path) == (method, request.url.raw_path.decode())
    assert backend.bodies == [body]
    assert {name: seen.headers.get(name) for name in headers} == headers
    assert seen.headers.get("content-length", "0") == str(len(body))
    assert (answer.status_code, answer.content) == (207, ANSWER)
    assert {name: answer.headers[name] for name in response_headers} == response_headers


@pytest.mark.parametrize(
    ("path", "arrives"),
    [
        ("/v1/embeddings", "/tenant/v1/embeddings"),
        ("/v1/embeddings/", "/tenant/v1/embeddings/"),
        ("/tokenize", "/tenant/tokenize"),
        ("/v2/rerank", "/tenant/v2/rerank"),
    ],
)
async def test_relayed_paths_keep_the_path_prefix_of_the_backend_url(
    path: str, arrives: str, tmp_path: Path
) -> None:
    backend = Recorder()
    async with before(backend.record, tmp_path, prefix="/tenant") as client:
        await client.post(path, content=b"x")
    assert [seen.raw_path for seen in backend.seen] == [arrives]


async def test_backend_gets_its_own_key_and_no_client_credentials(
    tmp_path: Path,
) -> None:
    backend = Recorder(headers={"set-cookie": "a=1", "strict-transport-security": "max-age=9"})
    sent = {
        "authorization": "Bearer sk-ours",
        "x-api-key": "sk-ours",
        "cookie": "a=sk-ours",
        "connection": "keep-alive, x-hop",
        "x-hop": "1",
        "te": "trailers",
        "x-sandbox-session": "s",
        "x-tag": "seen",
    }
    async with before(backend.record, tmp_path, keyring=single_key("sk-ours")) as client:
        answer = await client.get("/version", headers=sent)
    headers = backend.seen[0].headers
    assert headers["authorization"] == f"Bearer {BACKEND_KEY}"
    assert headers["x-tag"] == "seen"
    assert not {"x-api-key", "cookie", "x-hop", "te", "x-sandbox-session"} & {
        name.lower() for name in headers
    }
    assert not {"set-cookie", "strict-transport-security"} & set(answer.headers)


@pytest.mark.parametrize("path", ["/version", "/v1/embeddings", "/sleep", "/v1/responses"])
async def test_request_with_a_wrong_key_is_not_relayed(path: str, tmp_path: Path) -> None:
    backend = Recorder()
    async with before(backend.record, tmp_path, keyring=single_key("sk-ours")) as client:
        answer = await client.post(path, headers={"authorization": "Bearer sk-wrong"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert backend.seen == []


async def test_head_request_is_relayed(tmp_path: Path) -> None:
    backend = Recorder(answer=b"x" * 999_999, status=200)
    async with before(backend.record, tmp_path) as client:
        answer = await client.head("/info")
    assert (answer.headers["content-length"], answer.content) == ("999999", b"")


async def test_compressed_answer_is_relayed_unchanged(tmp_path: Path) -> None:
    packed = gzip.compress(b"metrics")
    backend = Recorder(answer=packed, headers={"content-encoding": "gzip"})
    async with before(backend.record, tmp_path) as client:
        asked = client.build_request("GET", "/load", headers={"accept-encoding": "gzip"})
        answer = await client.send(asked, stream=True)
        raw = b"".join([piece async for piece in answer.aiter_raw()])
        await answer.aclose()
    assert backend.seen[0].headers["accept-encoding"] == "gzip"
    assert (raw, answer.headers["content-encoding"]) == (packed, "gzip")


@pytest.mark.parametrize(
    ("backend_location", "location"),
    [
        ("http://{host}/tenant/v1/batches", "/v1/batches"),
        ("https://elsewhere.test/file", "https://elsewhere.test/file"),
        ("/relative", "/relative"),
    ],
)
async def test_redirect_within_the_backend_is_rewritten(
    backend_location: str, location: str, tmp_path: Path
) -> None:
    async def redirect(request: web.Request) -> web.Response:
        return web.Response(
            status=307, headers={"location": backend_location.format(host=request.host)}
        )

    async with before(redirect, tmp_path, prefix="/tenant", passthrough="all") as client:
        answer = await client.get("/v1/batches/")
    assert (answer.status_code, answer.headers["location"]) == (307, location)


async def test_backend_error_is_relayed_unchanged(tmp_path: Path) -> None:
    refusal = json.dumps({"detail": "Not Found"}).encode()
    response_headers = {
        "content-type": "application/json",
        "www-authenticate": "Basic",
        "x": "naïve 日本",
    }
    backend = Recorder(refusal, 404, response_headers)
    async with before(backend.record, tmp_path, passthrough="all") as client:
        answer = await client.post("/v1/nonsense", json={})
    assert (answer.status_code, answer.content) == (404, refusal)
    raw = dict(answer.headers.raw)
    assert raw[b"x"] == response_headers["x"].encode()


# `:plain`


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/responses", "/v1/chat/completions/render"]
)
async def test_plain_suffix_is_removed_from_the_model(path: str, tmp_path: Path) -> None:
    backend = Recorder()
    body = {"prompt": "Say :plain.", "model": "fake-model:plain", "sandbox": {"steps": "off"}}
    async with before(backend.record, tmp_path) as client:
        answer = await client.post(path, json=body)
    assert json.loads(backend.bodies[0]) == {"prompt": "Say :plain.", "model": "fake-model"}
    assert answer.content == ANSWER


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
async def test_escaped_plain_suffix_is_removed_from_the_model(path: str, tmp_path: Path) -> None:
    backend = Recorder()
    body = rb'{"model": "fake-model\u003aplain", "sandbox": {"steps": "off"}, "input": 1e2}'
    async with before(backend.record, tmp_path) as client:
        await client.post(path, content=body, headers={"content-type": "application/json"})
    assert json.loads(backend.bodies[0]) == {"model": "fake-model", "input": 100.0}


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": ":plain",  "model":"m"}',
        b'{"input": ":plain", "model": 5}',
        b'[":plain"]',
        b'{"model": "m:plain", "input": "' + b"x" * (18 << 20) + b'"}',
    ],
    ids=["in the text", "no name", "no object", "too long"],
)
async def test_body_without_a_readable_plain_suffix_is_relayed_unchanged(
    body: bytes, tmp_path: Path
) -> None:
    backend, inputs = Recorder(), InputLoader(max_total_mib=1)
    async with before(backend.record, tmp_path, inputs=inputs) as client:
        headers = {"content-type": "application/json"}
        await client.post("/v1/embeddings", content=body, headers=headers)
    assert backend.bodies == [body]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *[("POST", "/openai/v1/chat/completions"), ("POST", "/openai/v1/messages")],
        *[("POST", "/v1/chat/completions/batch"), ("POST", "/v1/responses/compact")],
    ],
)
async def test_backend_path_that_would_generate_without_a_sandbox_is_refused(
    method: str, path: str, tmp_path: Path
) -> None:
    backend = Recorder()
    async with before(backend.record, tmp_path) as client:
        answer = await client.request(method, path, json={"model": "fake-model"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    assert "':plain'" in error["message"] or "<model>:plain" in error["message"]
    assert backend.seen == []


# Closed


@pytest.mark.parametrize(
    ("target", "status", "code"),
    [
        ("/sleep?level=1", 403, "path_closed"),
        ("//%73leep/", 403, "path_closed"),
        ("/V1/Load_LoRA_Adapter", 403, "path_closed"),
        ("/x/../sleep", 404, "unknown_url"),
        ("/x/%2e%2e%2fsleep", 404, "unknown_url"),
        ("/%2573leep", 404, "unknown_url"),
        ("/metrics/x", 404, "unknown_url"),
    ],
)
async def test_administrative_backend_path_is_refused_in_any_spelling(
    target: str, status: int, code: str, tmp_path: Path
) -> None:
    backend = Recorder()
    async with before(backend.record, tmp_path) as client:
        host, port = client.base_url.host, client.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"POST {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert int(head.split()[1]) == status
    assert json.loads(body)["error"]["code"] == code
    assert backend.seen == []


async def test_request_with_both_transfer_encoding_and_content_length_is_refused(
    tmp_path: Path,
) -> None:
    """A backend that trusted the second length could take the next request for this body."""
    backend = Recorder()
    async with before(backend.record, tmp_path) as client:
        host, port = client.base_url.host, client.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"transfer-encoding: chunked\r\ncontent-length: 200\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        )
        with anyio.fail_after(10):
            head = (await reader.read()).partition(b"\r\n\r\n")[0]
        writer.close()
    assert (int(head.split()[1]), backend.seen) == (400, [])


async def test_trace_method_is_not_allowed(tmp_path: Path) -> None:
    backend = Recorder()
    async with before(backend.record, tmp_path) as client:
        answer = await client.request("TRACE", "/version")
    assert (answer.status_code, backend.seen) == (405, [])
    assert "POST" in answer.headers["allow"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_websocket_is_refused_with_an_error_body(tmp_path: Path) -> None:
    backend = Recorder()
    asks = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    async with before(backend.record, tmp_path) as client:
        answer = await client.get("/v1/realtime?model=m", headers=asks)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_protocol")
    assert backend.seen == []


async def test_websocket_is_refused_by_a_server_with_websocket_support(
    tmp_path: Path,
) -> None:
    sent: list[Any] = []
    scope = {
        "type": "websocket",
        "path": "/v1/realtime",
        "headers": [],
        "extensions": {"websocket.http.response": {}},
    }

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async with open_sandboxes("memory", tmp_path) as sandboxes:
        app = create_app(make_services(ScriptedModel([]), sandboxes, tmp_path))
        await app(scope, receive, send)
    start, body = sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 400)
    assert json.loads(body["body"])["error"]["code"] == "unsupported_protocol"


async def test_unknown_path_is_a_404_if_the_backend_is_no_http_server(tmp_path: Path) -> None:
    async with (
        open_sandboxes("memory", tmp_path) as sandboxes,
        serve(make_services(ScriptedModel([]), sandboxes, tmp_path)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        answer = await client.post("/v1/embeddings", json={"model": "script"})
    assert answer.status_code == 404
    assert answer.json() == {
        "error": {
            "message": "Not Found, and the backend is not an HTTP server that could get the"
            " request: POST /v1/embeddings.",
            "type": "invalid_request_error",
            "param": None,
            "code": "unknown_url",
        }
    }


# The SDK


async def test_embeddings_and_audio_of_the_sdk_are_relayed(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        match request.path:
            case "/v1/embeddings":
                assert (await request.json())["model"] == "e"
                entry = {"object": "embedding", "index": 0, "embedding": [0.5]}
                return web.json_response({"object": "list", "data": [entry], "model": "e"})
            case "/v1/audio/transcriptions":
                form = await request.post()
                assert isinstance(form["file"], web.FileField)
                return web.json_response({"text": form["file"].file.read().decode()})
        return web.Response(body=b"\x00sound" * 100_000, content_type="audio/mpeg")

    async with before(answer, tmp_path) as client:
        base_url = str(client.base_url.join("/v1"))
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as sdk:
            embedded = await sdk.embeddings.create(
                model="e:plain", input="x", encoding_format="float"
            )
            transcription = await sdk.audio.transcriptions.create(
                model="w", file=("a.wav", b"la la")
            )
            spoken = await sdk.audio.speech.create(model="t", voice="alloy", input="x")
    assert embedded.data[0].embedding == [0.5]
    assert transcription.text == "la la"
    assert spoken.content == b"\x00sound" * 100_000
