"""A house whose runs are watched, and one request to it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx

from policies.profile import AuditSettings, Profile
from policies.rules import Rule, RuleSet
from proxy.audit.audit import AuditLogs
from proxy.profiles import Profiles
from proxy.runs.manager import RunManager
from tests.clients.chat import ask, client
from tests.fakes.backend import ScriptedBackend
from tests.fakes.server import Kind, running_proxy

PATIENCE_S = 30
AUDITED = AuditSettings(enabled=True)


def ruled(*rules: Rule) -> Profile:
    """A profile with those rules."""
    return Profile(watch=RuleSet(rules))


@asynccontextmanager
async def watched(
    backend: ScriptedBackend,
    home: Path,
    profile: Profile,
    kind: Kind = "memory",
    key: bytes | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a house with that profile; its logs lie in `home`/audit."""
    audit_logs = AuditLogs(home / "audit", keep_days=90, key=key)
    make_runs: Any = partial(RunManager, audit_logs=audit_logs)
    async with (
        running_proxy(
            backend, kind, home, profiles=Profiles.only(profile), make_runs=make_runs
        ) as url,
        client(url) as http,
    ):
        yield http


async def answered(
    backend: ScriptedBackend, home: Path, profile: Profile, **body: Any
) -> httpx.Response:
    """The whole response to one request."""
    with anyio.fail_after(PATIENCE_S):
        async with watched(backend, home, profile) as http:
            return await ask(http, **body)


def observations(backend: ScriptedBackend) -> Sequence[str]:
    """What the model was told of its calls."""
    messages: list[Mapping[str, Any]] = backend.requests[-1].body["messages"]
    return [str(message["content"]) for message in messages if message["role"] == "tool"]


def audited(profile: Profile = Profile(), **changes: Any) -> Profile:
    """The profile, its runs written down."""
    return replace(profile, audit=replace(AUDITED, **changes))
