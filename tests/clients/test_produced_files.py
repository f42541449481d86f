"""Produced files over HTTP: signed links, keys, download headers, ranges and hostile file names."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.artifacts import ArtifactLimits
from policies.profile import Profile
from proxy.files import FileStore
from proxy.models.scripted import call, tool_reply
from proxy.profiles import Profiles
from tests.fakes.backend import by_history, scripted_backend
from tests.fakes.manual_clock import ManualClock
from tests.fakes.server import Kind, running_proxy, single_key
from tests.stores import open_store

KEY = "sk-right"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "Files, please."}]}
SUBMIT = call("submit", answer="Done.")
DENIED = {
    "error": {
        "message": "This link has expired or is not one of ours.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
}


class ProducedFiles:
    """The files of a run, and a browser without a key."""

    def __init__(self, url: str, browser: httpx.AsyncClient, sandbox: dict[str, Any]) -> None:
        self.url = url
        self.browser = browser
        self.sandbox = sandbox
        """The `sandbox` object of the answer."""
        self.files: list[dict[str, Any]] = sandbox["files"]

    def link(self, filename: str) -> httpx.URL:
        (found,) = [file["url"] for file in self.files if file["filename"] == filename]
        return httpx.URL(found)


@asynccontextmanager
async def finished_run(
    calls: list[Mapping[str, Any]], state_dir: Path, kind: Kind = "memory", **changes: Any
) -> AsyncIterator[ProducedFiles]:
    """Serve a run that made the given calls."""
    script = by_history([tool_reply(*calls, SUBMIT)])
    with anyio.fail_after(20):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, kind, state_dir, keyring=single_key(KEY), **changes) as url,
            httpx.AsyncClient() as browser,
        ):
            path = f"{url}/v1/chat/completions"
            answer = await browser.post(path, json=BODY, headers=WITH_KEY)
            yield ProducedFiles(url, browser, answer.json()["sandbox"])


@asynccontextmanager
async def produced(
    texts: dict[str, str], state_dir: Path, **changes: Any
) -> AsyncIterator[ProducedFiles]:
    """Serve a run that produced the given files."""
    calls: list[Mapping[str, Any]] = [
        call("str_replace_editor", command="create", path=f"/testbed/output/{name}", file_text=text)
        for name, text in texts.items()
    ]
    async with finished_run(calls, state_dir, **changes) as made:
        yield made


def disposition(answer: httpx.Response) -> tuple[str, str | None]:
    """Return "inline" or "attachment", and the file name that a browser uses."""
    message = Message()
    message["content-disposition"] = answer.headers["content-disposition"]
    return message.get_content_disposition() or "", message.get_filename()


# Who may open them


async def test_signed_link_opens_without_a_key(tmp_path: Path) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        answer = await made.browser.get(made.link("note.txt"))
    assert (answer.status_code, answer.content) == (200, b"hello\n")
    assert answer.headers["content-length"] == "6"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    "change",
    [
        {"exp": None, "sig": None},
        {"sig": None},
        {"exp": None},
        {"sig": ""},
        {"sig": "0" * 64},
        {"sig": "\N{SNOWMAN}"},
        {"exp": "99999999999"},
        {"exp": "9" * 5000},
        {"exp": "-1"},
        {"exp": "+1795280929"},
        {"exp": "\N{ARABIC-INDIC DIGIT NINE}" * 10},
        {"exp": "nan"},
        {"exp": "0"},
    ],
)
async def test_link_with_a_wrong_signature_or_expiry_is_refused(
    change: dict[str, str | None], tmp_path: Path
) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        link = made.link("note.txt")
        params = {**dict(link.params), **change}
        kept = {key: value for key, value in params.items() if value is not None}
        answer = await made.browser.get(link.copy_with(params=kept))
    assert (answer.status_code, answer.json()) == (401, DENIED)


async def test_signature_of_another_file_is_refused(tmp_path: Path) -> None:
    async with produced({"a.txt": "a", "b.txt": "b"}, tmp_path) as made:
        a, b = made.link("a.txt"), made.link("b.txt")
        answer = await made.browser.get(b.copy_with(params=a.params))
    assert (answer.status_code, answer.json()) == (401, DENIED)


async def test_signed_link_expires_before_its_file(tmp_path: Path) -> None:
    clock, began = ManualClock(), time.time()
    store = open_store(tmp_path, now=lambda: began + clock.time())
    limits = ArtifactLimits(retention_hours=1)
    files, profiles = FileStore(store, limits=limits), Profiles.only(Profile(artifacts=limits))
    async with produced({"note.txt": "hello\n"}, tmp_path, files=files, profiles=profiles) as made:
        link = made.link("note.txt")
        clock.advance(1800)
        container = link.path.partition("/files/")[0]
        used = await made.browser.get(made.url + container, headers=WITH_KEY)
        clock.advance(1801)
        answer = await made.browser.get(link)
        with_key = await made.browser.get(link, headers=WITH_KEY)
    assert used.status_code == 200
    assert (answer.status_code, answer.json()) == (401, DENIED)
    assert with_key.content == b"hello\n"


async def test_produced_file_opens_with_the_key_but_not_with_a_wrong_key(tmp_path: Path) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        bare = made.link("note.txt").copy_with(query=None)
        answer = await made.browser.get(bare, headers=WITH_KEY)
        wrong = await made.browser.get(bare, headers={"authorization": "Bearer sk-wrong"})
    assert answer.content == b"hello\n"
    assert (wrong.status_code, wrong.json()) == (401, DENIED)


async def test_links_to_produced_files_start_with_the_public_url(tmp_path: Path) -> None:
    public = "https://sandbox.example/llm/"
    async with produced({"note.txt": "hello\n"}, tmp_path, public_url=public) as made:
        link = str(made.link("note.txt"))
        local = link.replace("https://sandbox.example/llm", made.url)
        answer = await made.browser.get(local)
    assert link.startswith("https://sandbox.example/llm/v1/containers/cntr_")
    assert answer.content == b"hello\n"


async def test_links_remain_valid_after_a_restart(tmp_path: Path) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        link = made.link("note.txt")
    async with produced({"other.txt": "other\n"}, tmp_path) as made:
        again = link.copy_with(port=httpx.URL(made.url).port)
        assert (await made.browser.get(again)).content == b"hello\n"


# What a browser may do with them


@pytest.mark.parametrize(
    ("filename", "expected_disposition"),
    [
        ("page.html", "attachment"),
        ("page.HTM", "attachment"),
        ("page.xhtml", "attachment"),
        ("chart.svg", "attachment"),
        ("feed.xml", "attachment"),
        ("code.js", "attachment"),
        ("paper.pdf", "attachment"),
        ("data.csv", "attachment"),
        ("no-extension", "attachment"),
        ("picture.png", "inline"),
        ("photo.jpeg", "inline"),
        ("note.txt", "inline"),
    ],
)
async def test_active_content_is_served_as_an_attachment(
    filename: str, expected_disposition: str, tmp_path: Path
) -> None:
    async with produced({filename: "<script>alert(1)</script>"}, tmp_path) as made:
        answer = await made.browser.get(made.link(filename))
    assert disposition(answer) == (expected_disposition, filename)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"
    assert answer.headers["cache-control"].startswith("private")


async def test_head_request_for_a_produced_file_returns_its_headers_only(tmp_path: Path) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        link = made.link("note.txt")
        head, got = await made.browser.head(link), await made.browser.get(link)
    assert (head.status_code, head.content) == (200, b"")
    own = ("date", "x-request-id")
    headers = {name: value for name, value in got.headers.items() if name not in own}
    assert {name: value for name, value in head.headers.items() if name not in own} == headers


@pytest.mark.parametrize(
    ("byte_range", "status", "content"),
    [
        ("bytes=2-4", 206, b"llo"),
        ("bytes=-3", 206, b"lo\n"),
        ("bytes=3-", 206, b"lo\n"),
        ("bytes=0-99", 206, b"hello\n"),
    ],
)
async def test_byte_range_of_a_produced_file_is_served(
    byte_range: str, status: int, content: bytes, tmp_path: Path
) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        answer = await made.browser.get(made.link("note.txt"), headers={"range": byte_range})
    assert (answer.status_code, answer.content) == (status, content)
    assert answer.headers["content-range"].endswith("/6")


async def test_byte_range_beyond_the_end_is_refused(tmp_path: Path) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        answer = await made.browser.get(made.link("note.txt"), headers={"range": "bytes=6-"})
    assert answer.status_code == 416


# Odd names and odd paths


@pytest.mark.parametrize(
    ("filename", "shown"),
    [
        ("with space.txt", "with space.txt"),
        *[(name, name) for name in ("gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n \N{SNOWMAN}.txt",)],
        ('say "hi".txt', 'say "hi".txt'),
        ("it's; filename=evil.txt", "it's; filename=evil.txt"),
        ("new\nline\r\nSet-Cookie: a=b.txt", "new_line__Set-Cookie: a=b.txt"),
        ("back\\slash.txt", "back_slash.txt"),
        ("%2e%2e%2fpercent.txt", "%2e%2e%2fpercent.txt"),
        ("tab\tbell\a.txt", "tab_bell_.txt"),
        ("photo\N{RIGHT-TO-LEFT OVERRIDE}txt.exe", "photo_txt.exe"),
        ("..txt", "..txt"),
        ("-rf.txt", "-rf.txt"),
        (f"{'long' * 60}.txt", f"{'long' * 60}.txt"),
    ],
)
async def test_file_with_an_unusual_name_opens_under_a_sanitized_name(
    filename: str, shown: str, tmp_path: Path
) -> None:
    async with produced({filename: "hello\n"}, tmp_path) as made:
        answer = await made.browser.get(made.link(shown))
    assert (answer.status_code, answer.content) == (200, b"hello\n")
    assert disposition(answer)[1] == shown
    assert "set-cookie" not in answer.headers


async def test_file_whose_name_is_not_utf_8_opens(tmp_path: Path) -> None:
    command = call("execute_bash", command=r"printf 'hello\n' > $'output/\xff\xfe.txt'")
    async with finished_run([command], tmp_path, kind="bubblewrap") as made:
        (file,) = made.files
        answer = await made.browser.get(file["url"])
    assert answer.content == b"hello\n"
    assert file["filename"].endswith(".txt")


async def test_files_of_the_same_name_in_two_folders_are_both_served(tmp_path: Path) -> None:
    async with produced({"x/same.txt": "one", "y/same.txt": "two"}, tmp_path) as made:
        texts = [(await made.browser.get(file["url"])).text for file in made.files]
    assert [file["path"] for file in made.files] == [
        "/testbed/output/x/same.txt",
        "/testbed/output/y/same.txt",
    ]
    assert [file["filename"] for file in made.files] == ["same.txt", "same-2.txt"]
    assert texts == ["one", "two"]


@pytest.mark.parametrize(
    ("container", "file"),
    [
        ("cntr_unknown", "cfile_unknown"),
        ("%2e%2e", ".secret"),
        ("%2e", "%2esecret"),
        ("{container}", "%2e%2e"),
        ("{container}", "%2e%2e%2f.secret"),
        ("{container}", "{file}.json"),
        ("{container}", "{file}%00"),
        ("{container}", "%2fetc%2fpasswd"),
        ("{container}", "\N{SNOWMAN}"),
        ("{container}", "c" * 5000),
        ("c" * 5000, "{file}"),
        ("%2fetc", "passwd"),
        ("{container}", "_"),
    ],
)
async def test_link_with_path_traversal_is_not_found(
    container: str, file: str, tmp_path: Path
) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        _, _, _, own_container, _, own_file, _ = made.link("note.txt").path.split("/")
        place = f"{container}/files/{file}".format(container=own_container, file=own_file)
        url = f"{made.url}/v1/containers/{place}/content"
        answer = await made.browser.get(url, headers=WITH_KEY)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_put_to_a_produced_file_is_refused(tmp_path: Path) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        answer = await made.browser.put(made.link("note.txt"), content=b"other")
    assert answer.status_code == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"
