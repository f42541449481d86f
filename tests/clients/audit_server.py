"""Run a server that applies a profile and writes an audit log for each run."""

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
from tests.clients.chat_http import http_client, post_chat
from tests.fakes.backend import ScriptedBackend
from tests.fakes.server import Kind, running_proxy

TIMEOUT_S = 30
AUDIT = AuditSettings(enabled=True)


def profile_with_rules(*rules: Rule) -> Profile:
    """Return a profile with the given rules."""
    return Profile(watch=RuleSet(rules))


@asynccontextmanager
async def audit_server(
    backend: ScriptedBackend,
    home: Path,
    profile: Profile,
    kind: Kind = "memory",
    key: bytes | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve `backend` under `profile` and yield an HTTP client; audit logs are in `home`/audit."""
    audit_logs = AuditLogs(home / "audit", keep_days=90, key=key)
    make_runs: Any = partial(RunManager, audit_logs=audit_logs)
    async with (
        running_proxy(
            backend, kind, home, profiles=Profiles.only(profile), make_runs=make_runs
        ) as url,
        http_client(url) as http,
    ):
        yield http


async def post_once(
    backend: ScriptedBackend, home: Path, profile: Profile, **body: Any
) -> httpx.Response:
    """Start a server, send one chat request and return the complete response."""
    with anyio.fail_after(TIMEOUT_S):
        async with audit_server(backend, home, profile) as http:
            return await post_chat(http, **body)


def observations(backend: ScriptedBackend) -> Sequence[str]:
    """Return the observations in the last request that the backend received."""
    messages: list[Mapping[str, Any]] = backend.requests[-1].body["messages"]
    return [str(message["content"]) for message in messages if message["role"] == "tool"]


def with_audit(profile: Profile = Profile(), **changes: Any) -> Profile:
    """Return the profile with audit logging enabled."""
    return replace(profile, audit=replace(AUDIT, **changes))
