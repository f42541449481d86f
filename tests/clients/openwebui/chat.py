"""A person at Open WebUI's pages: what they do there, and what they see."""

from pathlib import Path

from playwright.async_api import Locator, Page, expect


class Chat:
    """One chat after the other in a browser's window."""

    def __init__(self, page: Page, url: str, pictures: Path) -> None:
        self.page = page
        self._url = url
        self._pictures = pictures

    async def begin(self, model: str) -> None:
        """Begin a chat with that model."""
        await self.page.goto(self._url)
        await self.page.get_by_role("button", name="Selected model:").click()
        await self.page.get_by_role("option", name=f"Select {model} model").click()

    async def give(self, name: str, content: bytes, mime_type: str) -> None:
        """Upload a file for the next question."""
        place = self.page.locator("input[type=file][multiple]")
        async with self.page.expect_response(lambda answer: "/api/v1/files/" in answer.url):
            await place.set_input_files({"name": name, "mimeType": mime_type, "buffer": content})

    async def ask(self, words: str) -> None:
        """Say something, and wait until it stands there."""
        await self.page.locator("#chat-input").fill(words)
        await self.page.get_by_role("button", name="Send message").click()
        await expect(self.said.nth(-2).get_by_text(words)).to_be_visible()

    async def stop(self) -> None:
        """Have the model end here."""
        await self.page.get_by_role("button", name="Stop", exact=True).click()

    async def look(self, name: str) -> None:
        """Take a picture of what is to be seen."""
        await self.page.screenshot(path=self._pictures / f"{name}.png")

    async def download(self, link: Locator) -> bytes:
        """Follow a link to a file; gives what the browser saved."""
        async with self.page.expect_download() as download:
            await link.click()
        return (await (await download.value).path()).read_bytes()

    @property
    def said(self) -> Locator:
        """All messages."""
        return self.page.get_by_role("log").get_by_role("listitem")

    @property
    def answer(self) -> Locator:
        """The last message."""
        return self.said.last

    @property
    def status(self) -> Locator:
        """The line above the last message."""
        return self.answer.get_by_role("button", name="Toggle status history")
