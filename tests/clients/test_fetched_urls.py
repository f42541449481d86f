"""What requests name by URL: fetched by the proxy, from public addresses only, and shown to the
model as bytes."""

import asyncio
from pathlib import Path

import anyio
import httpx
import pytest

from policies.profile import Profile
from policies.workspace import INPUT_DIR, InputLimits
from proxy.fetch import Fetcher
from proxy.inputs import Inputs
from proxy.models.scripted import text_reply
from proxy.profiles import Profiles
from tests.clients.test_files_in import (
    PNG,
    SUBMIT,
    ask,
    data_url,
    heard,
    image_part,
    notes,
    observed,
    showing,
    user,
)
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy
from tests.sandbox_runtime.egress.internet import Internet, Reader, Writer


async def test_what_is_on_the_web_is_fetched_or_said_not_to_be(tmp_path: Path) -> None:
    async def site(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 11\r\n\r\n"
        writer.write(head + PNG)

    internet = Internet({"allowed.example": ["93.184.215.14"], "inside.example": ["10.0.0.1"]})
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    there, inside = image_part("http://allowed.example/p%20q"), image_part("http://inside.example/")
    paper = {"type": "input_file", "file_url": "http://allowed.example/paper.png"}
    async with (
        scripted_backend(showing("p_q.png", "paper.png")) as backend,
        internet.server(site),
        running_proxy(backend, "memory", tmp_path, inputs=Inputs(fetcher=fetcher)) as url,
    ):
        await ask(url, user(there, inside, paper))
    content = heard(backend)
    fetched = {"url": data_url("image/png", PNG), "detail": "auto"}
    assert [part["image_url"] for part in content if part["type"] != "text"] == [fetched]
    assert notes(content) == [
        f"[The image above is the file {INPUT_DIR}/p_q.png (image/png, 11 bytes)]",
        "[http://inside.example/ was not fetched: host inside.example has no address that a sandbox"
        " may reach (it is private, reserved or the proxy's own)]",
        f"[Given file: {INPUT_DIR}/paper.png (image/png, 11 bytes)]",
    ]
    assert observed(backend).count("pixels") == 2


async def test_a_local_file_of_the_backends_is_not_shown(tmp_path: Path) -> None:
    async with (
        scripted_backend([SUBMIT]) as backend,
        running_proxy(backend, "memory", tmp_path, inputs=Inputs(fetcher=Fetcher())) as url,
    ):
        await ask(url, user(image_part("file:///etc/logo.png")))
    (note,) = notes(heard(backend))
    assert note.startswith("[file:///etc/logo.png was not fetched: only http and https URLs")
    assert len(heard(backend)) == 1


async def test_a_backend_that_fetches_is_given_the_urls(tmp_path: Path) -> None:
    internet = Internet({"inside.example": ["10.0.0.1"]})
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    inputs = Inputs(fetcher=fetcher, backend_fetches=True)
    inside = image_part("http://inside.example/p.png")
    async with (
        scripted_backend([SUBMIT, text_reply("Seen.")]) as backend,
        running_proxy(backend, "memory", tmp_path, inputs=inputs) as url,
    ):
        await ask(url, user(inside))
        await ask(url, user(inside), model="fake-model:plain")
    assert heard(backend)[0] == heard(backend, 1)[0] == inside


@pytest.mark.parametrize(
    ("mime_type", "path"),
    [("text/html", "page"), ("image/svg+xml", "drawing"), ("application/octet-stream", "blob")],
)
async def test_what_is_no_picture_is_a_file_only(mime_type: str, path: str, tmp_path: Path) -> None:
    async def site(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        kind = f"Content-Type: {mime_type}\r\n".encode()
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"Content-Length: 4\r\n\r\ntext")

    internet = Internet()
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    async with (
        scripted_backend([SUBMIT]) as backend,
        internet.server(site),
        running_proxy(backend, "memory", tmp_path, inputs=Inputs(fetcher=fetcher)) as url,
    ):
        await ask(url, user(image_part(f"http://allowed.example/{path}")))
    (note,) = heard(backend)
    assert f"{INPUT_DIR}/{path}" in note["text"]


async def test_a_stream_has_begun_before_the_web_has_answered(tmp_path: Path) -> None:
    heard_of = asyncio.Event()

    async def slow_site(reader: Reader, writer: Writer) -> None:
        await heard_of.wait()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 11\r\n\r\n"
        writer.write(head + PNG)

    internet = Internet()
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    image = image_part("http://allowed.example/p.png")
    body = {"model": "m", "messages": user(image), "stream": True}
    async with (
        scripted_backend([SUBMIT]) as backend,
        internet.server(slow_site),
        running_proxy(backend, "memory", tmp_path, inputs=Inputs(fetcher=fetcher)) as url,
        httpx.AsyncClient(timeout=20) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        with anyio.fail_after(10):
            async for line in response.aiter_lines():
                assert "error" not in line
                heard_of.set()
    assert notes(heard(backend)) == [
        f"[The image above is the file {INPUT_DIR}/p.png (image/png, 11 bytes)]"
    ]


async def test_nothing_is_fetched_where_that_is_switched_off(tmp_path: Path) -> None:
    internet = Internet()
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    inputs = Inputs(fetcher=fetcher)
    profiles = Profiles.only(Profile(inputs=InputLimits(fetch_urls=False)))
    image = image_part("http://allowed.example/p.png")
    async with (
        scripted_backend([SUBMIT]) as backend,
        running_proxy(backend, "memory", tmp_path, inputs=inputs, profiles=profiles) as url,
    ):
        await ask(url, user(image))
    note = "[http://allowed.example/p.png was not fetched: URLs are not fetched here]"
    assert heard(backend) == [{"type": "text", "text": note}]
    assert (internet.lookups, internet.dialed) == ([], [])
