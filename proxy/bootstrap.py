"""The parts, joined as the configuration says: the only place that names concrete classes."""

import logging
import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from policies.isolation import Isolation
from policies.pool import capacity
from policies.prompts import Equipment
from policies.tool_support import is_local
from proxy.agent.agent import Agent
from proxy.agent.context_windows import ContextWindows
from proxy.agent.model import Model
from proxy.api.dependencies import Services
from proxy.audit.audit import AuditLogs
from proxy.body_memory import COPIES, BodyMemory
from proxy.config import (
    Config,
    ConfigError,
    backend_key_variable,
    passthrough,
    require_forwarding_fits,
    secret,
    state_dir,
)
from proxy.errors import StoreError
from proxy.fetch import Fetcher
from proxy.files import FileLookup, FileStore
from proxy.inputs import Inputs, TextLengths
from proxy.keys import ClientKeys, Key, Keyring
from proxy.metrics import Metrics
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.operator_proxies import proxy_for, proxy_urls
from proxy.models.prices import Prices
from proxy.models.retry import RetryingModel
from proxy.models.scripted import ScriptedModel
from proxy.models.tool_support import ToolProbe, ToolSettings, ToolVerdicts, WatchedModel
from proxy.profiles import Profiles, build_profiles
from proxy.runs.manager import RunManager
from proxy.store.store import Store
from proxy.workspaces import Workspaces
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.egress.dialer import Endpoint
from sandbox_runtime.egress.gateway import EgressGateways
from sandbox_runtime.errors import EngineMissingError
from sandbox_runtime.pool.pool import Pool
from sandbox_runtime.tools import make_tools

log = logging.getLogger(__name__)


def build_model(config: Config) -> Model:
    """The door to the language model. Raises ConfigError."""
    backend = config.backend
    require_forwarding_fits(config)
    key = secret(backend_key_variable(backend))
    if backend.kind == "scripted":
        if backend.script is None:
            raise ConfigError("backend.script: name the YAML file to play")
        try:
            return ScriptedModel.from_yaml(backend.script)
        except (OSError, ValueError) as error:
            raise ConfigError(f"backend.script: {error}") from error
    model: Model
    if backend.kind == "litellm":
        from proxy.models.litellm_model import LiteLLMModel

        model = LiteLLMModel(
            backend.models, timeout_s=backend.timeout_s, api_key=key, api_base=backend.base_url
        )
    elif backend.base_url is None:
        raise ConfigError("backend.base_url: name the OpenAI-compatible server, up to /v1")
    else:
        model = OpenAIHTTPModel(
            backend.base_url,
            api_key=key,
            timeout_s=backend.timeout_s,
            proxy=_proxy_for(backend.base_url),
            keep_alive_s=backend.keep_alive_s,
        )
    return RetryingModel(model, attempts=backend.attempts)


def _proxy_for(base_url: str) -> str | None:
    try:
        return proxy_for(base_url)
    except ValueError as error:
        raise ConfigError(f"backend.base_url: {error}") from error


def _state_dir(config: Config) -> Path:
    """The place for files and locks, made if it is not there. Raises ConfigError."""
    directory = state_dir(config)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"server.state_dir: {error}") from error
    return directory


def build_backend(config: Config) -> Backend:
    """Return the place for sandboxes. `sandbox.backend: auto` takes bubblewrap where no engine
    answers or its image is not built, unless the operator has named an engine: what is named is
    never replaced by something weaker.

    Raises ConfigError, and SandboxStartError where none can be had.
    """
    if config.sandbox.backend == "bubblewrap":
        return build_bubblewrap(config)
    may_fall_back = config.sandbox.backend == "auto" and not engine_named(config)
    try:
        return build_docker(config, needs_image=may_fall_back)
    except EngineMissingError as error:
        if not may_fall_back:
            raise
        log.warning(
            "%s. Sandboxes are bubblewrap's instead: they share the host's kernel and see its /usr."
            " For Docker's, start the engine and build the image (sandbox-proxy build-image);"
            " sandbox.backend: docker insists on them, bubblewrap asks for none",
            error,
        )
    return build_bubblewrap(config)


def engine_named(config: Config) -> str:
    """Return the setting by which the operator has named an engine, or nothing. The image alone
    names none."""
    docker = config.sandbox.docker
    named = {
        "sandbox.docker.runtime": docker.runtime,
        "sandbox.docker.host": docker.host,
        "DOCKER_HOST": os.environ.get("DOCKER_HOST"),
    }
    return next((name for name, value in named.items() if value), "")


def build_docker(config: Config, *, needs_image: bool = False) -> Backend:
    """Return sandboxes in containers. Raises ConfigError, and EngineMissingError where no engine
    answers, or without the image where it is needed at once."""
    from sandbox_runtime.backends.docker import DockerBackend

    sandbox = config.sandbox
    return DockerBackend(
        sandbox.docker.image,
        state_dir=_state_dir(config),
        runtime=sandbox.docker.runtime,
        host=sandbox.docker.host,
        inputs=sandbox.inputs,
        needs_image=needs_image,
    )


def build_bubblewrap(config: Config) -> Backend:
    """Return sandboxes without an engine. Raises ConfigError, SandboxStartError."""
    from sandbox_runtime.backends.bubblewrap import BubblewrapBackend

    sandbox = config.sandbox
    return BubblewrapBackend(
        rootfs=sandbox.bubblewrap.rootfs,
        uid=sandbox.bubblewrap.uid,
        state_dir=_state_dir(config),
        inputs=sandbox.inputs,
        allow_weak=sandbox.bubblewrap.allow_weak,
    )


def build_keyring(config: Config) -> Keyring:
    """All keys that clients may come with. Raises ConfigError."""
    given = [(each.env, Key(each.name, each.profiles, each.policy)) for each in config.keys]
    operator = secret(config.server.operator_key_env)
    if config.backend.forward_client_key:
        return Keyring(is_closed=True, operator=operator)
    if variable := config.server.api_key_env:
        given.insert(0, (variable, Key("default")))
    names = [key.name for _, key in given]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"keys: the name {twice[0]!r} is there twice")
    secrets = [(sent, key) for variable, key in given if (sent := secret(variable))]
    if len({sent for sent, _ in secrets}) < len(secrets):
        raise ConfigError("keys: two of them are the same")
    if operator in [sent for sent, _ in secrets]:
        raise ConfigError("server.operator_key_env: it is a client's key as well")
    return Keyring(secrets, operator=operator)


def require_keys(config: Config, address: str) -> None:
    """Raise ConfigError where everyone in a network would be let in, unawares."""
    may_be_open = config.server.allow_open or ip_address(address).is_loopback
    if not may_be_open and build_keyring(config).is_open:
        raise ConfigError(
            f"server.host: whoever reaches {address} could run commands here, for no key is asked"
            " for. Name one by server.api_key_env or keys; or say --allow-open, if that is meant"
        )


def build_store(config: Config) -> Store:
    """The place for all that is kept. Raises ConfigError."""
    try:
        return Store(_state_dir(config), config.sessions, config.responses)
    except StoreError as error:
        raise ConfigError(f"server.state_dir: {error}") from error


def build_services(
    config: Config,
    model: Model,
    backend: Backend,
    listener: socket.socket | None = None,
    software: tuple[str, ...] = (),
) -> tuple[Services, Pool]:
    """The house, joined; `software` is what its sandboxes have. Raises ConfigError."""
    profiles = build_profiles(config)
    forbidden = own_addresses(config, listener)
    gateways = _egress_gateways(profiles, forbidden)
    pool = Pool(backend, config.sandbox.pool, [profiles.default.isolation], gateways=gateways)
    metrics = _metrics(config, pool)
    store = build_store(config)
    workspaces = _workspaces(config, profiles.default.isolation, pool, store)
    verdicts = _tool_verdicts(config, model, store)
    agent = _agent(config, WatchedModel(model, verdicts, metrics), workspaces, software)
    inputs = _inputs(config, profiles, forbidden, store, agent)
    keyring = build_keyring(config)
    services = Services(
        model=model,
        runs=RunManager(agent, store.parked, store.runs, _ledger(config), verdicts, metrics),
        workspaces=workspaces,
        files=FileStore(store, limits=config.artifacts),
        file_limits=config.files,
        body_memory=_body_memory(config, inputs, keyring),
        inputs=inputs,
        profiles=profiles,
        prices=Prices(config.backend.prices),
        tool_verdicts=verdicts,
        keyring=keyring,
        client_keys=ClientKeys(model) if config.backend.forward_client_key else None,
        passthrough=passthrough(config),
        public_url=config.server.public_url,
        steps=config.server.steps,
        narration=config.server.narration,
        on_disconnect=config.server.on_disconnect,
        nonstream_keep_alive_s=config.server.nonstream_keep_alive_s,
    )
    return services, pool


def _metrics(config: Config, pool: Pool) -> Metrics:
    metrics = Metrics([*config.backend.models, *config.models])
    metrics.follow_pool(pool)
    return metrics


def _body_memory(config: Config, inputs: Inputs, keyring: Keyring) -> BodyMemory:
    """The memory for bodies: at least one of the largest fits, and where there are several clients,
    each has half of it, but no less than that."""
    largest = COPIES * inputs.max_body_bytes
    most = max(config.server.request_bodies_mib << 20, largest)
    return BodyMemory(most, max(most // 2, largest) if keyring.has_many else None)


def _workspaces(config: Config, isolation: Isolation, pool: Pool, store: Store) -> Workspaces:
    sessions = config.sessions
    max_kept = min(sessions.max_kept, capacity(config.sandbox.pool, isolation) // 2)
    workspaces = Workspaces(pool, store.workspaces, keep_s=sessions.keep_s, max_kept=max_kept)
    pool.when_full(workspaces.give_back)
    return workspaces


def _agent(
    config: Config, model: Model, workspaces: Workspaces, software: tuple[str, ...]
) -> Agent:
    equipment = Equipment(software, has_shared=config.sandbox.inputs is not None)
    windows = ContextWindows(config.backend.context_tokens)
    return Agent(model, workspaces, make_tools, equipment, windows)


def _tool_verdicts(config: Config, model: Model, store: Store) -> ToolVerdicts:
    backend = config.backend.base_url or config.backend.kind
    return ToolVerdicts(
        tool_settings(config), build_tool_probe(config, model), store.tool_verdicts, backend
    )


def tool_settings(config: Config) -> ToolSettings:
    """What the operator says of models and tools."""
    models = ((name, each.tool_support) for name, each in config.models.items())
    return ToolSettings(config.backend.tool_support, [(n, said) for n, said in models if said])


def build_tool_probe(config: Config, model: Model) -> ToolProbe | None:
    """What finds out whether models use tools; None where the proxy has no key of its own."""
    if config.backend.forward_client_key:
        return None
    return ToolProbe(model, is_local=is_local(config.backend.base_url or ""))


def _egress_gateways(profiles: Profiles, forbidden: list[Endpoint]) -> EgressGateways:
    gateways = EgressGateways(forbidden=forbidden, secrets=os.environ)
    for name, profile in profiles.named.items():
        try:
            gateways.check(profile.isolation.egress)
        except ValueError as error:
            raise ConfigError(f"profiles.{name}.isolation.egress: {error}") from error
    return gateways


def _ledger(config: Config) -> AuditLogs:
    place = audit_place(_state_dir(config))
    return AuditLogs(place, keep_days=config.audit.keep_days, key=audit_key(config))


def audit_place(state: Path) -> Path:
    """Where the audit logs lie."""
    return state / "audit"


def audit_key(config: Config) -> bytes | None:
    """What they are signed with, if with anything. Raises ConfigError."""
    key = secret(config.audit.key_env)
    return key.encode() if key else None


def _inputs(
    config: Config, profiles: Profiles, forbidden: list[Endpoint], store: Store, agent: Agent
) -> Inputs:
    return Inputs(
        max_total_mib=max(each.inputs.max_total_mib for each in profiles.named.values()),
        modalities=config.backend.modalities,
        fetcher=Fetcher(forbidden=forbidden),
        uploads=FileLookup(store),
        lengths=TextLengths(agent.model),
        window=agent.window,
        backend_fetches=config.backend.fetches_urls,
    )


def own_addresses(config: Config, listener: socket.socket | None) -> list["Endpoint"]:
    """Where the proxy, its model backend and the operator's forward proxies are to be found: no
    sandbox gets there."""
    found: list[Endpoint] = [listener.getsockname()[:2]] if listener else []
    for written in (config.backend.base_url or "", *proxy_urls()):
        with suppress(OSError, ValueError):  # not found from here: then neither from inside
            url = urlsplit(written)
            if url.hostname:
                port = url.port or (443 if url.scheme == "https" else 80)
                addresses = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
                found += [(str(address[0]), port) for *_, address in addresses]
    return found
