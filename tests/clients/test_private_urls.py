"""Requests sent straight to the backend must not make it fetch private URLs."""

import gzip
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from proxy.fetch import Fetcher
from proxy.inputs import InputLoader
from proxy.models.scripted import text_reply
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy
from tests.sandbox_runtime.egress.internet import Internet

SPELLINGS = [
    "http://127.0.0.1/",
    "http://127.1/",
    "http://0177.0.0.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0/",
    "http://[::1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[0:0:0:0:0:ffff:7f00:1]/",
    "http://[fe80::1%25eth0]/",
    "http://10.0.0.1:8080/",
    "http://192.168.1.1/",
    "http://169.254.169.254/latest/meta-data",
    "http://user@127.0.0.1/",
    "http://inside.example/",
    "http://inside.example./",
    "HTTP://INSIDE.EXAMPLE/",
    "http://\uff11\uff12\uff17.0.0.1/",
    "http://127.0.0.1\\@allowed.example/",
    "http://unknown.example/",
    "http://100.64.0.1/",
    "http://0.0.0.0/",
]

JSON_TYPE = {"Content-Type": "application/json"}


def chat(url: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}]}


def responses(url: str) -> dict[str, Any]:
    content = [{"type": "input_image", "image_url": url}]
    return {"input": [{"role": "user", "content": content}]}


def messages(url: str) -> dict[str, Any]:
    content = [{"type": "image", "source": {"type": "url", "url": url}}]
    return {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}


APIS = {
    "chat/completions": chat,
    "responses": responses,
    "messages": messages,
    "score": lambda url: {"data_1": {"content": [{"image_url": {"url": url}}]}},
    "embeddings": chat,
}


async def post_url(tmp_path: Path, path: str, url: str) -> tuple[int, Any, int]:
    """Return the status, the error code, and the number of backend requests."""
    internet = Internet({"inside.example": ["10.0.0.1"], "allowed.example": ["93.184.215.14"]})
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    body = {"model": "fake-model:plain", **APIS[path](url)}
    async with (
        scripted_backend([text_reply("Seen.")]) as backend,
        running_proxy(backend, "memory", tmp_path, inputs=InputLoader(fetcher=fetcher)) as base,
        httpx.AsyncClient(base_url=f"{base}/v1/", timeout=30) as client,
    ):
        answer = await client.post(path, json=body)
        error = answer.json().get("error") if answer.status_code == 400 else None
    return answer.status_code, error and error.get("code"), len(backend.requests)


@pytest.mark.parametrize("url", SPELLINGS)
async def test_private_address_is_refused_in_every_spelling(url: str, tmp_path: Path) -> None:
    assert await post_url(tmp_path, "chat/completions", url) == (400, "url_not_allowed", 0)


@pytest.mark.parametrize("path", APIS)
async def test_private_address_is_refused_by_every_api(path: str, tmp_path: Path) -> None:
    code, _, requests = await post_url(tmp_path, path, "http://10.0.0.1/secret.png")
    assert (code, requests) == (400, 0)


@pytest.mark.parametrize("path", [*(f"/v1/{path}" for path in APIS), "/pooling"])
async def test_private_address_is_relayed_by_every_api_to_a_backend_that_fetches_urls(
    path: str, tmp_path: Path
) -> None:
    make = APIS.get(path.removeprefix("/v1/"), chat)
    body = {"model": "fake-model:plain", "store": False, **make("http://10.0.0.1/secret.png")}
    bodies: list[Any] = []

    async def record(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({})

    async with (
        scripted_backend([text_reply("Seen.")], elsewhere=record) as backend,
        running_proxy(
            backend, "memory", tmp_path, inputs=InputLoader(backend_fetches_urls=True)
        ) as base,
        httpx.AsyncClient(base_url=base, timeout=30) as client,
    ):
        answer = await client.post(path, json=body)
    bodies += [request.body for request in backend.requests]
    assert (answer.status_code, len(bodies)) == (200, 1)
    assert str(bodies).count("http://10.0.0.1/secret.png") == 1


def escaped(body: dict[str, Any]) -> bytes:
    return json.dumps(body).replace(":plain", r"\u003aplain").encode()


def utf_16(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode("utf-16-le")


@pytest.mark.parametrize("content_of", [escaped, utf_16])
@pytest.mark.parametrize("path", [*APIS, "messages/count_tokens"])
async def test_private_address_in_a_plain_request_is_refused_in_any_json_encoding(
    path: str, content_of: Callable[[dict[str, Any]], bytes], tmp_path: Path
) -> None:
    make = APIS.get(path, messages)
    body = {"model": "fake-model:plain", "store": False, **make("http://10.0.0.1/secret.png")}
    seen: list[str] = []

    async def record(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response({})

    async with (
        scripted_backend([], elsewhere=record) as backend,
        running_proxy(backend, "memory", tmp_path) as base,
        httpx.AsyncClient(base_url=f"{base}/v1/", headers=JSON_TYPE, timeout=30) as client,
    ):
        answer = await client.post(path, content=content_of(body))
    assert (answer.status_code, seen, backend.requests) == (400, [], [])


PRIVATE = b'{"model": "m", "messages": [{"content": [{"image_url": {"url": "http://10.0.0.1/"}}]}]'
PRIVATE_FIELD = b'{"model": "m", "image_data": "http://10.0.0.1/"'
ESCAPED = PRIVATE_FIELD.replace(b"image_data", rb"image\u005fdata")
P = "http://10.0.0.1/p.png"
FETCHED: dict[str, Any] = {
    "a leading blank": {"image_url": " \t" + P},
    "a tab inside": {"image_url": "ht\ttp://10.0.0.1/p.png"},
    "one slash": {"image_url": "http:/10.0.0.1/p.png"},
    "generate": {"text": "x", "image_data": P},
    "lists": {"text": ["x"], "image_data": [[P], []]},
    "a sound": {"audio_data": P},
    "a type in its field": {"image_url": {"url": P, "type": "web_search"}},
    "a source": {"source": {"type": "web_fetch", "url": P}},
    "a list of URLs": {"messages": [{"content": [{"type": "audio_url", "audio_url": [P]}]}]},
    "a part's url": {"messages": [{"content": [{"type": "image", "url": P}]}]},
    "an item of embeddings": {"input": [{"text": "x", "image": P}]},
    "documents": {"documents": ["x", {"image": P}]},
    "pictures as input": {"modality": "image", "input": [P]},
    "Markdown": {"inputs": f"See ![]({P}) there."},
    "a file": {"image_data": "file:///etc/passwd"},
    "a path": {"image_data": "/etc/passwd"},
    "a relative path": {"video_url": {"url": "../secret/film.mp4"}},
    "a result of a search": {"messages": [{"type": "web_search", "content": [{"image_url": P}]}]},
}


@pytest.mark.parametrize("case", FETCHED)
async def test_private_address_is_refused_in_every_fetched_field(case: str, tmp_path: Path) -> None:
    content_of = json.dumps({"model": "m", **FETCHED[case]}).encode()
    assert await relay_body(tmp_path, content_of, JSON_TYPE) == (400, [])


TEXTS: dict[str, Any] = {
    "embeddings": {"input": ["http://10.0.0.1/", "file:///etc"], "user": P},
    "rerank": {"query": P, "documents": [P, {"text": P, "title": P, "url": P}]},
    "a schema": {
        "tools": [{"function": {"parameters": {"examples": [{"image_url": P}]}}}],
        "response_format": {"json_schema": {"schema": {"default": P}}},
        "text": {"format": {"schema": {"examples": [P]}}},
    },
    "an input schema": {"tools": [{"input_schema": {"examples": [P]}}]},
    "a call": {
        "messages": [
            {"content": [{"type": "tool_use", "input": {"image_url": P}}]},
            {"tool_calls": [{"function": {"arguments": {"url": P}}}]},
        ]
    },
    "a search": {
        "input": [
            {"type": "web_search_call", "action": {"type": "open_page", "url": P}},
            {"type": "message", "content": [{"text": "x", "annotations": [{"url": P}]}]},
        ]
    },
    "documents": {
        "messages": [
            {"content": [{"type": "document", "source": {"type": "text", "data": f"{P}\nsays"}}]},
            {"content": [{"type": "search_result", "source": P, "content": []}]},
        ],
        "documents": [{"id": P, "link": P, "snippet": P}],
    },
    "what bounds an answer": {
        "bad_words": ["http://"],
        "guided_regex": "https://[a-z]+",
        "guided_json": {"$schema": P},
        "format": {"$schema": P},
        "logit_bias": [["http://", -100]],
    },
    "code": {"input_prefix": P, "input_suffix": P},
    "Markdown": {
        "prompt": f"![]({P})",
        "inputs": f"See [it]({P}), ![](data:image/png;base64,aGk=)",
    },
    "data": {"images": ["/9j/4AAQSkZJRg==", "iVBORw0KGgo="], "image_url": "data:image/png,x.y"},
}


@pytest.mark.parametrize("case", TEXTS)
async def test_url_in_a_field_that_is_not_fetched_is_relayed(case: str, tmp_path: Path) -> None:
    content_of = json.dumps({"model": "m", **TEXTS[case]}).encode()
    assert await relay_body(tmp_path, content_of, JSON_TYPE) == (200, [len(content_of)])


@pytest.mark.parametrize(
    "content", [b"{no json", PRIVATE_FIELD + b', "x": ' + b"1" * 5000 + b"}", b'{"x": 1} {}']
)
async def test_unreadable_json_is_not_relayed(content: bytes, tmp_path: Path) -> None:
    code, lengths = await relay_body(tmp_path, content, JSON_TYPE, code=None)
    assert (code, lengths) == (400, [])


async def test_public_url_is_relayed(tmp_path: Path) -> None:
    code, _, requests = await post_url(
        tmp_path, "chat/completions", "https://allowed.example/p.png"
    )
    assert (code, requests) == (200, 1)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "What is at http://127.0.0.1/?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
    ],
)
async def test_data_url_and_text_that_mentions_a_private_address_are_relayed(
    part: dict[str, Any], tmp_path: Path
) -> None:
    body = {"model": "fake-model:plain", "messages": [{"role": "user", "content": [part]}]}
    async with (
        scripted_backend([text_reply("Seen.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as base,
        httpx.AsyncClient(base_url=base, timeout=30) as client,
    ):
        answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, len(backend.requests)) == (200, 1)


FILLED = b', "text": "' + b"x" * (18 << 20) + b'"}'


async def relay_body(
    tmp_path: Path,
    content: Any,
    headers: dict[str, str],
    code: str | None = "url_not_allowed",
    *,
    backend_fetches_urls: bool = False,
) -> tuple[int, list[int]]:
    """Return the status, and the lengths of the complete bodies that reached the backend."""
    lengths: list[int] = []
    inputs = InputLoader(max_total_mib=1, backend_fetches_urls=backend_fetches_urls)

    async def record(request: web.Request) -> web.Response:
        lengths.append(len(await request.read()))
        return web.json_response({})

    async with (
        scripted_backend([], elsewhere=record) as backend,
        running_proxy(backend, "memory", tmp_path, inputs=inputs) as base,
        httpx.AsyncClient(base_url=base, timeout=30) as client,
    ):
        answer = await client.post("/pooling", content=content, headers=headers)
    if answer.status_code == 400:
        assert answer.json()["error"]["code"] == code
    return answer.status_code, lengths


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (PRIVATE + FILLED, JSON_TYPE),
        (FILLED.replace(b",", b"{", 1)[:-1] + b"," + PRIVATE[1:] + b"}", JSON_TYPE),
        (PRIVATE + b"}", {"Content-Type": "text/plain"}),
        (PRIVATE + b"}", {"Content-Type": "multipart/x"}),
        (PRIVATE + b"}", {}),
        (PRIVATE.replace(b'l":', b'l"' + b" " * 999 + b":") + FILLED, JSON_TYPE),
        (PRIVATE.replace(b"url", rb"\u0075rl") + FILLED, JSON_TYPE),
        (PRIVATE_FIELD + FILLED, JSON_TYPE),
        (PRIVATE_FIELD.replace(b'"http', rb'"\n\u0020ht\ttp') + FILLED, JSON_TYPE),
        (PRIVATE_FIELD.replace(b"http", rb"h\u0074tp") + FILLED, JSON_TYPE),
        (PRIVATE_FIELD.replace(b"http://10.0.0.1", b"file:///etc") + b"}", {}),
        ((PRIVATE + FILLED).decode().encode("utf-16-le"), JSON_TYPE),
        (gzip.compress(PRIVATE + b"}", mtime=0), {**JSON_TYPE, "Content-Encoding": "gzip"}),
    ],
)
async def test_private_url_in_an_unparsed_body_is_refused_unless_the_backend_fetches_urls(
    content: bytes, headers: dict[str, str], tmp_path: Path
) -> None:
    assert await relay_body(tmp_path, content, headers) == (400, [])
    status, lengths = await relay_body(tmp_path, content, headers, backend_fetches_urls=True)
    assert (status, len(lengths)) == (200, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("body", [PRIVATE, ESCAPED])
async def test_private_url_that_spans_body_chunks_is_refused(
    body: bytes, size: int, tmp_path: Path
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    assert await relay_body(tmp_path, pieces(), {}) == (400, [])


@pytest.mark.parametrize(
    "content",
    [
        rb'{"input": ["See http://10.0.0.1/, <a href=\"http://x\">\n http://x"'
        + b', "\\u00e9\\u4e2d"'
        + FILLED[10:-1]
        + b"]}",
        b'{"input": [' + b"1, " * 300_000 + b"2]}",
        b"\0\1\2\3" * 1000,
        b'{"outputs": [{"parameters": {"binary_data": true}}]}\0\1',
    ],
)
async def test_long_body_without_urls_is_relayed(content: bytes, tmp_path: Path) -> None:
    is_json = content[:1] == b"{" and b"\0" not in content
    headers = JSON_TYPE if is_json else {"Content-Type": "application/octet-stream"}
    status_code, lengths = await relay_body(tmp_path, content, headers)
    assert (status_code, lengths) == (200, [len(content)])


async def test_private_url_in_an_assistant_message_is_refused(
    tmp_path: Path,
) -> None:
    part = {"type": "image_url", "image_url": {"url": P}}
    said = [{"role": "assistant", "content": [part]}, {"role": "user", "content": "What is it?"}]
    async with (
        scripted_backend([text_reply("Seen.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as base,
        httpx.AsyncClient(base_url=base, timeout=30) as client,
    ):
        body = {"model": "fake-model", "messages": said}
        answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, backend.requests) == (400, [])
    assert answer.json()["error"]["code"] == "url_not_allowed"
