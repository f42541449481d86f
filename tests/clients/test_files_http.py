"""Produced files over HTTP: who may open them, and what a browser may do with them."""

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
from proxy.store.store import Store
from tests.fakes.backend import by_history, scripted_backend
from tests.fakes.manual_clock import ManualClock
from tests.fakes.server import Kind, running_proxy, single_key

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


class ProducedFile:
    """What a run left, and a browser that has no key."""

    def __init__(self, url: str, browser: httpx.AsyncClient, told: dict[str, Any]) -> None:
        self.url = url
        self.browser = browser
        self.told = told
        """The answer's `sandbox`."""
        self.files: list[dict[str, Any]] = told["files"]

    def link(self, filename: str) -> httpx.URL:
        (found,) = [file["url"] for file in self.files if file["filename"] == filename]
        return httpx.URL(found)


@asynccontextmanager
async def run_of(
    calls: list[Mapping[str, Any]], state_dir: Path, kind: Kind = "memory", **changes: Any
) -> AsyncIterator[ProducedFile]:
    """A server on which the calls were made."""
    script = by_history([tool_reply(*calls, SUBMIT)])
    with anyio.fail_after(20):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, kind, state_dir, keyring=single_key(KEY), **changes) as url,
            httpx.AsyncClient() as browser,
        ):
            path = f"{url}/v1/chat/completions"
            answer = await browser.post(path, json=BODY, headers=WITH_KEY)
            yield ProducedFile(url, browser, answer.json()["sandbox"])


@asynccontextmanager
async def produced(
    texts: dict[str, str], state_dir: Path, **changes: Any
) -> AsyncIterator[ProducedFile]:
    """A server on which these files were made."""
    calls: list[Mapping[str, Any]] = [
        call("str_replace_editor", command="create", path=f"/testbed/output/{name}", file_text=text)
        for name, text in texts.items()
    ]
    async with run_of(calls, state_dir, **changes) as made:
        yield made


def disposition(answer: httpx.Response) -> tuple[str, str | None]:
    """inline or attachment, and the name under which a browser keeps the file."""
    message = Message()
    message["content-disposition"] = answer.headers["content-disposition"]
    return message.get_content_disposition() or "", message.get_filename()


# Who may open them


async def test_a_link_opens_without_the_key(tmp_path: Path) -> None:
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
async def test_a_link_that_is_not_whole_is_refused(
    change: dict[str, str | None], tmp_path: Path
) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        link = made.link("note.txt")
        params = {**dict(link.params), **change}
        kept = {key: value for key, value in params.items() if value is not None}
        answer = await made.browser.get(link.copy_with(params=kept))
    assert (answer.status_code, answer.json()) == (401, DENIED)


async def test_a_signature_opens_its_own_file_alone(tmp_path: Path) -> None:
    async with produced({"a.txt": "a", "b.txt": "b"}, tmp_path) as made:
        a, b = made.link("a.txt"), made.link("b.txt")
        answer = await made.browser.get(b.copy_with(params=a.params))
    assert (answer.status_code, answer.json()) == (401, DENIED)


async def test_a_link_expires_also_when_its_file_is_still_there(tmp_path: Path) -> None:
    clock, began = ManualClock(), time.time()
    store = Store(tmp_path, now=lambda: began + clock.time())
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


async def test_the_key_opens_without_a_link_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        bare = made.link("note.txt").copy_with(query=None)
        answer = await made.browser.get(bare, headers=WITH_KEY)
        wrong = await made.browser.get(bare, headers={"authorization": "Bearer sk-wrong"})
    assert answer.content == b"hello\n"
    assert (wrong.status_code, wrong.json()) == (401, DENIED)


async def test_links_lead_where_the_server_says_that_it_is_reached(tmp_path: Path) -> None:
    public = "https://sandbox.example/llm/"
    async with produced({"note.txt": "hello\n"}, tmp_path, public_url=public) as made:
        link = str(made.link("note.txt"))
        local = link.replace("https://sandbox.example/llm", made.url)
        answer = await made.browser.get(local)
    assert link.startswith("https://sandbox.example/llm/v1/containers/cntr_")
    assert answer.content == b"hello\n"


async def test_links_hold_after_a_restart(tmp_path: Path) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        link = made.link("note.txt")
    async with produced({"other.txt": "other\n"}, tmp_path) as made:
        again = link.copy_with(port=httpx.URL(made.url).port)
        assert (await made.browser.get(again)).content == b"hello\n"


# What a browser may do with them


@pytest.mark.parametrize(
    ("filename", "way"),
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
async def test_what_could_act_on_our_origin_is_a_download(
    filename: str, way: str, tmp_path: Path
) -> None:
    async with produced({filename: "<script>alert(1)</script>"}, tmp_path) as made:
        answer = await made.browser.get(made.link(filename))
    assert disposition(answer) == (way, filename)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"
    assert answer.headers["cache-control"].startswith("private")


async def test_head_tells_of_the_file_without_sending_it(tmp_path: Path) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        link = made.link("note.txt")
        head, got = await made.browser.head(link), await made.browser.get(link)
    assert (head.status_code, head.content) == (200, b"")
    own = ("date", "x-request-id")
    told = {name: value for name, value in got.headers.items() if name not in own}
    assert {name: value for name, value in head.headers.items() if name not in own} == told


@pytest.mark.parametrize(
    ("asked", "status", "content"),
    [
        ("bytes=2-4", 206, b"llo"),
        ("bytes=-3", 206, b"lo\n"),
        ("bytes=3-", 206, b"lo\n"),
        ("bytes=0-99", 206, b"hello\n"),
    ],
)
async def test_a_part_of_a_file_can_be_asked_for(
    asked: str, status: int, content: bytes, tmp_path: Path
) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        answer = await made.browser.get(made.link("note.txt"), headers={"range": asked})
    assert (answer.status_code, answer.content) == (status, content)
    assert answer.headers["content-range"].endswith("/6")


async def test_a_part_beyond_the_end_cannot_be_had(tmp_path: Path) -> None:
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
async def test_an_oddly_named_file_opens_under_its_name_as_far_as_that_is_safe(
    filename: str, shown: str, tmp_path: Path
) -> None:
    async with produced({filename: "hello\n"}, tmp_path) as made:
        answer = await made.browser.get(made.link(shown))
    assert (answer.status_code, answer.content) == (200, b"hello\n")
    assert disposition(answer)[1] == shown
    assert "set-cookie" not in answer.headers


async def test_a_name_that_is_no_text_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    command = call("execute_bash", command=r"printf 'hello\n' > $'output/\xff\xfe.txt'")
    async with run_of([command], tmp_path, kind="bubblewrap") as made:
        (file,) = made.files
        answer = await made.browser.get(file["url"])
    assert answer.content == b"hello\n"
    assert file["filename"].endswith(".txt")


async def test_files_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
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
async def test_no_path_leads_out_of_the_produced_files(
    container: str, file: str, tmp_path: Path
) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        _, _, _, own_container, _, own_file, _ = made.link("note.txt").path.split("/")
        place = f"{container}/files/{file}".format(container=own_container, file=own_file)
        url = f"{made.url}/v1/containers/{place}/content"
        answer = await made.browser.get(url, headers=WITH_KEY)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_files_cannot_be_written_over_http(tmp_path: Path) -> None:
    async with produced({"note.txt": "hello\n"}, tmp_path) as made:
        answer = await made.browser.put(made.link("note.txt"), content=b"other")
    assert answer.status_code == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"
