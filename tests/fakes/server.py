"""The proxy on a real socket, for tests that use it as a client does.

async with (
    scripted_backend([...]) as backend,
    running_proxy(backend, "bubblewrap", tmp_path) as url,
    openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
):
    ...
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
import uvicorn
from starlette.types import ASGIApp

from policies.artifacts import ArtifactLimits
from policies.isolation import Isolation
from policies.pool import PoolSettings
from policies.profile import Profile
from policies.sessions import FileLimits
from proxy.__main__ import listen
from proxy.agent.agent import Agent
from proxy.agent.model import Model
from proxy.agent.suspended_run import SuspendedRunStore
from proxy.api.dependencies import Services
from proxy.app import create_app
from proxy.demo import SCRIPT
from proxy.files import FileLookup, FileStore
from proxy.http_server import ConnectionRegistry, HTTPProtocol
from proxy.inputs import InputLoader, TextTokenCounter
from proxy.keys import ANYONE, Key, Keyring
from proxy.metrics import Metrics
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.retry import RetryingModel
from proxy.models.scripted import ScriptedModel
from proxy.models.tool_support import MonitoredModel, ToolVerdicts
from proxy.profiles import Profiles
from proxy.runs.manager import RunManager
from proxy.store.runs import RunRepository
from proxy.store.store import Store
from proxy.workspaces import Workspaces
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.clock import SystemClock
from sandbox_runtime.egress.gateway import EgressGateways
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.pool.pool import Pool
from sandbox_runtime.sandbox import Sandboxes
from sandbox_runtime.tools import make_tools
from tests.fakes.backend import ScriptedBackend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE
from tests.stores import open_store

Kind = Literal["memory", "bubblewrap", "docker"]
KINDS = ("memory", "bubblewrap", pytest.param("docker", marks=pytest.mark.docker))
REAL_KINDS = KINDS[1:]

BACKEND_KEY = "sk-the-backends-own-key"
ATTEMPTS = 3
KEEP_S = 60.0
MAX_KEPT = 8
MAX_CONNECTIONS = 1000


AT_ONCE = Profiles.only(Profile(enabled="always"))
"""A profile whose runs have a sandbox from their start."""


@asynccontextmanager
async def serve(
    services: Services, connections: ConnectionRegistry | None = None
) -> AsyncIterator[str]:
    """Serve the API on a free port of this loop; yield its address, without /v1."""
    services.runs.listen()
    try:
        async with serve_app(create_app(services), connections) as url:
            yield url
    finally:
        with anyio.CancelScope(shield=True):
            await services.runs.aclose()
            await services.tool_verdicts.aclose()
            await services.workspaces.aclose()
            services.store.close()


@asynccontextmanager
async def serve_app(
    app: ASGIApp, connections: ConnectionRegistry | None = None
) -> AsyncIterator[str]:
    """Serve any application; yield its address."""
    # Listen before the server runs, so that the first client need not wait for it.
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    settings = uvicorn.Config(
        app, http=HTTPProtocol, log_config=None, lifespan="off", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(settings)
    server.server_state = connections or ConnectionRegistry(MAX_CONNECTIONS, SystemClock())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        with anyio.CancelScope(shield=True):
            await serving
        listener.close()


@asynccontextmanager
async def running_proxy(
    backend: ScriptedBackend,
    kind: Kind,
    state_dir: Path,
    isolation: Isolation = Isolation(),
    connections: ConnectionRegistry | None = None,
    **changes: Any,
) -> AsyncIterator[str]:
    """Yield the URL of a complete proxy in front of a scripted backend.

    `changes` are fields of Services, and `make_runs`, `make_verdicts` and `metrics` in place of the
    usual ones. Unless they say otherwise, the backend's models count as able to use tools.
    """
    model = model_client(backend)
    try:
        async with open_sandboxes(kind, state_dir) as sandboxes:
            services = make_services(model, sandboxes, state_dir, isolation, **changes)
            async with serve(services, connections) as url:
                yield url
    finally:
        await model.aclose()


@asynccontextmanager
async def demo_proxy(kind: Kind, state_dir: Path) -> AsyncIterator[str]:
    """Yield the URL of a complete proxy whose model plays the script of the demo."""
    async with open_sandboxes(kind, state_dir) as sandboxes:
        services = make_services(ScriptedModel.from_yaml(SCRIPT), sandboxes, state_dir)
        async with serve(services) as url:
            yield url


class EachKey(Keyring):
    """Accepts every key as a client of its own, and requests without a key as another client."""

    def __init__(self) -> None:
        super().__init__(is_closed=True)

    def find(self, sent: str) -> Key | None:
        return Key(sent or ANYONE)


def single_key(secret: str) -> Keyring:
    """Return a keyring with one key."""
    return Keyring([(secret, Key("ours"))])


def model_client(backend: ScriptedBackend) -> Model:
    """Return the client of the backend as __main__ builds it, but with retries without delay."""
    model = OpenAIHTTPModel(backend.base_url, api_key=BACKEND_KEY, timeout_s=20)
    return RetryingModel(model, attempts=ATTEMPTS, base_delay_s=0)


def make_services(
    model: Model,
    sandboxes: Sandboxes,
    state_dir: Path,
    isolation: Isolation = Isolation(),
    make_runs: Callable[[Agent, SuspendedRunStore, RunRepository], RunManager] | None = None,
    make_verdicts: Callable[[Model, Store], ToolVerdicts] | None = None,
    metrics: Metrics | None = None,
    **changes: Any,
) -> Services:
    """Build the services of a proxy; `changes` replace fields of Services."""
    files = changes.pop("files", None) or FileStore(open_store(state_dir), limits=ArtifactLimits())
    store = files.store
    workspaces = Workspaces(sandboxes, store.workspaces, keep_s=KEEP_S, max_kept=MAX_KEPT)
    verdicts = make_verdicts(model, store) if make_verdicts else ToolVerdicts()
    metrics = metrics or Metrics()
    if isinstance(sandboxes, Pool):
        metrics.observe_pool(sandboxes)
    agent = Agent(MonitoredModel(model, verdicts, metrics), workspaces, make_tools)
    make_runs = make_runs or partial(
        RunManager,
        tool_verdicts=verdicts,
        metrics=metrics,
        trajectories=store.trajectories,
        messages=store.messages,
    )
    services = Services(
        model=model,
        runs=make_runs(agent, store.suspended_runs, store.runs),
        workspaces=workspaces,
        files=files,
        file_limits=FileLimits(),
        inputs=InputLoader(
            uploads=FileLookup(store),
            token_counter=TextTokenCounter(model),
            find_window=agent.context_window,
        ),
        profiles=Profiles.only(Profile(isolation=isolation)),
        tool_verdicts=verdicts,
    )
    return replace(services, **changes)


@asynccontextmanager
async def open_sandboxes(kind: Kind, state_dir: Path) -> AsyncIterator[Sandboxes]:
    """Yield sandboxes of the named kind. All have ended when the block returns."""
    if kind == "memory":
        yield MemorySandboxes()
        return
    backend = open_backend(kind, state_dir)
    sandboxes = Pool(backend, PoolSettings(min_ready=0), [], gateways=EgressGateways())
    sandboxes.start()
    try:
        yield sandboxes
    finally:
        with anyio.CancelScope(shield=True):
            await sandboxes.aclose()
            await backend.aclose()


def open_backend(kind: Kind, state_dir: Path) -> Backend:
    """Return a real backend. Skips the test without an engine, or fails with REQUIRE_DOCKER."""
    if kind == "bubblewrap":
        return BubblewrapBackend(state_dir=state_dir)
    try:
        return DockerBackend(DOCKER_IMAGE, state_dir=state_dir)
    except SandboxStartError as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(str(error))
