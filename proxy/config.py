"""The configuration: the settings of config.yaml and their defaults, and how they are read.

`load` reads them from the command line, the environment (`LLM_SANDBOX_*`), a file and the
defaults, in this order of precedence.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    DirectoryPath,
    Field,
    ValidationError,
    model_validator,
)

from policies.artifacts import ArtifactLimits
from policies.budgets import Budgets
from policies.isolation import Isolation
from policies.limits import Limits
from policies.passthrough import PassthroughSetting
from policies.pool import PoolSettings, capacity
from policies.prices import Price
from policies.redaction import Redaction
from policies.rules import RuleSet
from policies.sessions import (
    FileLimits,
    ResponseSettings,
    SessionSettings,
    TrajectorySettings,
)
from policies.steps import NarrationSetting, StepsSetting
from policies.tool_support import ToolSupport
from policies.workspace import InputLimits, Modality
from proxy.body_memory import DEFAULT_BODY_MEMORY_MIB
from proxy.deprecated_settings import CONFIG_RULES, DuplicateSettingError, new_spelling, upgrade

log = logging.getLogger(__name__)

ENV_PREFIX = "LLM_SANDBOX_"
"""Prefix of the environment variables that hold settings."""
ENV_DELIMITER = "__"
"""Separates the keys of a setting's path in the name of its environment variable."""
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
_OPENAI_HOST = "api.openai.com"


class ConfigError(Exception):
    """The configuration is invalid. The message has one line for each mistake."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _false_to_off(value: Any) -> Any:
    return "off" if value is False else value  # YAML 1.1 reads the bare word `off` as a boolean


class ServerConfig(_Section):
    """The HTTP server that clients reach."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on; 0: a free port."""
    operator_key_env: str | None = None
    """Name of the environment variable with the operator's key, which gives access to /metrics, to
    the names of all profiles and to the pause of runs, and to nothing else. null: a single client
    key has this access, and without client keys everyone has it; with several keys, or with
    `backend.forward_client_key`, no key has it."""
    allow_open: bool = False
    """True if the server may listen without keys on addresses other than this machine's own."""
    max_connections: int = Field(default=4096, ge=1)
    """Maximum number of open client connections; at most about half of RLIMIT_NOFILE."""
    public_url: str | None = Field(default=None, pattern="^https?://")
    """Base URL of this server in links to files; null: taken from each request."""
    drain_s: float = Field(default=3.0, ge=0, le=86400)
    """Seconds that runs may continue after SIGTERM. The server accepts no connections meanwhile."""
    data_dir: Path | None = None
    """Directory for stored data and lock files, which all servers of a user share; null:
    $XDG_STATE_HOME/llm-sandbox-proxy, by default ~/.local/state/llm-sandbox-proxy."""
    steps: Annotated[StepsSetting, BeforeValidator(_false_to_off)] = "auto"
    """Form in which a response shows the steps (tool calls), unless the request sets it. auto: the
    form that suits the client."""
    narration: NarrationSetting = "content"
    """The field of a stream for the text that the model writes before a tool call. reasoning: for
    clients that take all content for the answer; content is then sent only once it is known to be
    the answer."""
    on_disconnect: Literal["cancel", "detach"] = "cancel"
    """Handling of a run whose client disconnects, unless the request sets it. cancel: the run is
    cancelled. detach: the run continues to its end."""
    request_bodies_mib: int = Field(default=DEFAULT_BODY_MEMORY_MIB, ge=1)
    """Memory for the bodies of all requests in progress, in MiB. The value is raised if one body of
    the maximum size needs more. A body counts three times: as received, as decoded (up to four
    bytes a character if a string is not ASCII), and as sent to the backend. If there are several
    keys, each key may use half of the memory."""
    memory_reserve_mib: int | None = Field(default=None, ge=0)
    """Memory that must stay available, in MiB: of the machine, and of the cgroups with a limit in
    which the server runs. With less, requests for a run, and requests with a body above 64 KiB, get
    503. null: a twentieth of each limit, at most 512 MiB. 0: nothing is refused."""
    nonstream_keep_alive_s: float | None = Field(default=None, gt=0)
    """Seconds of silence after which the server sends blanks before a JSON response. The status is
    then 200, and an error is in the body. null: never."""


class BackendConfig(_Section):
    """The server of the language models."""

    provider: Literal["openai", "litellm", "scripted"] = "openai"
    """openai: any OpenAI-compatible URL; litellm: any provider that litellm supports; scripted: a
    script in place of a model."""
    base_url: str | None = Field(default="http://127.0.0.1:8000/v1", pattern="^https?://")
    """URL of the OpenAI-compatible server, up to /v1. litellm: the default is null, for the
    provider's own URL."""
    api_key_env: str | None = None
    """Name of the environment variable with the backend's key; null: OPENAI_API_KEY, if it is set
    and the URL is OpenAI's own."""
    forward_client_key: bool = False
    """True to send each client's own key to the backend. Requires provider openai, and no `keys`
    and no `backend.api_key_env`."""
    upstreams: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s?#@]+(/[^\s?#]*)?$")], ...] = ()
    """openai: the URLs of gateways, which record or route model calls on their way to the same
    models. A request's `sandbox.upstream` may name these URLs and all URLs below them. The gateways
    get the backend's key."""
    read_timeout_s: float = Field(default=600.0, gt=0)
    """Maximum time without a byte from the backend, in seconds."""
    keep_alive_s: float = Field(default=4.0, ge=1, le=3600)
    """openai: how long an unused connection stays open, in seconds. It must be less than the
    backend's own keep-alive time (uvicorn: 5), or requests are sent on connections that the backend
    is closing. While a command runs, HEAD requests keep one connection open."""
    max_retries: int = Field(default=4, ge=0)
    """Maximum number of retries of a model call that failed with a transient error."""
    max_model_len: int | None = Field(default=None, ge=256)
    """The model's context window, in tokens; null: as the backend lists it, or as its error
    messages state it."""
    modalities: tuple[Modality, ...] = ("image",)
    """Kinds of input that the model accepts in addition to text. For a file of another kind, the
    model gets only the path."""
    fetches_urls: bool = False
    """True if the backend may fetch the http(s) URLs of images and other files itself, from private
    addresses too. Otherwise the proxy fetches them, from public addresses only, and sends the
    bytes; in requests for `:plain` models it refuses private addresses."""
    tool_support: ToolSupport = "probe"
    """The models that get tools, and with them a sandbox. probe: models whose chat template renders
    tools and whose server accepts tools, determined in the background; always: all models, without
    a probe; never: none."""
    passthrough: PassthroughSetting = "stateless"
    """openai: the backend's other paths that clients may reach. stateless: a list of paths with
    which the backend stores nothing (completions, embeddings, rerank, audio, …); all: every path
    that does not administer the backend. With `all`, each client reaches the files, batches and
    threads of all clients. With `forward_client_key` it is always `all`."""
    passthrough_shared: bool = False
    """True to allow `passthrough: all` with several keys."""
    models: tuple[str, ...] = ()
    """litellm: the models that GET /v1/models lists."""
    prices: dict[str, Price] = {}
    """Prices by model. These prices take precedence over litellm's table, which is read if a
    setting limits the cost."""
    script: Path | None = None
    """scripted: YAML file with the script."""

    @model_validator(mode="before")
    @classmethod
    def _drop_default_url_for_litellm(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("provider") == "litellm":
            return {"base_url": None, **tree}
        return tree

    @model_validator(mode="after")
    def _require_openai_for_upstreams(self) -> Self:
        if self.upstreams and self.provider != "openai":
            raise ValueError(f"upstreams needs provider openai (got {self.provider})")
        return self


class DockerHostConfig(_Section):
    """One of several Docker engines."""

    url: str = Field(pattern="^(unix|tcp|http|https)://[^@]+$")
    """URL of the engine, such as tcp://sandboxes-1:2376. The TLS settings of all engines come from
    DOCKER_CERT_PATH and DOCKER_TLS_VERIFY."""
    max_sandboxes: int | None = Field(default=None, ge=1)
    """Maximum number of sandboxes on the engine; null: sandbox.pool.max_sandboxes. A new sandbox
    starts on the engine that uses the smallest share of its maximum."""


class DockerConfig(_Section):
    """Sandboxes in Docker containers."""

    image: str = "llm-sandbox-proxy/sandbox:latest"
    """Any Linux image; `sandbox-proxy build-image` builds the default one."""
    runtime: str | None = None
    """One of the engine's runtimes, such as runsc; null: the engine's default."""
    host: str | None = None
    """URL of the engine; null: DOCKER_HOST or the local socket."""
    hosts: tuple[DockerHostConfig, ...] = ()
    """Several engines in place of `host`. The server starts if at least one of them passes all
    checks. An engine that fails a check gets sandboxes once it passes."""

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        urls = [each.url for each in self.hosts]
        if urls and self.host:
            raise ValueError("hosts: list the engine of `host` here too, and remove `host`")
        if len(set(urls)) < len(urls):
            raise ValueError("hosts: two engines have the same url")
        return self


class BubblewrapConfig(_Section):
    """Sandboxes without a container engine."""

    rootfs: Path | None = None
    """Directory or tar file of the root file system (`sandbox-proxy build-rootfs`, `docker
    export`); null: the host's /usr, read-only."""
    uid: int | None = Field(default=None, ge=1)
    """Host uid of the sandboxes if the proxy runs as root; null: a different uid for each sandbox,
    or 65534 for all of them with a rootfs."""
    allow_weak: bool = False
    """True to allow sandboxes whose memory and processes are limited by rlimits only, on hosts
    where the proxy cannot create a cgroup."""


class KubernetesConfig(_Section):
    """Sandboxes in Pods of a Kubernetes cluster; needs the extra `kubernetes`."""

    namespace: str = "llm-sandboxes"
    """Namespace of the Pods, which should contain nothing else."""
    kubeconfig: Path | None = None
    """File that names the cluster; null: the cluster in which the proxy runs, or else KUBECONFIG or
    ~/.kube/config."""
    context: str | None = None
    """Context of the kubeconfig; null: its current one."""
    image: str = "llm-sandbox-proxy/sandbox:latest"
    """Any Linux image that the nodes can pull. It is pulled only to nodes that do not have it: name
    a version or a digest, not `latest`."""
    agent_image: str | None = "llm-sandbox-proxy/agent:latest"
    """Image that holds the guest agent of this version of the proxy (deploy/agent.Dockerfile).
    null: the sandbox image holds it at /.agent/agent, which saves the start of one container."""
    runtime_class: str | None = None
    """RuntimeClass of the Pods, such as one for gVisor or Kata Containers; null: the nodes'
    default."""
    seccomp_profile: str | None = None
    """Seccomp profile of the Pods, as a path in the kubelet's directory for profiles, where each
    node has a copy of deploy/kubernetes/seccomp.json. null: the container runtime's default, which
    permits more."""
    allow_unenforced_network_policy: bool = False
    """True to start sandboxes even if the proxy's check finds no network policy that keeps them
    from the network."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """Maximum time until a Pod runs, in seconds. It includes pulling the image, and starting a node
    if the cluster adds nodes."""


class SandboxConfig(_Section):
    """The sandbox backend and the pool."""

    backend: Literal["auto", "docker", "bubblewrap", "kubernetes"] = "auto"
    """auto: docker if an engine that has the image answers, else bubblewrap; always docker if
    sandbox.docker.runtime, sandbox.docker.host, sandbox.docker.hosts or DOCKER_HOST names an
    engine."""
    inputs: DirectoryPath | None = None
    """Directory of this host that every sandbox sees, read-only, at /testbed/shared. Not on
    Kubernetes."""
    self_test: bool = True
    """True to test at start that no known escape from the sandbox works."""
    docker: DockerConfig = DockerConfig()
    bubblewrap: BubblewrapConfig = BubblewrapConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    pool: PoolSettings = PoolSettings()


class KeyConfig(_Section):
    """A client key."""

    name: str
    """Name of the key. Daily budgets belong to the name, so that a new secret has the same
    budget."""
    env: str
    """Name of the environment variable with the secret that clients send."""
    profiles: tuple[str, ...] = ()
    """Profiles that the key's requests may select; the first is the default. Other profiles may be
    selected only if they allow no more than the default."""
    policy: dict[str, Any] = {}
    """Settings of a profile that restrict the key's requests."""


class ModelConfig(_Section):
    """Settings of one model, or of all models that match a pattern (`*`)."""

    profile: str | None = None
    """The model's default profile. Ignored for a key whose `profiles` list only other profiles."""
    policy: dict[str, Any] = {}
    """Settings of a profile that restrict requests to the model."""
    tool_support: ToolSupport | None = None
    """Replaces `backend.tool_support` for the model; null: as `backend.tool_support`."""


class PaperConfig(_Section):
    """The prompts of the profile `paper` and of the profiles of its domains."""

    prompts: Literal["own", "reference"] = "own"
    """own: the proxy's own prompts. reference: those of the package llm-in-sandbox, which must be
    installed."""
    prompt_file: Path | None = None
    """Prompt file in the format of the reference implementation (its config/general.yaml). It
    replaces the prompts of the profile `paper` only."""


class StoreConfig(_Section):
    """The database, and the storage of file contents."""

    database_url: str | None = Field(default=None, pattern="^postgres(ql)?://")
    """PostgreSQL database that the servers of several machines share, as in
    postgresql://proxy@db.example.com/proxy; null: an SQLite file in `server.data_dir`."""
    blobs_url: str | None = Field(default=None, pattern="^s3://[^/]+")
    """S3 bucket for the contents of files and sessions, as in s3://BUCKET/PREFIX; null: files in
    `server.data_dir`. The credentials, the endpoint and the region come from AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and AWS_REGION."""

    @model_validator(mode="after")
    def _require_database_for_blobs(self) -> Self:
        if self.blobs_url and not self.database_url:
            raise ValueError(
                "blobs_url: it needs database_url too: servers that share a bucket must share a"
                " database"
            )
        return self


class AuditConfig(_Section):
    """The audit log of each run."""

    enabled: bool = False
    required: bool = True
    """True if a run fails when its log cannot be written."""
    key_env: str | None = None
    """Name of the environment variable with the secret that signs the logs."""
    retention_days: float = 90.0
    """Days after which logs are deleted."""


class Config(_Section):
    """All settings of config.yaml."""

    profile: str = "default"
    """The profile of requests for which neither the request, the model nor the key names one."""
    profiles: dict[str, dict[str, Any]] = {}
    """The operator's profiles, by name. A profile has only the settings that differ from the
    profile that `extends` names, by default the profile `default`."""
    models: dict[str, ModelConfig] = {}
    """Settings by model name or pattern."""
    keys: tuple[KeyConfig, ...] = ()
    """Client keys. Without client keys, the server requires no key."""
    server: ServerConfig = ServerConfig()
    backend: BackendConfig = BackendConfig()
    sandbox: SandboxConfig = SandboxConfig()
    isolation: Isolation = Isolation()
    limits: Limits = Limits()
    budgets: Budgets = Budgets()
    inputs: InputLimits = InputLimits()
    artifacts: ArtifactLimits = ArtifactLimits()
    paper: PaperConfig = PaperConfig()
    watch: RuleSet = RuleSet()
    audit: AuditConfig = AuditConfig()
    redaction: Redaction = Redaction()
    store: StoreConfig = StoreConfig()
    files: FileLimits = FileLimits()
    sessions: SessionSettings = SessionSettings()
    responses: ResponseSettings = ResponseSettings()
    trajectories: TrajectorySettings = TrajectorySettings()

    @model_validator(mode="after")
    def _require_memory_for_one_sandbox(self) -> Self:
        if not capacity(self.sandbox.pool, self.isolation):
            raise ValueError(
                f"sandbox.pool.memory_budget_mib ({self.sandbox.pool.memory_budget_mib}) has no"
                f" room for one sandbox of isolation.memory_mib ({self.isolation.memory_mib})"
            )
        return self


# Reading and validation

Tree = Mapping[str, Any]
Location = tuple[str | int, ...]


class _Source(Protocol):
    """Settings from one source: the command line, the environment or a file."""

    @property
    def tree(self) -> Any: ...

    def origin(self, location: Location) -> str:
        """Return the place where a setting is written, for error messages."""


@dataclass(frozen=True, slots=True)
class _TreeSource:
    """Settings of a file, or of the command line."""

    tree: Any
    name: str

    def origin(self, location: Location) -> str:
        return f"{self.name}: {'.'.join(map(str, location)) or 'top'}"


@dataclass(frozen=True, slots=True)
class _Environment:
    """Settings of environment variables."""

    tree: Any

    def origin(self, location: Location) -> str:
        name = _variable_name(map(str, location))
        below = [each for each in _environment_variables() if each.startswith(name + ENV_DELIMITER)]
        return ", ".join(below) or name


def load(path: Path | None, command_line: Tree = MappingProxyType({})) -> Config:
    """Return the settings of the command line, the environment, a file and the defaults. Raises
    ConfigError."""
    tree: Any = {}
    if path is not None:
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    file = _TreeSource(_with_new_spellings({} if tree is None else tree, str(path)), str(path))
    config = _config_from_sources([file])  # an invalid value is an error even if it is overridden
    environment, options = (
        _Environment(read_environment()),
        _TreeSource(command_line, "command line"),
    )
    if environment.tree or options.tree:
        config = _config_from_sources([file, environment, options])
    return config


def parse(tree: Any, source: str) -> Config:
    """Return the settings of one tree; `source` names the tree in error messages. Old spellings of
    settings are logged. Raises ConfigError."""
    return _config_from_sources([_TreeSource(_with_new_spellings(tree, source), source)])


def _with_new_spellings(tree: Any, source: str) -> Any:
    try:
        return upgrade(tree, CONFIG_RULES, lambda warning: log.warning("%s: %s", source, warning))
    except DuplicateSettingError as error:
        raise ConfigError(f"{source}: {error}") from error


def _config_from_sources(sources: Sequence[_Source]) -> Config:
    """Return the settings of these sources; later ones take precedence. Raises ConfigError."""
    tree = sources[0].tree
    for source in sources[1:]:
        tree = _merge(tree, source.tree) if source.tree else tree
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        lines = (
            f"{_setting_origin(each['loc'], sources)}: {each['msg']}" for each in error.errors()
        )
        raise ConfigError("\n".join(lines)) from error
    if invalid := list(invalid_amounts(config.model_dump())):
        lines = (
            f"{_setting_origin(tuple(each.split('.')), sources)}: {INVALID_AMOUNT}"
            for each in invalid
        )
        raise ConfigError("\n".join(lines))
    return config


def _merge(base: Any, overrides: Any) -> Any:
    if not isinstance(base, Mapping) or not isinstance(overrides, Mapping):
        return overrides
    return {**base, **{key: _merge(base.get(key), value) for key, value in overrides.items()}}


def _setting_origin(location: Location, sources: Sequence[_Source]) -> str:
    """Return the place where the setting at a location was written."""
    for source in reversed(sources[1:]):
        if _contains(source.tree, location):
            return source.origin(location)
    return sources[0].origin(location)


def _contains(tree: Any, location: Location) -> bool:
    for key in location:
        if not isinstance(tree, Mapping) or key not in tree:
            return False
        tree = tree[key]
    return bool(location)


INVALID_AMOUNT = "must not be negative or infinite"


def invalid_amounts(tree: Tree, prefix: str = "") -> Iterator[str]:
    """Yield the path of each number that is negative, infinite or not a number."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from invalid_amounts(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not 0 <= value < math.inf:
            yield f"{prefix}{key}"


# The environment


def read_environment() -> dict[str, Any]:
    """Return the settings of the environment variables `LLM_SANDBOX_*`. Raises ConfigError."""
    variables = _environment_variables()
    if not variables:  # the import below takes 40 ms
        return {}
    known = {_variable_name(path): path for path in setting_paths(Config)}
    if unknown := [name for name in variables if name not in known]:
        raise ConfigError("\n".join(_unknown_variable_message(name, known) for name in unknown))
    from pydantic_settings import EnvSettingsSource
    from pydantic_settings.exceptions import SettingsError

    try:
        source = EnvSettingsSource(
            Config,  # type: ignore[arg-type]  # a BaseSettings would take 25 ms to build
            env_prefix=ENV_PREFIX,
            env_nested_delimiter=ENV_DELIMITER,
            env_parse_none_str="null",
        )
        tree: dict[str, Any] = _decode_json_values(source())
    except (SettingsError, ValueError) as error:
        raise ConfigError(
            f"{', '.join(variables)}: {error}: write lists and sections as JSON"
        ) from error
    return tree


def _environment_variables() -> list[str]:
    return sorted(name for name in os.environ if name.startswith(ENV_PREFIX))


def _variable_name(path: Iterator[str] | Sequence[str]) -> str:
    """Return the name of the environment variable for a setting."""
    return ENV_PREFIX + ENV_DELIMITER.join(path).upper()


def setting_paths(section: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each setting and of each section, as a tuple of keys."""
    if isinstance(section, type) and issubclass(section, BaseModel):
        inner: dict[str, Any] = {
            name: field.annotation for name, field in section.model_fields.items()
        }
    elif isinstance(section, type) and is_dataclass(section):
        inner = {field.name: field.type for field in fields(section)}
    else:
        return
    for name, annotation in inner.items():
        yield (*prefix, name)
        yield from setting_paths(annotation, (*prefix, name))


def _decode_json_values(value: Any) -> Any:
    """Return the settings with JSON values decoded. pydantic-settings does not decode them inside
    of dataclasses."""
    if isinstance(value, dict):
        return {key: _decode_json_values(each) for key, each in value.items()}
    if isinstance(value, str) and value.startswith(("[", "{")):
        return json.loads(value)
    return value


def _unknown_variable_message(name: str, known_variables: Mapping[str, Sequence[str]]) -> str:
    old = ".".join(name.removeprefix(ENV_PREFIX).lower().split(ENV_DELIMITER))
    new = new_spelling(old)
    near = [_variable_name(new.split("."))] if new else get_close_matches(name, known_variables, 1)
    hint = f"write {near[0]}" if near else f"the settings are {ENV_PREFIX}SERVER__PORT and so on"
    return f"{name}: there is no such setting: {hint}"


# Values that the settings imply


def read_secret(variable: str | None) -> str | None:
    """Return the value of an environment variable that a setting names, or None if `variable` is
    None. Raises ConfigError if the variable is not set or holds a control character."""
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value.isprintable():
        raise ConfigError(f"the environment variable {variable} holds a control character")
    if not value:
        raise ConfigError(
            f"the environment variable {variable} is not set, but a setting or an option names it"
        )
    return value


def backend_key_variable(backend: BackendConfig) -> str | None:
    """Return the name of the environment variable with the backend's key, or None for no key."""
    if backend.api_key_env is not None:
        return backend.api_key_env
    is_default = backend.provider == "openai" and not backend.forward_client_key
    if (
        is_default
        and is_openai_url(backend.base_url)
        and os.environ.get(OPENAI_KEY_VARIABLE, "").strip()
    ):
        return OPENAI_KEY_VARIABLE
    return None


def is_openai_url(url: str | None) -> bool:
    """Return True if a URL is OpenAI's own. Only such a backend gets OPENAI_API_KEY by default."""
    parts = urlsplit(url or "")
    host = parts.hostname or ""
    return parts.scheme == "https" and (host == _OPENAI_HOST or host.endswith(f".{_OPENAI_HOST}"))


def check_key_forwarding(config: Config) -> None:
    """Raise ConfigError if `backend.forward_client_key` contradicts another setting."""
    backend, setting = config.backend, "backend.forward_client_key"
    if not backend.forward_client_key:
        return
    if backend.provider != "openai":
        raise ConfigError(f"{setting}: needs backend.provider openai (got {backend.provider})")
    if backend.api_key_env is not None:
        raise ConfigError(f"{setting}: remove backend.api_key_env, clients' keys are sent instead")
    if config.keys:
        raise ConfigError(f"{setting}: remove keys, clients send the backend's keys instead")


def effective_passthrough(config: Config) -> PassthroughSetting:
    """Return the effective `backend.passthrough`. Raises ConfigError if several keys would share
    the backend's stored data without `backend.passthrough_shared`."""
    backend = config.backend
    if backend.forward_client_key:
        return "all"
    if backend.passthrough == "all" and len(config.keys) > 1 and not backend.passthrough_shared:
        raise ConfigError(
            "backend.passthrough: with all, each of the several keys can list, read and delete what"
            " the others store at the backend (batches, threads, vector stores, …), because the"
            " backend sees one key. To allow this, set backend.passthrough_shared: true"
        )
    return backend.passthrough


def data_dir(config: Config) -> Path:
    """Return the directory for stored data and lock files."""
    if config.server.data_dir:
        return config.server.data_dir
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "llm-sandbox-proxy"
