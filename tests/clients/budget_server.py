"""Run a server that enforces daily budgets, with a clock that the test sets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx

from policies.artifacts import ArtifactLimits
from policies.budgets import DAY_S, Budgets, DailyBudget, Expense
from policies.limits import Limits
from policies.prices import Price
from policies.profile import Profile
from proxy.files import FileStore
from proxy.keys import Key, Keyring
from proxy.models.prices import Prices
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from proxy.store.store import Store
from tests.fakes.backend import Item, ScriptedBackend, by_history, scripted_backend
from tests.fakes.server import running_proxy
from tests.stores import open_store

MORNING = 20_000 * DAY_S + 3600.0
MESSAGE = {"role": "user", "content": "Hello."}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [MESSAGE]},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 100},
}
USAGE = {"prompt_tokens": 900, "completion_tokens": 100, "total_tokens": 1000}
STEP = {**tool_reply(call("execute_bash", command="echo a")), "usage": USAGE}
SUBMIT = {**tool_reply(call("submit", answer="42")), "usage": USAGE}
FINAL_ANSWER = {**text_reply("About 42."), "usage": USAGE}
RUN_SCRIPT = [STEP, SUBMIT]
"""A run that uses 2,000 tokens and one command."""
PRICES = Prices({"fake-model": Price(1000.0, 1000.0)})


KEYRING = Keyring([("mine", Key("mine")), ("yours", Key("yours"))])


class Clock:
    """A callable clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = MORNING

    def __call__(self) -> float:
        return self.now


@dataclass
class BudgetServer:
    """A running server with daily budgets, its backend, its store and its clock."""

    url: str
    http: httpx.AsyncClient
    backend: ScriptedBackend
    store: Store
    clock: Clock

    async def post(
        self, path: str = "/v1/chat/completions", key: str = "mine", **body: Any
    ) -> httpx.Response:
        payload = {"model": "fake-model", **BODIES[path], **body}
        headers = {"authorization": f"Bearer {key}"}
        return await self.http.post(path, json=payload, headers=headers)

    async def spent(self, key: str = "mine") -> Expense:
        return await self.store.spending.spent_today(key)


@asynccontextmanager
async def budget_server(
    state_dir: Path,
    per_day: DailyBudget,
    script: list[Item] | Any = RUN_SCRIPT,
    limits: Limits = Limits(),
    elsewhere: Any = None,
    keyring: Keyring = KEYRING,
) -> AsyncIterator[BudgetServer]:
    clock = Clock()
    store = open_store(state_dir, now=clock)
    play = by_history(script) if isinstance(script, list) else script
    changes = {
        "files": FileStore(store, limits=ArtifactLimits()),
        "profiles": Profiles.only(Profile(limits=limits, budgets=Budgets(per_day))),
        "prices": PRICES,
        "keyring": keyring,
    }
    with anyio.fail_after(30):
        async with (
            scripted_backend(play, elsewhere=elsewhere) as backend,
            running_proxy(backend, "memory", state_dir, **changes) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            yield BudgetServer(url, http, backend, store, clock)
