"""`sandbox-eval report` writes report.html: hostile texts are text, nothing is loaded, and a large
report has its samples on pages of their own. A browser, if there is one, uses the viewer."""

import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from evaluation.results import Failure, Result, Trajectory
from evaluation.samples import Draft, Suite, write_suite
from tests.evaluation.evaluation_process import sample, sandbox_eval, sums
from tests.evaluation.made_results import plain, trajectory, with_sandbox, write

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")

HOSTILE = (
    "</script></template></pre><script>alert('x')</script><img src=x onerror=alert(1)>\"'&{{7*7}}"
)
BACKWARDS = "\N{RIGHT-TO-LEFT OVERRIDE}"
COMMAND = "cat /testbed/documents/a.txt"


class Page(HTMLParser):
    """The elements and the texts of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(self.html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements with a name."""
        return [attributes for name, attributes in self.elements if name == tag]


async def report(output: Path) -> str:
    """Run the command. Return its messages."""
    ended = await sandbox_eval("report", output)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def hostile_suite(home: Path) -> Suite:
    fields = sample(problem=f"{HOSTILE} problem", ground_truth=HOSTILE, grader="text")
    drafts = [Draft(fields, {"a.txt": HOSTILE})]
    return write_suite(home / "synthetic", "synthetic", drafts, licence=HOSTILE, source=HOSTILE)


def hostile_records() -> list[tuple[Result, Trajectory | None]]:
    model = {"model": f"model {HOSTILE}"}
    broken = plain("sum/0", f"{BACKWARDS}{HOSTILE}", finish_reason=HOSTILE, **model)
    failed = Failure(status=500, code=HOSTILE, message=HOSTILE)
    right = with_sandbox("sum/0", HOSTILE, failures=[failed], **model)
    steps = {
        "tool": HOSTILE,
        "arguments": {HOSTILE: HOSTILE},
        "observation": f"\x1b[31m{HOSTILE}",
    }
    made = trajectory(
        right,
        reasoning=HOSTILE,
        steps=[steps],
        files=[{"path": HOSTILE, "size_bytes": 1}],
        warnings=[HOSTILE],
    )
    return [(broken, None), (right, made)]


async def test_html_report_shows_hostile_texts_as_escaped_text(tmp_path: Path) -> None:
    write(tmp_path / "output", hostile_suite(tmp_path / "data"), hostile_records())
    await report(tmp_path / "output")
    page = Page(tmp_path / "output" / "report.html")
    assert len(page.of("script")) == 1
    assert page.of("img") == []
    assert [
        name for _, attributes in page.elements for name in attributes if name[:2] == "on"
    ] == []
    assert len(page.of("template")) == page.html.count("</template>") == 1
    # problem, right answer, file, reasoning, observation, answers, warning, error, model …
    assert sum(HOSTILE in text for text in page.texts) >= 12
    assert BACKWARDS not in page.html
    assert "\x1b" not in page.html
    assert "\N{REPLACEMENT CHARACTER}[31m" in page.html


async def test_html_report_loads_and_links_nothing_outside_itself(tmp_path: Path) -> None:
    write(tmp_path / "output", hostile_suite(tmp_path / "data"), hostile_records())
    await report(tmp_path / "output")
    page = Page(tmp_path / "output" / "report.html")
    loading = ("src", "srcset", "href", "action", "data", "poster", "background", "style")
    links = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in loading
    ]
    assert links
    assert all(link and link.startswith("#") for link in links)
    assert page.of("link") == page.of("iframe") == page.of("object") == []
    styles = page.html.partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"url\(|@import|https?:", styles)
    (policy,) = [each["content"] for each in page.of("meta") if "http-equiv" in each]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")


async def test_html_report_has_the_tables_of_the_markdown_report(tmp_path: Path) -> None:
    records = [
        (plain("sum/0", "Answer: 0"), None),
        (with_sandbox("sum/0", "1"), None),
        (with_sandbox("sum/0", "0", model="other-model"), None),
    ]
    write(tmp_path / "output", sums(tmp_path / "data"), records)
    await report(tmp_path / "output")
    page = Page(tmp_path / "output" / "report.html")
    markdown = (tmp_path / "output" / "report.md").read_text(encoding="utf-8")
    cells = {
        cell.strip().strip("`")
        for line in markdown.splitlines()
        if line.startswith("| ") and "---" not in line
        for cell in line.split("|")[1:-1]
    }
    assert {"100.0", "0.0", "-100.0"} <= cells
    assert cells - {text.strip() for text in page.texts} == set()
    head = [each for each in page.of("th") if each.get("scope")]
    assert len(head) == len(page.of("th"))
    assert len(page.of("caption")) == len(page.of("table")) - 1  # the list of the samples


async def test_html_report_says_if_the_results_have_no_turns(tmp_path: Path) -> None:
    right = with_sandbox("sum/0", "0")
    records = [(plain("sum/0", "0"), None), (right, trajectory(right, COMMAND))]
    write(tmp_path / "output", sums(tmp_path / "data"), records)
    await report(tmp_path / "output")
    page = Page(tmp_path / "output" / "report.html")
    assert sum("The results do not have the turns" in text for text in page.texts) == 1


async def test_html_report_truncates_a_long_text_with_a_marker(tmp_path: Path) -> None:
    answer = "x" * 30_000
    write(tmp_path / "output", sums(tmp_path / "data"), [(plain("sum/0", answer), None)])
    await report(tmp_path / "output")
    html = (tmp_path / "output" / "report.html").read_text(encoding="utf-8")
    assert "[10,000 characters left out]" in html
    assert "1 texts longer than 20,000 characters are shortened" in html


async def test_large_html_report_has_its_samples_on_separate_pages(tmp_path: Path) -> None:
    suite, output = sums(tmp_path / "data", 20), tmp_path / "output"
    # Each answer is the only text of its sample that is shortened.
    results = [with_sandbox(each.id, "y" * 20_001) for each in suite.samples]
    commands = [f"echo {number} {'x' * 19_000}" for number in range(50)]
    write(output, suite, [(each, trajectory(each, *commands)) for each in results])
    assert f"20 samples on pages in {output}/report-samples" in await report(output)
    page = Page(output / "report.html")
    assert len(page.html) < 200_000
    assert "20 texts longer than 20,000 characters are shortened" in page.html
    assert page.of("template") == []
    links = [each["href"] for each in page.of("a") if str(each["href"]).startswith("report-")]
    assert len(links) == 20
    for link in links:
        of_sample = Page(output / str(link))
        assert "echo 49 x" in of_sample.html
        assert of_sample.of("script") == []
    write(output, suite, [(each, trajectory(each, "ls")) for each in results])
    assert "20 samples in the page" in await report(output)
    assert list((output / "report-samples").iterdir()) == []


# In a browser


def filtered_records(suite: Suite) -> list[tuple[Result, Trajectory | None]]:
    """Return results of two domains. The sandbox is right, plain is wrong."""
    records: list[tuple[Result, Trajectory | None]] = []
    for each in suite.samples:
        right = with_sandbox(each.id, f"Answer: {each.ground_truth}")
        records.append((right, trajectory(right, COMMAND, "echo second")))
        records.append((plain(each.id, "Answer: -1"), None))
    return records


@asynccontextmanager
async def opened(page_file: Path, **options: Any) -> AsyncIterator[Any]:
    """Open a page in Chromium. Fail if it requests anything else or reports an error."""
    playwright_api = pytest.importorskip("playwright.async_api", reason="there is no browser")
    if (browser := shutil.which("chromium")) is None:
        pytest.skip("there is no browser")
    async with playwright_api.async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=browser)
        page = await chromium.new_page(**options)
        requests: list[str] = []
        faults: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))

        async def dismiss(dialog: Any) -> None:
            faults.append(dialog.message)
            await dialog.dismiss()

        page.on("dialog", dismiss)
        await page.goto(page_file.as_uri())
        yield page
        await chromium.close()
    assert (requests, faults) == ([page_file.as_uri()], [])


async def shown_rows(page: Any) -> Sequence[str]:
    return [text.strip() for text in await page.locator("#rows tr:visible th").all_inner_texts()]


async def test_viewer_can_filter_samples_and_open_one(tmp_path: Path) -> None:
    drafts = [
        Draft(sample(number, domain="sums" if number < 3 else "others")) for number in range(5)
    ]
    data = tmp_path / "data" / "synthetic"
    suite = write_suite(data, "synthetic", drafts, licence="none", source="a test")
    write(tmp_path / "output", suite, filtered_records(suite))
    await report(tmp_path / "output")
    async with opened(tmp_path / "output" / "report.html") as page:
        assert await shown_rows(page) == [f"sum/{number}" for number in range(5)]
        await page.get_by_role("combobox", name="domain").select_option("others")
        assert await shown_rows(page) == ["sum/3", "sum/4"]
        await page.get_by_role("combobox", name="grade").select_option("wrong")
        assert await page.locator("#shown").inner_text() == "2"
        await page.get_by_role("combobox", name="mode").select_option("sandbox")
        assert await shown_rows(page) == []
        await page.get_by_role("combobox", name="grade").select_option("right")
        await page.get_by_role("searchbox", name="problem").fill("/4")
        assert await shown_rows(page) == ["sum/4"]
        await page.get_by_role("button", name="sum/4").press("Enter")
        dialog = page.get_by_role("dialog")
        assert await dialog.locator("pre.command").all_inner_texts() == [COMMAND, "echo second"]
        assert await dialog.locator("pre.answer").all_inner_texts() == ["Answer: -1", "Answer: 8"]
        assert page.url.endswith("#sample-5")
        await page.keyboard.press("Escape")
        assert await page.get_by_role("dialog").count() == 0
        await page.get_by_role("button", name="Reset").click()
        await page.locator("#rows tr:visible").nth(4).wait_for()
        await page.get_by_role("button", name="sum/0").click()
        await page.get_by_role("button", name="Next").click()
        assert await dialog.get_by_role("heading", name="sum/1").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_html_report_fits_the_width_of_a_phone(scheme: str, tmp_path: Path) -> None:
    suite = sums(tmp_path / "data", 3)
    write(tmp_path / "output", suite, filtered_records(suite))
    await report(tmp_path / "output")
    size = {"width": 360, "height": 640}
    page_file = tmp_path / "output" / "report.html"
    async with opened(page_file, viewport=size, color_scheme=scheme) as page:
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        await page.get_by_role("button", name="sum/0").click()
        content = page.locator("#content")
        assert await content.evaluate("each => each.scrollWidth - each.clientWidth") == 0
        colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (colour == "rgb(255, 255, 255)") == (scheme == "light")


async def test_browser_shows_hostile_texts_and_runs_none_of_them(tmp_path: Path) -> None:
    write(tmp_path / "output", hostile_suite(tmp_path / "data"), hostile_records())
    await report(tmp_path / "output")
    async with opened(tmp_path / "output" / "report.html") as page:
        await page.get_by_role("button", name="sum/0").click()
        assert await page.get_by_role("dialog").get_by_text(HOSTILE).count() >= 8
