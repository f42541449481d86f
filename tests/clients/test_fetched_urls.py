"""URLs in requests: fetched by the proxy from public addresses only, sent to the model as data."""

import asyncio
from pathlib import Path

import anyio
import httpx
import pytest

from policies.profile import Profile
from policies.workspace import INPUT_DIR, InputLimits
from proxy.fetch import Fetcher
from proxy.inputs import InputLoader
from proxy.models.scripted import text_reply
from proxy.profiles import Profiles
from tests.clients.test_input_files import (
    PNG,
    SUBMIT,
    complete,
    data_url,
    first_observation,
    image_part,
    print_files_script,
    texts_of,
    user,
    user_content,
)
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy
from tests.sandbox_runtime.egress.internet import Internet, Reader, Writer


async def test_public_url_is_fetched_and_private_url_is_reported(tmp_path: Path) -> None:
    async def site(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 11\r\n\r\n"
        writer.write(head + PNG)

    internet = Internet({"allowed.example": ["93.184.215.14"], "inside.example": ["10.0.0.1"]})
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    there, inside = image_part("http://allowed.example/p%20q"), image_part("http://inside.example/")
    paper = {"type": "input_file", "file_url": "http://allowed.example/paper.png"}
    async with (
        scripted_backend(print_files_script("p_q.png", "paper.png")) as backend,
        internet.server(site),
        running_proxy(backend, "memory", tmp_path, inputs=InputLoader(fetcher=fetcher)) as url,
    ):
        await complete(url, user(there, inside, paper))
    content = user_content(backend)
    fetched = {"url": data_url("image/png", PNG), "detail": "auto"}
    assert [part["image_url"] for part in content if part["type"] != "text"] == [fetched]
    assert texts_of(content) == [
        f"[The image above is the file {INPUT_DIR}/p_q.png (image/png, 11 bytes)]",
        "[http://inside.example/ was not fetched: host inside.example has no address that a sandbox"
        " may reach (it is private, reserved or the proxy's own)]",
        f"[Given file: {INPUT_DIR}/paper.png (image/png, 11 bytes)]",
    ]
    assert first_observation(backend).count("pixels") == 2


@pytest.mark.parametrize("backend_fetches", [False, True])
@pytest.mark.parametrize("model", ["fake-model", "fake-model:plain"])
async def test_file_url_is_refused(model: str, backend_fetches: bool, tmp_path: Path) -> None:
    parts = [
        image_part("file:///etc/logo.png"),
        image_part("FILE:/etc/logo.png"),
        {"type": "file", "file": {"file_url": "file:///etc/passwd"}},
        {"type": "input_file", "file_url": "file:///etc/passwd"},
        {"image_url": "file:///etc/logo.png"},  # a part without a type
    ]
    inputs = InputLoader(fetcher=Fetcher(), backend_fetches_urls=backend_fetches)
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path, inputs=inputs) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        for part in parts:
            body = {"model": model, "messages": user(part)}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "url_not_allowed"
    assert backend.requests == []


async def test_urls_are_passed_unchanged_to_a_backend_that_fetches_urls(tmp_path: Path) -> None:
    internet = Internet({"inside.example": ["10.0.0.1"]})
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    inputs = InputLoader(fetcher=fetcher, backend_fetches_urls=True)
    inside = image_part("http://inside.example/p.png")
    async with (
        scripted_backend([SUBMIT, text_reply("Seen.")]) as backend,
        running_proxy(backend, "memory", tmp_path, inputs=inputs) as url,
    ):
        await complete(url, user(inside))
        await complete(url, user(inside), model="fake-model:plain")
    assert user_content(backend)[0] == user_content(backend, 1)[0] == inside


@pytest.mark.parametrize(
    ("mime_type", "path"),
    [("text/html", "page"), ("image/svg+xml", "drawing"), ("application/octet-stream", "blob")],
)
async def test_fetched_url_that_is_no_image_becomes_a_file(
    mime_type: str, path: str, tmp_path: Path
) -> None:
    async def site(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        kind = f"Content-Type: {mime_type}\r\n".encode()
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"Content-Length: 4\r\n\r\ntext")

    internet = Internet()
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    async with (
        scripted_backend([SUBMIT]) as backend,
        internet.server(site),
        running_proxy(backend, "memory", tmp_path, inputs=InputLoader(fetcher=fetcher)) as url,
    ):
        await complete(url, user(image_part(f"http://allowed.example/{path}")))
    (note,) = user_content(backend)
    assert f"{INPUT_DIR}/{path}" in note["text"]


async def test_url_beyond_the_byte_budget_of_a_request_is_replaced_by_a_note(
    tmp_path: Path,
) -> None:
    """The files of a request's URLs share `inputs.max_total_mib`."""
    large = PNG + b"x" * (700 << 10)
    newest_is_fetched = asyncio.Event()

    async def site(reader: Reader, writer: Writer) -> None:
        is_newest = b"/new.png" in await reader.readuntil(b"\r\n\r\n")
        if not is_newest:
            await newest_is_fetched.wait()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(large) + large)
        if is_newest:
            await reader.read()  # until the fetcher has the file and closes the connection
            newest_is_fetched.set()

    internet = Internet()
    inputs = InputLoader(fetcher=Fetcher(resolve=internet.resolve, connect=internet.connect))
    profiles = Profiles.only(Profile(inputs=InputLimits(max_total_mib=1)))
    old, new = (image_part(f"http://allowed.example/{age}.png") for age in ("old", "new"))
    async with (
        scripted_backend([SUBMIT]) as backend,
        internet.server(site),
        running_proxy(backend, "memory", tmp_path, inputs=inputs, profiles=profiles) as url,
    ):
        await complete(url, user(old, new))
    content = user_content(backend)
    pictures = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    assert pictures == [data_url("image/png", large)]
    assert texts_of(content) == [
        "[http://allowed.example/old.png was not fetched: the request's files are too large"
        " together]",
        f"[The image above is the file {INPUT_DIR}/new.png (image/png, {len(large):,} bytes)]",
    ]


async def test_byte_budget_keeps_only_one_of_two_concurrently_fetched_files_that_exceed_it(
    tmp_path: Path,
) -> None:
    large = PNG + b"x" * (700 << 10)
    both_are_requested = asyncio.Barrier(2)

    async def site(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await both_are_requested.wait()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(large) + large)
        await writer.drain()

    internet = Internet()
    inputs = InputLoader(fetcher=Fetcher(resolve=internet.resolve, connect=internet.connect))
    profiles = Profiles.only(Profile(inputs=InputLimits(max_total_mib=1)))
    parts = [image_part(f"http://allowed.example/{name}.png") for name in ("a", "b")]
    async with (
        scripted_backend([SUBMIT]) as backend,
        internet.server(site),
        running_proxy(backend, "memory", tmp_path, inputs=inputs, profiles=profiles) as url,
    ):
        await complete(url, user(*parts))
    content = user_content(backend)
    pictures = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    assert pictures == [data_url("image/png", large)]
    assert sum("too large together" in text for text in texts_of(content)) == 1


async def test_stream_starts_before_the_url_is_fetched(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow_site(reader: Reader, writer: Writer) -> None:
        await release.wait()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 11\r\n\r\n"
        writer.write(head + PNG)

    internet = Internet()
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    image = image_part("http://allowed.example/p.png")
    body = {"model": "m", "messages": user(image), "stream": True}
    async with (
        scripted_backend([SUBMIT]) as backend,
        internet.server(slow_site),
        running_proxy(backend, "memory", tmp_path, inputs=InputLoader(fetcher=fetcher)) as url,
        httpx.AsyncClient(timeout=20) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        with anyio.fail_after(10):
            async for line in response.aiter_lines():
                assert "error" not in line
                release.set()
    assert texts_of(user_content(backend)) == [
        f"[The image above is the file {INPUT_DIR}/p.png (image/png, 11 bytes)]"
    ]


async def test_urls_are_not_fetched_if_the_profile_forbids_fetching(tmp_path: Path) -> None:
    internet = Internet()
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    inputs = InputLoader(fetcher=fetcher)
    profiles = Profiles.only(Profile(inputs=InputLimits(fetch_urls=False)))
    image = image_part("http://allowed.example/p.png")
    async with (
        scripted_backend([SUBMIT]) as backend,
        running_proxy(backend, "memory", tmp_path, inputs=inputs, profiles=profiles) as url,
    ):
        await complete(url, user(image))
    note = "[http://allowed.example/p.png was not fetched: URLs are not fetched here]"
    assert user_content(backend) == [{"type": "text", "text": note}]
    assert (internet.lookups, internet.dialed) == ([], [])
