"""Run one client program against the proxy: all scenarios, under each steps setting."""

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

from policies.steps import STEPS_MODES, StepsMode
from sandbox_runtime.errors import NoFreeSandboxError
from tests.clients.stacks.conversations import (
    DOT,
    PROMPTS,
    SHARED_SCENARIOS,
    TABLE,
    UNAVAILABLE,
    answer,
)
from tests.clients.stacks.environments import variables
from tests.fakes.backend import ScriptedBackend, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services, model_client, running_proxy, serve

TIMEOUT_S = 600
MODEL = "fake-model"
LINK = re.compile(r"http://[^\s\")]+/content\?[^\s\")]+")

Key = tuple[str, str]
"""The steps setting, and the scenario followed by the variant, if it has any."""
Seen = Mapping[Key, Any]


async def run_client(command: Sequence[str], folder: Path) -> Seen:
    """Run the program and return what it reported, with links replaced by the files they open."""
    async with scripted_backend(answer, model=MODEL) as backend, AsyncExitStack() as servers:
        urls = {
            profile: await servers.enter_async_context(_servers(backend, profile, folder / profile))
            for profile in STEPS_MODES
        }
        settings = {
            "model": MODEL,
            "urls": urls,
            "prompts": PROMPTS,
            "shared_prompts": {name: PROMPTS[name] for name in SHARED_SCENARIOS},
        }
        lines = await _lines([*command, json.dumps(settings)], folder)
        return {_key(line): await _with_links_opened(line) for line in lines}


@asynccontextmanager
async def _servers(
    backend: ScriptedBackend, profile: StepsMode, state_dir: Path
) -> AsyncIterator[dict[str, str]]:
    """Serve with bubblewrap sandboxes, with none available, and with in-memory ones."""
    none = MemorySandboxes(failure=NoFreeSandboxError(UNAVAILABLE, retry_after_s=1))
    model = model_client(backend)
    # Long enough that a backend refusal always arrives before the status is sent.
    settings: dict[str, Any] = {"steps": profile, "status_wait_s": 30.0, "status_hold_s": 30.0}
    try:
        async with (
            running_proxy(backend, "bubblewrap", state_dir / "work", **settings) as work,
            running_proxy(backend, "memory", state_dir / "others", **settings) as others,
            serve(make_services(model, none, state_dir / "none", **settings)) as unavailable,
        ):
            addresses = {"work": work, "unavailable": unavailable, "others": others}
            yield {name: f"{url}/v1" for name, url in addresses.items()}
    finally:
        await model.aclose()


async def _lines(command: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    with anyio.fail_after(TIMEOUT_S):
        done = await anyio.run_process(command, check=False, cwd=folder, env=variables(folder))
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _key(line: Mapping[str, Any]) -> Key:
    return line["profile"], line["scenario"]


async def _with_links_opened(line: Mapping[str, Any]) -> Any:
    """Return what the client saw or raised, with each link replaced by its file's name."""
    text = json.dumps({name: line[name] for name in line if name not in ("profile", "scenario")})
    # Ignore os.environ: pytest changes it in another thread meanwhile.
    async with httpx.AsyncClient(trust_env=False) as browser:
        for link in sorted(set(LINK.findall(text)), key=len, reverse=True):
            text = text.replace(link, _file_name(await browser.get(link)))
    return json.loads(text)


def _file_name(found: httpx.Response) -> str:
    names = {TABLE: "<table.csv>", DOT: "<dot.gif>"}
    return names.get(found.content, f"<{found.status_code}: {found.content.hex()}>")
