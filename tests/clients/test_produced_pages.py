"""Files of a model opened in a browser cannot act on this origin, whatever route serves them."""

import io
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.message import Message
from pathlib import Path

import anyio
import httpx
import pytest

from policies.artifacts import ArtifactLimits
from policies.profile import Profile
from proxy.profiles import Profiles
from tests.clients.test_produced_files import WITH_KEY, produced

SCRIPT = "<script>fetch('/v1/files').then(alert)</script>"
PAGES = {
    "page.html": SCRIPT,
    "page.HTM": SCRIPT,
    "page.xhtml": f'<html xmlns="http://www.w3.org/1999/xhtml">{SCRIPT}</html>',
    "chart.svg": f'<svg xmlns="http://www.w3.org/2000/svg">{SCRIPT}</svg>',
    "feed.xml": f'<x xmlns:h="http://www.w3.org/1999/xhtml"><h:script/>{SCRIPT}</x>',
    "style.xsl": SCRIPT,
    "paper.pdf": "%PDF-1.7 /OpenAction << /S /JavaScript /JS (app.alert(1)) >>",
    "page.mhtml": SCRIPT,
    "worker.js": "self.onfetch = () => {}",
    "no-extension": SCRIPT,
    "page.html\n": SCRIPT,
}
HARMLESS = {"note.txt": SCRIPT, "picture.png": SCRIPT}
ROUTES = ("link", "key", "range", "ranges", "head", "upload", "put in", "zip by link", "zip by key")


@asynccontextmanager
async def answers(
    route: str, texts: dict[str, str], state_dir: Path
) -> AsyncIterator[list[httpx.Response]]:
    """Yield the answers that a browser gets for the files."""
    with anyio.fail_after(20):
        async with produced(texts, state_dir) as made:
            links = [httpx.URL(file["url"]) for file in made.files]
            fetch = made.browser.get
            bare = [link.copy_with(query=None) for link in links]
            files = f"{made.url}/v1/files"
            match route:
                case "link":
                    yield [await fetch(link) for link in links]
                case "head":
                    yield [await made.browser.head(link) for link in links]
                case "key":
                    yield [await fetch(link, headers=WITH_KEY) for link in bare]
                case "range" | "ranges":
                    asked = {"range": "bytes=0-3" if route == "range" else "bytes=0-3,6-8"}
                    yield [await fetch(link, headers=asked) for link in links]
                case "upload" | "put in":
                    place = files if route == "upload" else bare[0].path.rpartition("/cfile")[0]
                    sent = [
                        await made.browser.post(
                            httpx.URL(made.url).join(place),
                            headers=WITH_KEY,
                            data={"purpose": "user_data"},
                            files={"file": (name, text.encode(), "text/html")},
                        )
                        for name, text in texts.items()
                    ]
                    places = [f"{answer.request.url}/{answer.json()['id']}" for answer in sent]
                    yield [await fetch(f"{each}/content", headers=WITH_KEY) for each in places]
                case _:
                    container = str(bare[0]).partition("/files/")[0]
                    details = (await fetch(container, headers=WITH_KEY)).json()
                    by_key = await fetch(f"{container}/files/content", headers=WITH_KEY)
                    yield [by_key if route == "zip by key" else await fetch(details["zip_url"])]


def content_disposition(answer: httpx.Response) -> str:
    message = Message()
    message["content-disposition"] = answer.headers["content-disposition"]
    return str(message.get_content_disposition())


@pytest.mark.parametrize("route", ROUTES)
async def test_produced_page_is_downloaded_as_an_attachment_under_a_sandbox_csp(
    route: str, tmp_path: Path
) -> None:
    async with answers(route, PAGES, tmp_path) as found:
        assert len(found) == (1 if route.startswith("zip") else len(PAGES))
        for answer in found:
            assert answer.status_code in (200, 206)
            assert content_disposition(answer) == "attachment"
            assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cache-control"].startswith("private")
        if route.startswith("zip"):
            names = zipfile.ZipFile(io.BytesIO(found[0].content)).namelist()
            assert len(set(names)) == len(PAGES)
            assert all(map(str.isprintable, names))


@pytest.mark.parametrize("route", ["link", "key", "upload", "put in"])
async def test_text_and_image_files_are_shown_inline_with_their_declared_types(
    route: str, tmp_path: Path
) -> None:
    async with answers(route, HARMLESS, tmp_path) as found:
        assert {answer.headers["content-type"] for answer in found} == {
            "text/plain; charset=utf-8",
            "image/png",
        }
        for answer in found:
            assert content_disposition(answer) == "inline"
            assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"
            assert answer.headers["x-content-type-options"] == "nosniff"


async def test_produced_files_that_are_not_returned_are_listed_with_the_reason(
    tmp_path: Path,
) -> None:
    limits = ArtifactLimits(max_files=1, deny_types=("text/html", ".svg"))
    texts = {"a.html": "x", "b.svg": "x", "c.csv": "x", "d.csv": "xyz"}
    async with produced(texts, tmp_path, profiles=Profiles.only(Profile(artifacts=limits))) as made:
        assert [file["filename"] for file in made.files] == ["c.csv"]
        assert made.sandbox["files_left_out_count"] == 3
        assert made.sandbox["files_left_out"] == [
            {"path": "/testbed/output/a.html", "bytes": 1, "why": "type_not_allowed"},
            {"path": "/testbed/output/b.svg", "bytes": 1, "why": "type_not_allowed"},
            {"path": "/testbed/output/d.csv", "bytes": 3, "why": "too_many"},
        ]
