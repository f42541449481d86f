"""Take the picture of the manual: the script of the demo, answered in Open WebUI."""

from pathlib import Path

from playwright.async_api import Page, expect

from tests.clients.openwebui.chat import Chat
from tests.clients.openwebui.open_webui import FORWARDED, NO_TASKS, open_webui
from tests.fakes.server import Kind, demo_proxy

PICTURE = Path(__file__).parents[3] / "docs" / "guides" / "images" / "open-webui.png"
QUESTION = "How many primes are there below a million?"


async def take(program: Path, page: Page, kind: Kind, home: Path) -> None:
    """Ask the question, open the card of the first command and save the picture."""
    PICTURE.parent.mkdir(exist_ok=True)
    settings = {**FORWARDED, **NO_TASKS}
    async with (
        demo_proxy(kind, home / "proxy") as proxy,
        open_webui(program, home / "data", proxy, settings) as url,
    ):
        await page.set_viewport_size({"width": 1000, "height": 1230})
        chat = Chat(page, url, PICTURE.parent)
        await chat.start("demo-script")
        await chat.ask(QUESTION)
        await expect(chat.status).to_have_text("3 steps, 2 files")
        answer = chat.answer
        await answer.get_by_role("button", name="Toggle details").first.click()
        await answer.get_by_text("View Result from execute_bash").first.click()
        await expect(answer.get_by_text("python3 primes.py")).to_be_visible()
        await expect(answer.get_by_text("78498")).to_be_visible()
        await expect(page.get_by_text("You're now logged in.")).to_be_hidden()
        await chat.screenshot(PICTURE.stem)
