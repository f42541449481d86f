"""Input files and artifacts are limited by the profile of the request."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from policies.artifacts import ArtifactLimits
from proxy.config import parse
from proxy.fetch import Fetcher
from proxy.files import FileStore
from proxy.inputs import InputLoader
from proxy.models.scripted import call, tool_reply
from proxy.profiles import build_profiles
from tests.clients.chat_http import http_client, post_chat
from tests.fakes.backend import by_history, scripted_backend
from tests.fakes.manual_clock import ManualClock
from tests.fakes.server import running_proxy
from tests.sandbox_runtime.egress.internet import Internet, Reader, Writer
from tests.stores import open_store

TREE: dict[str, Any] = {
    "profiles": {
        "small": {
            "inputs": {"max_file_mib": 1, "max_total_mib": 2},
            "artifacts": {"inline_image_kib": 0, "retention_hours": 1},
        },
    },
}
SMALL, STRICT = {"x-sandbox-profile": "small"}, {"x-sandbox-profile": "strict"}
PICTURE = call(
    "str_replace_editor", command="create", path="/testbed/output/a.png", file_text="pixels"
)
SUBMIT = call("submit", answer="Done.")
LINKED_IMAGE = {"type": "image_url", "image_url": {"url": "http://allowed.example/p.png"}}


@asynccontextmanager
async def served(state_dir: Path, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        scripted_backend(by_history([tool_reply(PICTURE, SUBMIT)])) as backend,
        running_proxy(
            backend,
            "memory",
            state_dir,
            profiles=build_profiles(parse(TREE, "c.yaml")),
            **changes,
        ) as url,
        http_client(url) as http,
    ):
        yield http


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "Look."}, *parts]}]


def file(kib: int, fill: bytes = b"x") -> dict[str, Any]:
    data = base64.b64encode(fill * (kib << 10)).decode()
    return {"type": "file", "file": {"filename": "a.bin", "file_data": data}}


@pytest.mark.parametrize(
    ("headers", "files", "status"),
    [
        (SMALL, [file(1024)], 200),
        (SMALL, [file(1025)], 413),
        (SMALL, [file(1024), file(1024, b"y"), file(1, b"z")], 413),
        ({}, [file(1025)], 200),
    ],
)
async def test_profile_limits_the_input_file_size(
    headers: dict[str, str], files: list[Any], status: int, tmp_path: Path
) -> None:
    async with served(tmp_path) as http:
        response = await post_chat(http, headers, messages=user(*files))
    assert response.status_code == status
    if status == 413:
        words = response.json()["error"]["message"]
        assert "may have 1 MiB, and all together 2 MiB" in words


async def test_profile_decides_whether_urls_are_fetched(tmp_path: Path) -> None:
    fetched: list[bytes] = []

    async def site(reader: Reader, writer: Writer) -> None:
        fetched.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 2\r\n\r\nok")

    internet = Internet({"allowed.example": ["93.184.215.14"]})
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    async with (
        internet.server(site),
        served(tmp_path, inputs=InputLoader(fetcher=fetcher)) as http,
    ):
        strict = await post_chat(http, STRICT, messages=user(LINKED_IMAGE))
        assert (strict.status_code, fetched) == (200, [])
        await post_chat(http, messages=user(LINKED_IMAGE))
        assert len(fetched) == 1


async def test_profile_decides_inline_images_and_link_expiry(tmp_path: Path) -> None:
    clock = ManualClock()
    files = FileStore(open_store(tmp_path, now=clock.time), limits=ArtifactLimits())
    async with served(tmp_path, files=files) as http:
        small, default = [(await post_chat(http, headers)).json() for headers in (SMALL, {})]
    now = int(clock.time())
    assert [link_expiry(answer) - now for answer in (small, default)] == [3600, 24 * 3600]
    assert "images" not in small["choices"][0]["message"]
    assert len(default["choices"][0]["message"]["images"]) == 1


def link_expiry(answer: Any) -> int:
    return int(httpx.URL(answer["sandbox"]["files"][0]["url"]).params["exp"])
