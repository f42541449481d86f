"""Page actions of a person who uses Open WebUI."""

from pathlib import Path

from playwright.async_api import Locator, Page, expect


class Chat:
    """Chats in one browser page."""

    def __init__(self, page: Page, url: str, pictures: Path) -> None:
        self.page = page
        self._url = url
        self._pictures = pictures

    async def start(self, model: str) -> None:
        """Start a chat with the model."""
        await self.page.goto(self._url)
        await self.page.get_by_role("button", name="Selected model:").click()
        await self.page.get_by_role("option", name=f"Select {model} model").click()

    async def upload(self, name: str, content: bytes, mime_type: str) -> None:
        """Upload a file for the next question."""
        place = self.page.locator("input[type=file][multiple]")
        async with self.page.expect_response(lambda answer: "/api/v1/files/" in answer.url):
            await place.set_input_files({"name": name, "mimeType": mime_type, "buffer": content})

    async def ask(self, words: str) -> None:
        """Send a message and wait until it is shown."""
        await self.page.locator("#chat-input").fill(words)
        await self.page.get_by_role("button", name="Send message").click()
        await expect(self.messages.nth(-2).get_by_text(words)).to_be_visible()

    async def stop(self) -> None:
        """Stop the answer."""
        await self.page.get_by_role("button", name="Stop", exact=True).click()

    async def screenshot(self, name: str) -> None:
        """Save a screenshot."""
        await self.page.screenshot(path=self._pictures / f"{name}.png", animations="disabled")

    async def download(self, link: Locator) -> bytes:
        """Click a link to a file and return what the browser saved."""
        async with self.page.expect_download() as download:
            await link.click()
        return (await (await download.value).path()).read_bytes()

    @property
    def messages(self) -> Locator:
        """All messages."""
        return self.page.get_by_role("log").get_by_role("listitem")

    @property
    def answer(self) -> Locator:
        """The last message."""
        return self.messages.last

    @property
    def status(self) -> Locator:
        """The status line above the last message."""
        return self.answer.get_by_role("button", name="Toggle status history")
