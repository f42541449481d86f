"""config.yaml as one frozen tree; unknown keys are refused with their path."""

import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
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
from policies.budgets import DailyBudget
from policies.isolation import Isolation
from policies.limits import Limits
from policies.passthrough import PassthroughSetting
from policies.pool import PoolSettings, capacity
from policies.prices import Price
from policies.redaction import Redaction
from policies.rules import RuleSet
from policies.sessions import FileLimits, ResponseSettings, SessionSettings
from policies.steps import NarrationSetting, StepsSetting
from policies.tool_support import ToolSupport
from policies.workspace import InputLimits, Modality
from proxy.body_memory import DEFAULT_MIB

log = logging.getLogger(__name__)

OPENAI_KEY = "OPENAI_API_KEY"
_OPENAI = "api.openai.com"


REMOVED = {"sandbox.agent": "there is one agent, in C"}
"""Settings of the last release that do nothing any more, and why. They are still accepted."""


class ConfigError(Exception):
    """The configuration is wrong; one line for each mistake."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _unquoted_off(value: Any) -> Any:
    return "off" if value is False else value  # YAML 1.1 takes the bare word `off` for a boolean


class ServerConfig(_Section):
    """How clients reach the proxy."""

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    """0 takes a free one."""
    api_key_env: str | None = None
    """Name of the environment variable with the key clients must send; null lets everyone in."""
    operator_key_env: str | None = None
    """Name of the environment variable with the operator's key, which sees /metrics and the names
    of all profiles and is good for nothing else; null: who has the only key there is, with several
    nobody."""
    allow_open: bool = False
    """Whether the server may listen on other addresses than this machine's own without keys."""
    max_connections: int = Field(default=4096, ge=1)
    """How many connections of clients are answered at once; less where the process may open too few
    files for so many (half of its RLIMIT_NOFILE is for connections)."""
    public_url: str | None = Field(default=None, pattern="^https?://")
    """How clients reach this server, for file links; null takes it from each request."""
    state_dir: Path | None = None
    """All that is kept, and locks; null is $XDG_STATE_HOME/llm-sandbox-proxy."""
    steps: Annotated[StepsSetting, BeforeValidator(_unquoted_off)] = "auto"
    """How steps are shown to clients that do not say; auto: as suits the client."""
    narration: NarrationSetting = "content"
    """How a stream tells what the model says before a tool call; reasoning: for programs that take
    all content together for the answer, which then waits until it is known to be that."""
    on_disconnect: Literal["cancel", "detach"] = "cancel"
    """What becomes of a run when its client leaves, unless the request says."""
    request_bodies_mib: int = Field(default=DEFAULT_MIB, ge=1)
    """The memory in MiB for the bodies of all requests that are being answered; at least what one
    of the largest takes. A body counts three times: as received, as decoded (up to four bytes a
    character where a string is not ASCII), and as sent to the backend. With several keys, each may
    use half of it."""
    nonstream_keep_alive_s: float | None = Field(default=None, gt=0)
    """Silence after which an answer in one piece begins with blanks; its status is then 200, and an
    error stands in the body. null never does."""


class BackendConfig(_Section):
    """The language model's server."""

    kind: Literal["openai", "litellm", "scripted"] = "openai"
    """openai: any OpenAI-compatible URL; litellm: any of its providers; scripted: no model."""
    base_url: str | None = Field(default="http://127.0.0.1:8000/v1", pattern="^https?://")
    api_key_env: str | None = None
    """Name of the environment variable with the backend's key; null takes OPENAI_API_KEY, where it
    is set, for OpenAI's own URL."""
    forward_client_key: bool = False
    """Whether the backend is reached with each client's own key. Only for kind openai, and without
    keys of this server's."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest silence of the backend."""
    keep_alive_s: float = Field(default=4.0, ge=1, le=3600)
    """openai: how long an unused connection stays open; less than the backend's server keeps it
    (uvicorn: 5), or requests go out on one that is just being closed. While a command runs, one is
    kept open by HEAD requests."""
    attempts: int = Field(default=5, ge=1)
    """How often a call that failed for a passing reason is tried."""
    context_tokens: int | None = Field(default=None, ge=256)
    """The model's context window; null: as its server lists it or its refusals tell."""
    modalities: tuple[Modality, ...] = ("image",)
    """What the model takes in beside text; of the rest it is told where the file lies."""
    fetches_urls: bool = False
    """Whether the backend may be given URLs of pictures and the like, which it fetches from where
    it is, private addresses too. Otherwise the proxy fetches them, from public addresses only, and
    sends the bytes; in what is passed on unread (`:plain`) it refuses private ones."""
    tool_support: ToolSupport = "probe"
    """Which models are given tools, and so a computer. probe: those whose chat template passes
    tools on and whose server takes them, which is found out in the background; always: all, and
    nothing is found out; never: none."""
    passthrough: PassthroughSetting = "stateless"
    """openai: which of the backend's other paths are passed on. stateless: a list of those with
    which the backend keeps nothing (completions, embeddings, rerank, audio, …); all: every path
    that does not administer the backend. Whoever reaches such a path reaches what all clients keep
    there: files, batches, threads. With clients' own keys (forward_client_key) it is always all."""
    passthrough_shared: bool = False
    """Whether `passthrough: all` is meant for several keys too."""
    models: tuple[str, ...] = ()
    """litellm: what GET /v1/models lists."""
    prices: dict[str, Price] = {}
    """By model; they go before those of litellm's table, which is read where a cost is bounded."""
    script: Path | None = None
    """scripted: the YAML file to play."""


class DockerConfig(_Section):
    """Sandboxes in containers."""

    image: str = "llm-sandbox-proxy/sandbox:latest"
    """Any Linux image; `sandbox-proxy build-image` builds this one."""
    runtime: str | None = None
    """One of the engine's runtimes, such as runsc; null is the engine's default."""
    host: str | None = None
    """The engine's URL; null takes DOCKER_HOST or the local socket."""


class BubblewrapConfig(_Section):
    """Sandboxes without an engine."""

    rootfs: Path | None = None
    """A directory or a tar (`sandbox-proxy build-rootfs`, `docker export`) to run in; null shows
    the host's /usr read-only."""
    uid: int | None = Field(default=None, ge=1)
    """Host uid of the sandboxes where the proxy runs as root; null gives each one of its own, and
    with a rootfs all of them 65534."""
    allow_weak: bool = False
    """Whether sandboxes will do whose memory and processes only rlimits bound, where no cgroup can
    be written."""


class SandboxConfig(_Section):
    """Where the computers are, how many, and what their walls are."""

    backend: Literal["auto", "docker", "bubblewrap"] = "auto"
    """auto: docker where an engine answers that has the image, else bubblewrap; docker alone where
    sandbox.docker.runtime, sandbox.docker.host or DOCKER_HOST name an engine."""
    inputs: DirectoryPath | None = None
    """A directory of this host that every sandbox sees, read-only, at /testbed/shared."""
    self_test: bool = True
    """Whether a backend must show at start that nothing escapes from it."""
    docker: DockerConfig = DockerConfig()
    bubblewrap: BubblewrapConfig = BubblewrapConfig()
    isolation: Isolation = Isolation()
    pool: PoolSettings = PoolSettings()

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if not capacity(self.pool, self.isolation):
            raise ValueError("pool.memory_budget_mib has no room for one isolation.memory_mib")
        return self


class KeyConfig(_Section):
    """A key that was given out."""

    name: str
    env: str
    """Name of the environment variable with what its clients send."""
    profiles: tuple[str, ...] = ()
    """Those its requests may ask for; the first is theirs where nothing names another."""
    policy: dict[str, Any] = {}
    """What narrows them, in the shape of a profile."""


class ModelConfig(_Section):
    """What holds for one model, or for all of a pattern (`*`)."""

    profile: str | None = None
    """Its own, where the key has it too."""
    policy: dict[str, Any] = {}
    """What narrows its profile, in the shape of one."""
    tool_support: ToolSupport | None = None
    """Like backend.tool_support; null takes that."""


class PaperConfig(_Section):
    """What is the reference's own in the profile `paper`."""

    prompt_file: Path | None = None
    """A file of the reference's format (its config/general.yaml); null takes our words."""


class AuditConfig(_Section):
    """The logs of what runs do."""

    enabled: bool = False
    required: bool = True
    """Whether a run fails that cannot be written down."""
    key_env: str | None = None
    """Name of the environment variable with a secret, without which no log can be forged."""
    keep_days: float = 90.0


class Config(_Section):
    """The whole of config.yaml."""

    profile: str = "default"
    """What holds where neither request, nor model, nor key names another."""
    profiles: dict[str, dict[str, Any]] = {}
    """The operator's own: what differs from `extends`, by default from the profile `default`."""
    models: dict[str, ModelConfig] = {}
    keys: tuple[KeyConfig, ...] = ()
    """Beside server.api_key_env."""
    server: ServerConfig = ServerConfig()
    backend: BackendConfig = BackendConfig()
    sandbox: SandboxConfig = SandboxConfig()
    limits: Limits = Limits()
    per_day: DailyBudget = DailyBudget()
    inputs: InputLimits = InputLimits()
    artifacts: ArtifactLimits = ArtifactLimits()
    paper: PaperConfig = PaperConfig()
    watch: RuleSet = RuleSet()
    audit: AuditConfig = AuditConfig()
    redact: Redaction = Redaction()
    files: FileLimits = FileLimits()
    sessions: SessionSettings = SessionSettings()
    responses: ResponseSettings = ResponseSettings()


def load(path: Path | None) -> Config:
    """Read a file, or take the defaults. Raises ConfigError."""
    if path is None:
        return Config()
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    return parse(tree if tree is not None else {}, str(path))


def parse(tree: Any, source: str) -> Config:
    """Return a tree as configuration; settings in REMOVED are logged. Raises ConfigError."""
    try:
        config = Config.model_validate(_without_removed(tree, source))
    except ValidationError as error:
        lines = (
            f"{source}: {'.'.join(str(part) for part in mistake['loc']) or 'top'}: {mistake['msg']}"
            for mistake in error.errors()
        )
        raise ConfigError("\n".join(lines)) from error
    if wrong := list(no_amounts(config.model_dump())):
        raise ConfigError("\n".join(f"{source}: {path}: {NO_AMOUNT}" for path in wrong))
    return config


def _without_removed(tree: Any, source: str) -> Any:
    for path, why in REMOVED.items():
        section, _, key = path.partition(".")
        inner = tree.get(section) if isinstance(tree, dict) else None
        if isinstance(inner, dict) and key in inner:
            log.warning("%s: %s is ignored, %s: remove it", source, path, why)
            tree = {**tree, section: {name: inner[name] for name in inner if name != key}}
    return tree


NO_AMOUNT = "must not be negative, and not without end"


def no_amounts(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The paths of all numbers that are below zero, infinite or none."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from no_amounts(value, f"{above}{key}.")
        elif isinstance(value, int | float) and not 0 <= value < math.inf:
            yield f"{above}{key}"


def secret(variable: str | None) -> str | None:
    """The value of an environment variable that the configuration names. Raises ConfigError."""
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value.isprintable():
        raise ConfigError(f"the environment variable {variable} holds a control character")
    if not value:
        raise ConfigError(f"the environment variable {variable} is not set, and config names it")
    return value


def backend_key_variable(backend: BackendConfig) -> str | None:
    """The environment variable whose value the backend is sent as its key."""
    if backend.api_key_env is not None:
        return backend.api_key_env
    is_unnamed = backend.kind == "openai" and not backend.forward_client_key
    if is_unnamed and is_openai(backend.base_url) and os.environ.get(OPENAI_KEY, "").strip():
        return OPENAI_KEY
    return None


def is_openai(url: str | None) -> bool:
    """Whether an address is OpenAI's own: no other gets to see the key that is for OpenAI."""
    parts = urlsplit(url or "")
    host = parts.hostname or ""
    return parts.scheme == "https" and (host == _OPENAI or host.endswith(f".{_OPENAI}"))


def require_forwarding_fits(config: Config) -> None:
    """Raise ConfigError where clients' own keys cannot be the backend's."""
    backend, at = config.backend, "backend.forward_client_key"
    if not backend.forward_client_key:
        return
    if backend.kind != "openai":
        raise ConfigError(f"{at}: only a backend of kind openai can be asked about a key")
    if backend.api_key_env is not None:
        raise ConfigError(f"{at}: the backend gets clients' keys or backend.api_key_env, not both")
    if config.server.api_key_env is not None or config.keys:
        raise ConfigError(
            f"{at}: a client sends one key, which is the backend's then: leave server.api_key_env"
            " and keys out"
        )


def passthrough(config: Config) -> PassthroughSetting:
    """Return which paths are passed on. Raises ConfigError where clients would share, unawares,
    what they keep at the backend."""
    backend = config.backend
    if backend.forward_client_key:
        return "all"
    has_several = len(config.keys) + (config.server.api_key_env is not None) > 1
    if backend.passthrough == "all" and has_several and not backend.passthrough_shared:
        raise ConfigError(
            "backend.passthrough: with all, each of the several keys here lists, reads and deletes"
            " what the others keep at the backend (batches, threads, vector stores, …), for the"
            " backend sees one key. If that is meant, say backend.passthrough_shared: true too"
        )
    return backend.passthrough


def state_dir(config: Config) -> Path:
    """Where files and locks are kept."""
    if config.server.state_dir:
        return config.server.state_dir
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "llm-sandbox-proxy"
