"""Measure the time from Enter to the first word on Open WebUI's page.

Compares plain requests with runs, for a model that writes a token in 0.2 s.
"""

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from playwright.async_api import Page, expect

from bench.first_token import CALL_MODEL, PROSE_MODEL, StreamTimer, question, run_slow_model
from tests.clients.openwebui.chat import Chat
from tests.clients.openwebui.open_webui import FORWARDED, NO_TASKS, open_webui
from tests.e2e.proxy_process import serving
from tests.fakes.server import Kind

WORD = "word0"
"""The first word that the model writes."""
WATCH = """word => {
  window.seen = new Promise(resolve => {
    let began = 0
    const now = () => (performance.timeOrigin + performance.now()) / 1000
    const enter = event => { if (event.key === 'Enter') began = now() }
    document.addEventListener('keydown', enter, true)
    new MutationObserver((_, observer) => {
      const log = document.querySelector('[role=log]')
      if (began && log && log.textContent.includes(word)) {
        observer.disconnect()
        resolve([began, now()])
      }
    }).observe(document.body, {subtree: true, childList: true, characterData: true})
  })
}"""
"""Records when Enter was pressed and when the word was shown."""
MODELS = (f"{PROSE_MODEL}:plain", PROSE_MODEL, CALL_MODEL)


async def measure(program: Path, page: Page, kind: Kind, home: Path, rounds: int) -> None:
    """Measure `rounds` times and print the table."""
    clock = StreamTimer()
    took: dict[str, list[float]] = {row: [] for name in MODELS for row in _rows(name)}
    async with _chat(program, page, kind, home, clock) as chat:
        for number in range(rounds + 1):  # the first round is a warm-up
            for name in MODELS:
                began, seen = await _ask(chat, name, clock)
                turn = clock.asked_at + time.time() - time.perf_counter()
                if number:
                    for row, since in zip(_rows(name), (began, turn), strict=True):
                        took[row].append(seen - since)
    plain = [median(took[row]) for row in _rows(MODELS[0])]
    for name in MODELS:
        for row, least in zip(_rows(name), plain, strict=True):
            found = took[row]
            timing = f"{median(found):.2f} s ({min(found):.2f} to {max(found):.2f})"
            sys.stdout.write(f"{row:36} {timing}, plain + {median(found) - least:.2f} s\n")


def _rows(model: str) -> tuple[str, str]:
    return f"{model}: since Enter", f"{model}: since the model's turn"


@asynccontextmanager
async def _chat(
    program: Path, page: Page, kind: Kind, home: Path, clock: StreamTimer
) -> AsyncIterator[Chat]:
    own = home / "proxy"
    own.mkdir()
    settings = {**FORWARDED, **NO_TASKS}
    async with (
        run_slow_model(clock) as model,
        serving(own, kind, model.base_url) as proxy,
        open_webui(program, home / "data", proxy.url, settings) as url,
    ):
        yield Chat(page, url, home)


async def _ask(chat: Chat, model: str, clock: StreamTimer) -> tuple[float, float]:
    """Return when the question was sent and when the answer was first shown."""
    await chat.start(model)
    await chat.page.evaluate(WATCH, WORD)
    await chat.page.locator("#chat-input").fill(question())
    await chat.page.keyboard.press("Enter")
    began, seen = await chat.page.evaluate("window.seen")
    await chat.stop()
    await expect(chat.page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()
    return began, seen
