"""Budgets measured in real sandboxes: processor time and egress traffic."""

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from aiohttp import web

from policies.budgets import Budgets, DailyBudget
from policies.egress import Egress
from policies.isolation import Isolation
from policies.limits import Limits
from policies.profile import Profile
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.fakes.backend import ScriptedBackend, scripted_backend
from tests.fakes.server import REAL_KINDS, Kind, running_proxy

BURN = "python3 -c 'sum(range(3_000_000))'"
KIB = 1 << 10
BLOB = b"x" * 600 * KIB


def turn(command: str) -> dict[str, Any]:
    return tool_reply(call("execute_bash", command=command))


async def blob(_: web.Request) -> web.Response:
    return web.Response(body=BLOB)


async def run_repeatedly(
    kind: Kind, state_dir: Path, command: str, limits: Limits, per_day: DailyBudget
) -> tuple[Any, ScriptedBackend]:
    """Return the answer of a model that repeats the command until its tools are gone, and its
    backend.

    `{url}` in the command is the address of a file server.
    """

    def script(body: dict[str, Any]) -> dict[str, Any]:
        url = backend.base_url.removesuffix("/v1")
        return turn(command.format(url=url)) if "tools" in body else text_reply("About 42.")

    async with scripted_backend(script, elsewhere=blob) as backend:
        host = backend.base_url.removeprefix("http://").removesuffix("/v1")
        egress = Egress("allowlist", (host,), ("127.0.0.0/8",))
        profile = Profile(
            limits=limits, budgets=Budgets(per_day), isolation=Isolation(network=egress)
        )
        with anyio.fail_after(120):
            async with (
                running_proxy(backend, kind, state_dir, profiles=Profiles.only(profile)) as url,
                httpx.AsyncClient(base_url=url, timeout=None) as http,
            ):
                body = {"model": "m", "messages": [{"role": "user", "content": "Go on."}]}
                answer = await http.post("/v1/chat/completions", json=body)
        return answer.json(), backend


@pytest.mark.parametrize("kind", REAL_KINDS)
@pytest.mark.parametrize(
    ("limits", "per_day", "reason"),
    [
        (Limits(5, max_cpu_s=0.01), DailyBudget(), "cpu_budget"),
        (Limits(5), DailyBudget(cpu_s=0.01), "daily_cpu_budget"),
    ],
)
async def test_exhausted_processor_time_ends_the_run(
    kind: Kind, limits: Limits, per_day: DailyBudget, reason: str, tmp_path: Path
) -> None:
    answer, backend = await run_repeatedly(kind, tmp_path, BURN, limits, per_day)
    assert answer["choices"][0]["message"]["content"] == "About 42."
    assert (answer["sandbox"]["stop_reason"], len(backend.requests)) == (reason, 2)
    assert answer["usage"]["sandbox"]["cpu_ms"] >= 10


@pytest.mark.parametrize("kind", REAL_KINDS)
@pytest.mark.parametrize(
    ("limits", "per_day", "reason"),
    [
        (Limits(5, max_egress_mib=1), DailyBudget(), "egress_budget"),
        (Limits(5), DailyBudget(egress_mib=1), "daily_egress_budget"),
    ],
)
async def test_exhausted_egress_budget_stops_traffic_and_the_run(
    kind: Kind, limits: Limits, per_day: DailyBudget, reason: str, tmp_path: Path
) -> None:
    # Loopback addresses bypass the proxy unless no_proxy is unset.
    get = "env -u no_proxy -u NO_PROXY curl -sS {url}/blob | wc -c"
    answer, backend = await run_repeatedly(kind, tmp_path, get, limits, per_day)
    assert answer["sandbox"]["stop_reason"] == reason
    assert answer["usage"]["sandbox"]["egress_bytes"] == 1 << 20
    first, second = (
        message["content"]
        for message in backend.requests[-1].body["messages"]
        if message["role"] == "tool"
    )
    assert str(len(BLOB)) in first
    assert str(len(BLOB)) not in second
