"""Malformed request bodies: refused with an OpenAI error, or read as their sender meant them."""

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest

from proxy.inputs import InputLoader
from proxy.models.scripted import text_reply
from proxy.schemas.validation import MAX_MESSAGES
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy
from tests.stores import stored_blobs

CHAT, FILES = "/v1/chat/completions", "/v1/files"
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "Hello."}]}'
TEXT = BODY.decode()
DEEP = 100_000
MAX_READ_BYTES = 2 << 20
"""Size of the start of a body that the server has read when it finds too many values, at most."""
LONG = "x" * (18 << 20)
PURPOSE = b'content-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
FILE = b'content-disposition: form-data; name="file"; filename="a.txt"\r\n\r\nhello\r\n'
FORM_TYPE = "multipart/form-data; boundary=b"

REFUSED: Mapping[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "two": BODY + BODY,
    "cut off": BODY[:-1],
    "a control character": BODY.replace(b"Hello", b"\x01"),
    "an endless integer": BODY[:-1] + b', "seed": ' + b"9" * 5000 + b"}",
    "a large integer": BODY[:-1] + b', "temperature": ' + b"9" * 400 + b"}",
    "no number": BODY[:-1] + b', "metadata": [NaN]}',
    "no finite number": BODY[:-1] + b', "metadata": [-1e999]}',
    "a name twice": BODY[:-1] + b', "messages": 7}',
    "compressed": gzip.compress(BODY),
    "not UTF-8": BODY.replace(b"Hello", b"\xff"),
    "overlong UTF-8": BODY.replace(b"Hello", b"\xc0\x80"),
    "a wrong mark of order": b"\xff\xfe" + BODY,
    "zeros": b"\0" * 64,
}
TOO_LARGE: Mapping[str, tuple[bytes, str]] = {
    "deep lists": (
        b'{"model": "m", "messages": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        "64 levels",
    ),
    "deep objects": (b'{"x": ' * DEEP + b"1" + b"}" * DEEP, "64 levels"),
    "a deep schema": (
        BODY[:-1]
        + b', "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": '
        + b'{"items": ' * 400
        + b"{}"
        + b"}" * 403,
        "64 levels",
    ),
    "many objects": (b'{"model": "m", "messages": [' + b"{}," * 250_000, "200,000 values"),
    "many blanks": (b" " * (9 << 20) + BODY, "8 MiB outside its strings"),
}
READ: Mapping[str, bytes] = {
    "a mark of order": b"\xef\xbb\xbf" + BODY,
    "UTF-16": TEXT.encode("utf-16"),
    "UTF-32": TEXT.encode("utf-32"),
    "half a surrogate pair": BODY.replace(b"Hello", b"\\ud800"),
    "a zero": BODY.replace(b"Hello", b"\\u0000"),
    "a right one after a wrong one": b'{"messages": 7, ' + BODY[1:],
    "blanks": b" \r\n\t" * 1000 + BODY + b"\n" * 1000,
}


def form(*parts: bytes, before: bytes = b"", after: bytes = b"--b--\r\n") -> bytes:
    return before + b"".join(b"--b\r\n" + part for part in parts) + after


def with_filename(name: bytes) -> bytes:
    return FILE.replace(b"a.txt", name)


REFUSED_FORMS: Mapping[str, bytes] = {
    "nothing": b"",
    "no parts": form(),
    "no end": form(PURPOSE, FILE, after=b""),
    "words before": form(PURPOSE, FILE, before=b"words\r\n"),
    "bare line feeds": form(PURPOSE, FILE).replace(b"\r\n", b"\n"),
    "a bad header": form(PURPOSE, b"no colon\r\n" + FILE),
    "a long header": form(PURPOSE, b"x: " + b"x" * 100_000 + b"\r\n" + FILE),
    "many headers": form(PURPOSE, b"x: x\r\n" * 5000 + FILE),
    "many fields": form(*[PURPOSE.replace(b"purpose", b"%d" % each) for each in range(500)]),
    "two files": form(PURPOSE, FILE, FILE),
    "a file without a name": form(PURPOSE, FILE.replace(b'; filename="a.txt"', b"")),
    "a purpose of no letters": form(PURPOSE.replace(b"user_data", b"\xff\0"), FILE),
    "a deep expiry": form(
        PURPOSE.replace(b"purpose", b"expires_after").replace(b"user_data", b"[" * 50_000), FILE
    ),
}
KEPT_FORMS: Mapping[str, tuple[bytes, str]] = {
    "words behind": (form(PURPOSE, FILE, after=b"--b--\r\nwords"), "a.txt"),
    "a part without a name": (form(PURPOSE, FILE, b"\r\nhello\r\n"), "a.txt"),
    "a zero in a name": (form(PURPOSE, with_filename(b"a\0b")), "a\0b"),
    "bytes in a name": (form(PURPOSE, with_filename(b"\xff.txt")), "�.txt"),
    "no name": (form(PURPOSE, with_filename(b"")), "upload"),
}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        scripted_backend(lambda body: text_reply("Well.")) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


def is_bad_request(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    return (answer.status_code, error.keys(), error["type"]) == (
        400,
        {"message", "type", "param", "code"},
        "invalid_request_error",
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_json_is_refused(stream: bool, client: httpx.AsyncClient) -> None:
    for name, body in REFUSED.items():
        sent = body.replace(b'"m"', b'"m", "stream": true', 1) if stream else body
        assert is_bad_request(await client.post(CHAT, content=sent)), name


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_json_with_too_many_values_is_refused_with_413(
    name: str, client: httpx.AsyncClient
) -> None:
    """Without the bound, 60 MB of empty objects blocked the event loop for half a minute."""
    body, bound = TOO_LARGE[name]
    for path in (CHAT, "/v1/responses", "/v1/messages"):
        answer = await client.post(path, content=body)
        message = answer.json()["error"]["message"]
        assert (answer.status_code, message) == (413, f"The request body has more than {bound}.")


TOO_LONG = "The request body has more than 17 MiB."
OPENAI_REFUSAL = {
    "error": {
        "message": TOO_LONG,
        "type": "invalid_request_error",
        "param": None,
        "code": "request_too_large",
    }
}
ANTHROPIC_REFUSAL = {
    "type": "error",
    "error": {"type": "request_too_large", "message": TOO_LONG},
}


@pytest.mark.parametrize(
    ("path", "content", "refusal"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, OPENAI_REFUSAL),
        ("/v1/responses", {"input": LONG}, OPENAI_REFUSAL),
        (
            "/v1/messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": LONG}]},
            ANTHROPIC_REFUSAL,
        ),
    ],
)
async def test_body_above_the_size_limit_is_refused_in_the_error_shape_of_its_api(
    path: str, content: Mapping[str, object], refusal: Mapping[str, object], tmp_path: Path
) -> None:
    """The limit is 4/3 of `inputs.max_total_mib` and 16 MiB."""
    body = json.dumps({"model": "m", **content}).encode()
    async with (
        scripted_backend(lambda body: text_reply("Well.")) as backend,
        running_proxy(backend, "memory", tmp_path, inputs=InputLoader(max_total_mib=1)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        refused = await client.post(path, content=body)
        accepted = await client.post(path, content=body.replace(LONG.encode(), b"Hello."))
    assert refused.status_code == 413
    assert {**refused.json(), **refusal} == refused.json()
    assert accepted.status_code == 200, accepted.text
    assert len(backend.requests) == 1


async def test_body_of_empty_objects_is_refused_while_it_is_being_sent(
    client: httpx.AsyncClient,
) -> None:
    """A body of 60 MB once blocked the event loop for half a minute and took 3.5 GB."""
    piece = b"{}," * 20_000
    start = b'{"model": "m", "messages": ['
    head = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Length: {60 * 10**6}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    answer = asyncio.ensure_future(reader.read(1 << 16))
    sent = 0
    tracemalloc.start()
    try:
        writer.write(head + start)
        while not answer.done() and sent < MAX_READ_BYTES:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            assert (await client.get("/health")).status_code == 200
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        writer.transport.abort()
    assert answer.done()
    assert answer.result().startswith(b"HTTP/1.1 413 ")
    assert peak < 4 * MAX_READ_BYTES
    assert (await client.post(CHAT, content=BODY)).status_code == 200


async def test_json_in_unusual_encodings_is_read(client: httpx.AsyncClient) -> None:
    for name, body in READ.items():
        answer = await client.post(CHAT, content=body)
        assert (name, answer.status_code) == (name, 200)
        assert answer.json()["choices"][0]["message"]["content"] == "Well."


@pytest.mark.parametrize("kind", ["text/xml", "application/json; charset=latin-1", "", "x"])
async def test_json_is_read_whatever_its_content_type(kind: str, client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, content=BODY, headers={"content-type": kind})
    assert answer.status_code == 200


async def test_chunked_body_is_read(client: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for each in BODY:
            yield bytes([each])

    assert (await client.post(CHAT, content=pieces())).status_code == 200


async def test_malformed_form_is_refused_and_stores_nothing(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    for name, body in REFUSED_FORMS.items():
        answer = await client.post(FILES, content=body, headers={"content-type": FORM_TYPE})
        assert is_bad_request(answer), name
    for kind in ("multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed", "x"):
        body = form(PURPOSE, FILE)
        assert is_bad_request(
            await client.post(FILES, content=body, headers={"content-type": kind})
        ), kind
    assert (await client.get(FILES)).json()["data"] == []
    assert stored_blobs(tmp_path) == {}


async def test_form_with_unusual_parts_is_stored(client: httpx.AsyncClient) -> None:
    for name, (body, filename) in KEPT_FORMS.items():
        answer = await client.post(FILES, content=body, headers={"content-type": FORM_TYPE})
        assert (name, answer.status_code) == (name, 200)
        assert answer.json()["filename"] == filename
        content = await client.get(f"{FILES}/{answer.json()['id']}/content")
        assert content.content == b"hello"


@pytest.mark.parametrize(
    ("path", "field", "others"),
    [
        (CHAT, "messages", {}),
        ("/v1/messages", "messages", {"max_tokens": 9}),
        ("/v1/responses", "input", {}),
    ],
)
async def test_number_of_messages_has_a_limit(
    client: httpx.AsyncClient, path: str, field: str, others: Mapping[str, int]
) -> None:
    messages = [{"role": "user", "content": "Hello."}] * (MAX_MESSAGES + 1)
    body = {"model": "m", **others}
    refused = await client.post(path, json={**body, field: messages})
    accepted = await client.post(path, json={**body, field: messages[1:]})
    assert refused.status_code == 400
    assert f"Invalid '{field}': array too long." in refused.json()["error"]["message"]
    assert accepted.status_code == 200, accepted.text


async def test_lone_surrogate_never_causes_a_server_error(
    client: httpx.AsyncClient,
) -> None:
    half = "\ud800"
    file = {"file_id": half, "filename": half, "file_data": half}
    tool = {"type": "function", "function": {"name": half, "parameters": {half: half}}}
    call = {"id": half, "type": "function", "function": {"name": half, "arguments": half}}
    odd: list[dict[str, object]] = [
        {"model": half},
        {"sandbox": {"session": half, "steps": half}},
        {"metadata": {half: half, "session_id": half}},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": half}}},
        {"response_format": {"type": half}},
        {"stop": [half], "user": half, half: half},
        {"messages": [{"role": half, "name": half, "content": [{"type": "file", "file": file}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [call], "content": half}]},
        {"messages": [{"role": "tool", "tool_call_id": f"call_{half}_1", "content": half}]},
    ]
    for fields in odd:
        body = json.dumps({**json.loads(BODY), **fields}).encode()
        for headers in ({}, {"Idempotency-Key": f"{fields}"}):
            answer = await client.post(CHAT, content=body, headers=headers)
            assert answer.status_code in (200, 400), fields
    for fields in ({"name": half}, {"name": "x", "file_ids": [half]}, {"name": "x", half: half}):
        answer = await client.post("/v1/containers", content=json.dumps(fields).encode())
        assert answer.status_code in (200, 404), fields


async def test_lone_surrogate_never_breaks_stored_responses_and_conversations(
    client: httpx.AsyncClient,
) -> None:
    half = "\ud800"
    message = {"role": "user", "content": half, "id": half}
    odd: list[dict[str, object]] = [
        {"model": half},
        {"previous_response_id": half},
        {"conversation": half},
        {"input": [message, {**message, "id": "\udfff"}, {**message, "id": "?"}]},
        {"input": [{"type": "item_reference", "id": "missing" + half}]},
    ]
    for number, fields in enumerate(odd):
        key = {"Idempotency-Key": str(number)}
        body = json.dumps({"model": "m", "input": "x", **fields}).encode()
        answer = await client.post("/v1/responses", content=body, headers=key)
        assert answer.status_code in (200, 400, 404), fields
    body = json.dumps({"items": [message], "metadata": {half: half}}).encode()
    assert (await client.post("/v1/conversations", content=body)).status_code == 200
