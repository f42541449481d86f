"""Composition root: builds the objects of the server from the configuration.

`build_services` builds everything that a request needs."""

import logging
import os
import socket
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from policies.isolation import Isolation
from policies.pool import capacity
from policies.prompts import SandboxContents
from policies.tool_support import is_local
from proxy.agent.agent import Agent
from proxy.agent.context_windows import ContextWindows
from proxy.agent.model import Model
from proxy.api.dependencies import Services
from proxy.audit.audit import AuditLogs
from proxy.available_memory import AvailableMemory
from proxy.body_memory import COPIES_PER_BODY, BodyMemory
from proxy.config import (
    BackendConfig,
    Config,
    ConfigError,
    backend_key_variable,
    check_key_forwarding,
    data_dir,
    effective_passthrough,
    read_secret,
)
from proxy.errors import StoreError
from proxy.fetch import Fetcher
from proxy.files import FileLookup, FileStore
from proxy.inputs import InputLoader, TextTokenCounter
from proxy.keys import ClientKeyVerifier, Key, Keyring
from proxy.metrics import Metrics
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.operator_proxies import proxy_for, proxy_urls
from proxy.models.prices import Prices
from proxy.models.retry import RetryingModel
from proxy.models.scripted import ScriptedModel
from proxy.models.tool_support import MonitoredModel, ToolProbe, ToolSupportSettings, ToolVerdicts
from proxy.profiles import Profiles, build_profiles
from proxy.runs.manager import RunManager
from proxy.store import postgresql
from proxy.store.store import Store
from proxy.workspaces import Workspaces
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.backends.docker_hosts import DockerHost, DockerHosts
from sandbox_runtime.egress.dialer import Endpoint
from sandbox_runtime.egress.gateway import EgressGateways
from sandbox_runtime.errors import EngineMissingError, SandboxStartError
from sandbox_runtime.pool.pool import Pool
from sandbox_runtime.tools import make_tools

log = logging.getLogger(__name__)


def require_valid(config: Config) -> None:
    """Raise ConfigError for a mistake in the settings, without creating files or connecting to
    anything. The checks are in the order of `serve`, so that both report the same mistake first.
    """
    require_keys(config, _listen_address(config.server.host))
    build_model(config)
    _egress_gateways(build_profiles(config), [])
    build_keyring(config)
    audit_key(config)
    effective_passthrough(config)


def _listen_address(host: str) -> str:
    """Return the address that a socket bound to `host` has. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"server.host: {host}: {error.strerror}") from error
    return str(found[0][4][0])


def build_model(config: Config) -> Model:
    """Return the client of the model backend. Raises ConfigError."""
    backend = config.backend
    check_key_forwarding(config)
    key = read_secret(backend_key_variable(backend))
    if backend.provider == "scripted":
        if backend.script is None:
            raise ConfigError("backend.script: name the YAML file to play")
        try:
            return ScriptedModel.from_yaml(backend.script)
        except (OSError, ValueError) as error:
            raise ConfigError(f"backend.script: {error}") from error
    model: Model
    if backend.provider == "litellm":
        from proxy.models.litellm_model import LiteLLMModel

        model = LiteLLMModel(
            backend.models, timeout_s=backend.read_timeout_s, api_key=key, api_base=backend.base_url
        )
    elif backend.base_url is None:
        raise ConfigError("backend.base_url: name the OpenAI-compatible server, up to /v1")
    else:
        model = OpenAIHTTPModel(
            backend.base_url,
            api_key=key,
            timeout_s=backend.read_timeout_s,
            proxy=_forward_proxy_url(backend),
            keep_alive_s=backend.keep_alive_s,
        )
    return RetryingModel(model, attempts=backend.max_retries + 1)


def _forward_proxy_url(backend: BackendConfig) -> str | None:
    """Return the URL of the forward proxy for the backend, or None. Raises ConfigError."""
    try:
        proxy, *others = map(proxy_for, (backend.base_url or "", *backend.upstreams))
    except ValueError as error:
        raise ConfigError(f"backend.base_url: {error}") from error
    for url, other in zip(backend.upstreams, others, strict=True):
        if other != proxy:
            raise ConfigError(
                f"backend.upstreams: {url} and backend.base_url are not reached through the same"
                " forward proxy; set NO_PROXY so that they are"
            )
    return proxy


def _create_data_dir(config: Config) -> Path:
    """Return the directory for stored data and lock files; create it if it is missing. Raises
    ConfigError."""
    directory = data_dir(config)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"server.data_dir: {error}") from error
    return directory


def build_backend(config: Config) -> Backend:
    """Return the sandbox backend. `sandbox.backend: auto` falls back to bubblewrap if no engine
    answers or its image is missing, unless the operator has named an engine: a named engine is
    never replaced by weaker isolation.

    Raises ConfigError; SandboxStartError if no backend works on this host.
    """
    if config.sandbox.backend == "bubblewrap":
        return build_bubblewrap(config)
    if config.sandbox.backend == "kubernetes":
        return build_kubernetes(config)
    may_fall_back = config.sandbox.backend == "auto" and not engine_setting(config)
    try:
        return build_docker(config, needs_image=may_fall_back)
    except EngineMissingError as error:
        if not may_fall_back:
            raise
        log.warning(
            "%s. Using bubblewrap instead: its sandboxes share the host's kernel and see its /usr."
            " For Docker, start the engine and build the image (sandbox-proxy build-image). To"
            " require Docker, set sandbox.backend: docker; to use bubblewrap without this warning,"
            " set sandbox.backend: bubblewrap",
            error,
        )
    return build_bubblewrap(config)


def engine_setting(config: Config) -> str:
    """Return the name of the setting with which the operator has named an engine, or an empty
    string. The setting of the image does not name an engine."""
    docker = config.sandbox.docker
    named = {
        "sandbox.docker.runtime": docker.runtime,
        "sandbox.docker.host": docker.host,
        "sandbox.docker.hosts": docker.hosts,
        "DOCKER_HOST": os.environ.get("DOCKER_HOST"),
    }
    return next((name for name, value in named.items() if value), "")


def build_docker(config: Config, *, needs_image: bool = False) -> Backend:
    """Return the Docker backend. A backend of several engines is returned before it connects to
    them. Raises ConfigError; EngineMissingError if the engine does not answer, or, with
    `needs_image`, if the image is missing."""
    from sandbox_runtime.backends.docker import DockerBackend

    sandbox, docker = config.sandbox, config.sandbox.docker
    connect = partial(
        DockerBackend,
        docker.image,
        state_dir=_create_data_dir(config),
        runtime=docker.runtime,
        inputs=sandbox.inputs,
        needs_image=needs_image,
    )
    if not docker.hosts:
        return connect(host=docker.host)
    most = sandbox.pool.max_sandboxes
    return DockerHosts(
        [
            DockerHost(each.url, partial(connect, host=each.url), each.max_sandboxes or most)
            for each in docker.hosts
        ]
    )


def build_bubblewrap(config: Config) -> Backend:
    """Return the bubblewrap backend. Raises ConfigError, SandboxStartError."""
    from sandbox_runtime.backends.bubblewrap import BubblewrapBackend

    sandbox = config.sandbox
    return BubblewrapBackend(
        rootfs=sandbox.bubblewrap.rootfs,
        uid=sandbox.bubblewrap.uid,
        state_dir=_create_data_dir(config),
        inputs=sandbox.inputs,
        allow_weak=sandbox.bubblewrap.allow_weak,
    )


def build_kubernetes(config: Config) -> Backend:
    """Return the Kubernetes backend. Raises ConfigError; SandboxStartError without the extra
    `kubernetes`."""
    if config.sandbox.inputs:
        raise ConfigError(
            "sandbox.inputs: the nodes of a cluster do not have this host's directories; put the"
            " files into the sandbox image"
        )
    try:
        from sandbox_runtime.backends.kubernetes import (
            AGENT_LEASE_S,
            TAKEOVER_LEASE_S,
            KubernetesBackend,
        )
    except ImportError as error:
        raise SandboxStartError(
            "sandbox.backend: kubernetes needs `pip install llm-sandbox-proxy[kubernetes]`"
            f" ({error})"
        ) from error
    from sandbox_runtime.backends.kubernetes_pod import PodSpec

    cluster = config.sandbox.kubernetes
    return KubernetesBackend(
        PodSpec(cluster.image, cluster.agent_image, cluster.runtime_class, cluster.seccomp_profile),
        namespace=cluster.namespace,
        kubeconfig=cluster.kubeconfig,
        context=cluster.context,
        allow_unenforced_network_policy=cluster.allow_unenforced_network_policy,
        start_timeout_s=cluster.start_timeout_s,
        lease_s=TAKEOVER_LEASE_S if config.store.database_url else AGENT_LEASE_S,
    )


def build_keyring(config: Config) -> Keyring:
    """Return the keys that clients may send. Raises ConfigError."""
    keys = [(each.env, Key(each.name, each.profiles, each.policy)) for each in config.keys]
    operator = read_secret(config.server.operator_key_env)
    if config.backend.forward_client_key:
        return Keyring(is_closed=True, operator_secret=operator)
    names = [key.name for _, key in keys]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"keys: two keys have the name {duplicates[0]!r}")
    secrets = [(sent, key) for variable, key in keys if (sent := read_secret(variable))]
    if len({sent for sent, _ in secrets}) < len(secrets):
        raise ConfigError("keys: two keys have the same secret")
    if operator in [sent for sent, _ in secrets]:
        raise ConfigError("server.operator_key_env: this is also the secret of a client key")
    return Keyring(secrets, operator_secret=operator)


def require_keys(config: Config, address: str) -> None:
    """Raise ConfigError if other machines can reach the address and neither keys nor
    `server.allow_open` are set."""
    may_be_open = config.server.allow_open or ip_address(address).is_loopback
    if not may_be_open and build_keyring(config).is_open:
        raise ConfigError(
            f"server.host: everyone who can reach {address} could run commands here, because no key"
            " is required. Set keys; or --allow-open, to permit it"
        )


def build_store(config: Config) -> Store:
    """Return the store. Raises ConfigError."""
    directory = _create_data_dir(config)
    url = config.store.database_url
    try:
        return Store(
            directory,
            config.sessions,
            config.responses,
            config.trajectories,
            database_url=postgresql.database_url(url) if url else None,
            blobs_url=config.store.blobs_url,
        )
    except StoreError as error:
        setting = "store" if url else "server.data_dir"
        raise ConfigError(f"{setting}: {error}") from error


def build_services(
    config: Config,
    model: Model,
    backend: Backend,
    listener: socket.socket | None = None,
    software: tuple[str, ...] = (),
) -> tuple[Services, Pool]:
    """Return the services that requests use, and the pool; `software` are the programs installed in
    the sandboxes. Raises ConfigError."""
    profiles = build_profiles(config)
    forbidden = own_addresses(config, listener)
    gateways = _egress_gateways(profiles, forbidden)
    pool = Pool(backend, config.sandbox.pool, [profiles.default.isolation], gateways=gateways)
    metrics = _metrics(config, pool)
    reserve_mib = config.server.memory_reserve_mib
    available_memory = AvailableMemory(None if reserve_mib is None else reserve_mib << 20)
    metrics.register_memory(available_memory)
    if isinstance(backend, DockerHosts):
        metrics.register_host_stats(backend.stats)
    store = build_store(config)
    workspaces = _workspaces(config, profiles.default.isolation, pool, store)
    verdicts = _tool_verdicts(config, model, store)
    agent = _agent(config, MonitoredModel(model, verdicts, metrics), workspaces, software)
    inputs = _inputs(config, profiles, forbidden, store, agent)
    keyring = build_keyring(config)
    services = Services(
        model=model,
        runs=RunManager(
            agent,
            store.suspended_runs,
            store.runs,
            _audit_logs(config),
            verdicts,
            metrics,
            store.trajectories,
            store.messages,
        ),
        workspaces=workspaces,
        files=FileStore(store, limits=config.artifacts),
        file_limits=config.files,
        body_memory=_body_memory(config, inputs, keyring, available_memory),
        available_memory=available_memory,
        inputs=inputs,
        profiles=profiles,
        prices=Prices(config.backend.prices),
        tool_verdicts=verdicts,
        keyring=keyring,
        client_keys=ClientKeyVerifier(model) if config.backend.forward_client_key else None,
        passthrough=effective_passthrough(config),
        upstreams=config.backend.upstreams,
        public_url=config.server.public_url,
        steps=config.server.steps,
        narration=config.server.narration,
        on_disconnect=config.server.on_disconnect,
        nonstream_keep_alive_s=config.server.nonstream_keep_alive_s,
    )
    return services, pool


def _metrics(config: Config, pool: Pool) -> Metrics:
    metrics = Metrics([*config.backend.models, *config.models])
    metrics.observe_pool(pool)
    return metrics


def _body_memory(
    config: Config, inputs: InputLoader, keyring: Keyring, available: AvailableMemory
) -> BodyMemory:
    """Return the memory for request bodies. The memory has room for at least one body of the
    maximum size. With several keys, each key may use half of the memory, but at least the size of
    one such body."""
    largest = COPIES_PER_BODY * inputs.max_body_bytes
    most = max(config.server.request_bodies_mib << 20, largest)
    share = max(most // 2, largest) if keyring.has_many_keys else None
    return BodyMemory(most, share, available)


def _workspaces(config: Config, isolation: Isolation, pool: Pool, store: Store) -> Workspaces:
    sessions = config.sessions
    max_kept = min(sessions.max_kept, capacity(config.sandbox.pool, isolation) // 2)
    workspaces = Workspaces(pool, store.workspaces, keep_s=sessions.idle_s, max_kept=max_kept)
    pool.set_full_handler(workspaces.evict_idle)
    return workspaces


def _agent(
    config: Config, model: Model, workspaces: Workspaces, software: tuple[str, ...]
) -> Agent:
    sandbox_contents = SandboxContents(software, has_shared_files=config.sandbox.inputs is not None)
    windows = ContextWindows(config.backend.max_model_len)
    return Agent(model, workspaces, make_tools, sandbox_contents, windows)


def _tool_verdicts(config: Config, model: Model, store: Store) -> ToolVerdicts:
    backend = config.backend.base_url or config.backend.provider
    return ToolVerdicts(
        tool_support_settings(config), build_tool_probe(config, model), store.tool_verdicts, backend
    )


def tool_support_settings(config: Config) -> ToolSupportSettings:
    """Return the tool support that is configured for each model."""
    models = ((name, model.tool_support) for name, model in config.models.items())
    return ToolSupportSettings(
        config.backend.tool_support, [(n, value) for n, value in models if value]
    )


def build_tool_probe(config: Config, model: Model) -> ToolProbe | None:
    """Return the probe for tool support, or None if the proxy has no backend key of its own."""
    if config.backend.forward_client_key:
        return None
    return ToolProbe(model, is_local=is_local(config.backend.base_url or ""))


def _egress_gateways(profiles: Profiles, forbidden_addresses: list[Endpoint]) -> EgressGateways:
    gateways = EgressGateways(forbidden=forbidden_addresses, secrets=os.environ)
    for name, profile in profiles.by_name.items():
        try:
            gateways.check(profile.isolation.network)
        except ValueError as error:
            raise ConfigError(f"profiles.{name}.isolation.network: {error}") from error
    return gateways


def _audit_logs(config: Config) -> AuditLogs:
    return AuditLogs(
        audit_dir(_create_data_dir(config)),
        keep_days=config.audit.retention_days,
        key=audit_key(config),
    )


def audit_dir(data_directory: Path) -> Path:
    """Return the directory of the audit logs."""
    return data_directory / "audit"


def audit_key(config: Config) -> bytes | None:
    """Return the key that signs the audit logs, or None. Raises ConfigError."""
    key = read_secret(config.audit.key_env)
    return key.encode() if key else None


def _inputs(
    config: Config,
    profiles: Profiles,
    forbidden_addresses: list[Endpoint],
    store: Store,
    agent: Agent,
) -> InputLoader:
    return InputLoader(
        max_total_mib=max(each.inputs.max_total_mib for each in profiles.by_name.values()),
        modalities=config.backend.modalities,
        fetcher=Fetcher(forbidden_addresses=forbidden_addresses),
        uploads=FileLookup(store),
        token_counter=TextTokenCounter(agent.model),
        find_window=agent.context_window,
        backend_fetches_urls=config.backend.fetches_urls,
    )


def own_addresses(config: Config, listener: socket.socket | None) -> list["Endpoint"]:
    """Return the addresses of the proxy, its model backend with its upstreams, and the operator's
    forward proxies. Sandboxes must not reach them."""
    found: list[Endpoint] = [listener.getsockname()[:2]] if listener else []
    backend = config.backend
    for address in (backend.base_url or "", *backend.upstreams, *proxy_urls()):
        with suppress(OSError, ValueError):  # a sandbox cannot resolve the name either
            url = urlsplit(address)
            if url.hostname:
                port = url.port or (443 if url.scheme == "https" else 80)
                resolved = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
                found += [(str(address_and_port[0]), port) for *_, address_and_port in resolved]
    return found
