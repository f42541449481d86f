"""The command `python -m tests.clients.openwebui`: run every scenario and print the results."""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Page, async_playwright, expect

from tests.clients.locked_packages import MissingError
from tests.clients.openwebui import first_token, manual_picture
from tests.clients.openwebui.chat import Chat
from tests.clients.openwebui.environment import TIMEOUT_S, Environment
from tests.clients.openwebui.model import NAME, Model
from tests.clients.openwebui.open_webui import (
    CONNECTION_HEADERS,
    FORWARDED,
    WHOLE_FILES,
    installed_program,
    open_webui,
)
from tests.clients.openwebui.scenarios import SCENARIOS, WITH_CHAT_ID, WITHOUT_CHAT_ID, Scenario
from tests.e2e.proxy_process import serving
from tests.fakes.backend import scripted_backend
from tests.fakes.server import Kind


def main() -> int:
    """Run the scenarios and print the result of each. Return the exit code."""
    arguments = _parser().parse_args()
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    try:
        if arguments.typing:
            asyncio.run(_measure(arguments.sandbox, arguments.typing))
        elif arguments.manual:
            asyncio.run(_take_manual_picture(arguments.sandbox))
        else:
            asyncio.run(_run_all(arguments.sandbox, arguments.pictures))
    except MissingError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.openwebui", description=__doc__)
    parser.add_argument("--sandbox", choices=["bubblewrap", "docker"], default="bubblewrap")
    parser.add_argument(
        "--pictures",
        type=Path,
        default=Path("openwebui-pictures"),
        help="folder for the screenshots",
    )
    parser.add_argument(
        "--typing",
        type=int,
        metavar="ROUNDS",
        help="measure the time to the first word of an answer instead",
    )
    parser.add_argument(
        "--manual", action="store_true", help="write the picture of the manual instead"
    )
    return parser


async def _measure(kind: Kind, rounds: int) -> None:
    program = await asyncio.to_thread(installed_program)
    with tempfile.TemporaryDirectory(prefix="openwebui-") as folder:
        async with _browser_page(_browser()) as page:
            await first_token.measure(program, page, kind, Path(folder), rounds)


async def _take_manual_picture(kind: Kind) -> None:
    program = await asyncio.to_thread(installed_program)
    with tempfile.TemporaryDirectory(prefix="openwebui-") as folder:
        async with _browser_page(_browser()) as page:
            await manual_picture.take(program, page, kind, Path(folder))


def _browser() -> str:
    browser = shutil.which("chromium")
    if browser is None:
        raise MissingError("chromium is missing")
    return browser


async def _run_all(kind: Kind, pictures: Path) -> None:
    browser = _browser()
    program = await asyncio.to_thread(installed_program)
    configurations: tuple[tuple[str, Mapping[str, str], Sequence[Scenario]], ...] = (
        ("with user info headers", FORWARDED, SCENARIOS),
        ("with headers of the connection", CONNECTION_HEADERS, WITH_CHAT_ID),
        ("with neither", {}, WITHOUT_CHAT_ID),
    )
    for name, settings, scenarios in configurations:
        folder = pictures / name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        sys.stdout.write(f"{name}\n")
        async with _environment(program, browser, kind, settings, folder) as env:
            await _run(scenarios, env)


async def _run(scenarios: Sequence[Scenario], env: Environment) -> None:
    for scenario in scenarios:
        title = scenario.__name__.replace("_", " ")
        try:
            await scenario(env)
        except BaseException:
            sys.stdout.write(f"  FAILED  {title}\n")
            await env.chat.screenshot("failed")
            raise
        sys.stdout.write(f"  ok      {title}\n")
        sys.stdout.flush()


@asynccontextmanager
async def _environment(
    program: Path, browser: str, kind: Kind, settings: Mapping[str, str], pictures: Path
) -> AsyncIterator[Environment]:
    marker = f"9{os.getpid()}"
    model = Model(marker)
    with tempfile.TemporaryDirectory(prefix="openwebui-") as folder:
        home, data = Path(folder, "proxy"), Path(folder, "data")
        home.mkdir()
        async with (
            scripted_backend(model.answer, model=NAME) as backend,
            serving(home, kind, backend.base_url) as proxy,
            open_webui(program, data, proxy.url, {**settings, **WHOLE_FILES}) as url,
            _browser_page(browser) as page,
        ):
            chat = Chat(page, url, pictures)
            env = Environment(chat, proxy.url, backend, model, marker)
            own = (url, proxy.url, "data:", "blob:")
            page.on(
                "request",
                lambda request: (
                    None
                    if request.url.startswith(own)
                    else env.third_party_urls.append(request.url)
                ),
            )
            yield env


@asynccontextmanager
async def _browser_page(browser: str) -> AsyncIterator[Page]:
    expect.set_options(timeout=TIMEOUT_S * 1000)
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=browser)
        try:
            yield await chromium.new_page()
        finally:
            await chromium.close()


if __name__ == "__main__":
    sys.exit(main())
