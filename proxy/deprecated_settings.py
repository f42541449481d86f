"""Old spellings of settings, which are accepted for one release, and the new spelling of each.

`CONFIG_RULES` are for config.yaml, `REQUEST_RULES` for a request's `sandbox`. `upgrade` applies
them. To rename a setting, add a row; to end the support of an old spelling, delete its row.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from policies.headers import RequestHeader

Warn = Callable[[str], None]
"""Called with one sentence for each old spelling."""
_MISSING = object()


class DuplicateSettingError(ValueError):
    """One tree of settings contains both the old and the new spelling of a setting."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(f"{old} and {new} are the same setting: remove {old}")
        self.old = old


class UpgradeRule(Protocol):
    """A change that turns old spellings into new ones."""

    @property
    def first_key(self) -> str:
        """Return the first key of the old path."""

    def apply(self, tree: Any, warn: Warn) -> Any:
        """Return the tree with new spellings. Raises DuplicateSettingError."""


def upgrade(tree: Any, rules: Iterable[UpgradeRule], warn: Warn) -> Any:
    """Return a tree of settings with new spellings. Raises DuplicateSettingError."""
    if not isinstance(tree, Mapping):
        return tree
    for rule in rules:
        if rule.first_key in tree:
            tree = rule.apply(tree, warn)
    return tree


def _identity(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class RenamedSetting:
    """A renamed setting. `*` in a path stands for any key, or for any entry of a list."""

    old: str
    new: str
    convert: Callable[[Any], Any] = _identity
    """Returns the value of the new setting for a value of the old setting."""

    @property
    def first_key(self) -> str:
        return self.old.partition(".")[0]

    def apply(self, tree: Any, warn: Warn) -> Any:
        section_path, old = _split_at_wildcard(self.old)
        _, new = _split_at_wildcard(self.new)

        def rename(section: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
            value = _get_setting(section, old)
            if value is _MISSING:
                return section
            old_path, new_path = prefix + ".".join(old), prefix + ".".join(new)
            if _get_setting(section, new) is not _MISSING:
                raise DuplicateSettingError(old_path, new_path)
            warn(f"{old_path} is deprecated: write {new_path}")
            return _with_setting(_without_setting(section, old), new, self.convert(value))

        return _change_sections(tree, section_path, rename)


@dataclass(frozen=True, slots=True)
class RenamedValue:
    """A renamed value of a setting, or of an entry in a list setting."""

    setting: str
    old: str
    new: str

    @property
    def first_key(self) -> str:
        return self.setting.partition(".")[0]

    def apply(self, tree: Any, warn: Warn) -> Any:
        section_path, path = _split_at_wildcard(self.setting)

        def rename(section: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
            value = _get_setting(section, path)
            values = value if isinstance(value, list) else [value]
            if self.old not in values:
                return section
            warn(f"{prefix}{'.'.join(path)}: {self.old} is deprecated: write {self.new}")
            values = [self.new if word == self.old else word for word in values]
            return _with_setting(section, path, values if isinstance(value, list) else values[0])

        return _change_sections(tree, section_path, rename)


@dataclass(frozen=True, slots=True)
class RemovedSetting:
    """A setting that has no effect any more."""

    setting: str
    hint: str
    """The setting or behaviour that replaces it, as a clause for the warning."""

    @property
    def first_key(self) -> str:
        return self.setting.partition(".")[0]

    def apply(self, tree: Any, warn: Warn) -> Any:
        section_path, path = _split_at_wildcard(self.setting)

        def remove(section: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
            if _get_setting(section, path) is _MISSING:
                return section
            warn(f"{prefix}{'.'.join(path)} has no effect ({self.hint}): remove it")
            return _without_setting(section, path)

        return _change_sections(tree, section_path, remove)


class _ReplacedApiKeyEnv:
    """Replaces `server.api_key_env` by an entry of `keys`."""

    first_key = "server"

    def apply(self, tree: Any, warn: Warn) -> Any:
        old = ("server", "api_key_env")
        variable = _get_setting(tree, old)
        if variable is _MISSING:
            return tree
        tree = _without_setting(tree, old)
        if variable is None:
            warn("server.api_key_env is deprecated: remove it")
            return tree
        entry = f"{{name: default, env: {variable}}}"
        warn(f"server.api_key_env is deprecated: write keys: [{entry}]")
        keys = tree.get("keys") or []
        if not isinstance(keys, list):
            return tree  # validation refuses `keys`
        return {**tree, "keys": [{"name": "default", "env": variable}, *keys]}


def _retries_from_attempts(attempts: Any) -> Any:
    """Return the number of retries for a number of attempts."""
    return attempts - 1 if type(attempts) is int else attempts


_EGRESS_RENAMES = {
    "mode": "mode",
    "allow": "allowed_hosts",
    "allow_cidrs": "allowed_cidrs",
    "headers": "headers",
    "max_connections": "max_connections",
    "max_mib_per_s": "max_mib_per_s",
}
_DAILY_BUDGETS = (
    "runs",
    "tokens",
    "cost_usd",
    "commands",
    "cpu_s",
    "egress_mib",
    "tool_output_chars",
)
_ISOLATION_SETTINGS = (
    "level",
    "memory_mib",
    "cpus",
    "pids",
    "disk_mib",
    "disk_mib_per_s",
    "open_files",
)
_EGRESS_TOTAL_HINT = "limits.max_egress_mib bounds the traffic of each run"

PROFILE_RENAMES = (
    RenamedSetting("computer", "enabled"),
    RenamedSetting("weak_models", "skip_models"),
    RenamedSetting("limits.wall_time_s", "limits.max_run_seconds"),
    RenamedSetting("limits.max_tokens", "limits.max_total_tokens"),
    *(
        RenamedSetting(f"isolation.egress.{old}", f"isolation.network.{_EGRESS_RENAMES[old]}")
        for old in _EGRESS_RENAMES
    ),
    RenamedSetting("inputs.move_text_over_tokens", "inputs.offload_text_over_tokens"),
    RenamedSetting("artifacts.keep_hours", "artifacts.retention_hours"),
    RenamedSetting("manner.kind", "agent.style"),
    *(RenamedSetting(f"per_day.{name}", f"budgets.daily.{name}") for name in _DAILY_BUDGETS),
    RenamedSetting("watch.rules.*.over", "watch.rules.*.target"),
    RenamedSetting("redact.secrets", "redaction.detectors"),
    RenamedSetting("redact.patterns", "redaction.patterns"),
)
PROFILE_VALUES = (
    RenamedValue("prompt", "strict", "compute_first"),
    RenamedValue("agent.style", "own", "default"),
    RenamedValue("agent.style", "paper", "reference"),
    RenamedValue("watch.rules.*.action", "flag", "log"),
    RenamedValue("watch.rules.*.action", "ask", "deny"),
    RenamedValue("redaction.detectors", "keys", "all"),
)
PROFILE_REMOVALS = (RemovedSetting("isolation.egress.max_mib", _EGRESS_TOTAL_HINT),)
CONFIG_RENAMES = (
    RenamedSetting("backend.kind", "backend.provider"),
    RenamedSetting("backend.timeout_s", "backend.read_timeout_s"),
    RenamedSetting("backend.attempts", "backend.max_retries", _retries_from_attempts),
    RenamedSetting("backend.context_tokens", "backend.max_model_len"),
    RenamedSetting("server.state_dir", "server.data_dir"),
    RenamedSetting("sandbox.pool.idle", "sandbox.pool.min_ready"),
    RenamedSetting("sandbox.pool.max_total", "sandbox.pool.max_sandboxes"),
    RenamedSetting("sandbox.pool.max_waiting", "sandbox.pool.queue_size"),
    RenamedSetting("sandbox.pool.wait_s", "sandbox.pool.queue_timeout_s"),
    *(
        RenamedSetting(f"sandbox.isolation.{name}", f"isolation.{name}")
        for name in _ISOLATION_SETTINGS
    ),
    *(
        RenamedSetting(
            f"sandbox.isolation.egress.{old}", f"isolation.network.{_EGRESS_RENAMES[old]}"
        )
        for old in _EGRESS_RENAMES
    ),
    RenamedSetting("sessions.keep_s", "sessions.idle_s"),
    RenamedSetting("sessions.keep_hours", "sessions.retention_hours"),
    RenamedSetting("files.keep_hours", "files.retention_hours"),
    RenamedSetting("responses.keep_hours", "responses.retention_hours"),
    RenamedSetting("audit.keep_days", "audit.retention_days"),
)
CONFIG_REMOVALS = (
    RemovedSetting("sandbox.agent", "there is one guest agent"),
    RemovedSetting("sandbox.isolation.egress.max_mib", _EGRESS_TOTAL_HINT),
)
_PROFILE_RULES: tuple[RenamedSetting | RenamedValue | RemovedSetting, ...] = (
    *PROFILE_REMOVALS,
    *PROFILE_RENAMES,
    *PROFILE_VALUES,
)
_PROFILE_PREFIXES = ("", "profiles.*.", "models.*.policy.", "keys.*.policy.")
"""The parts of config.yaml that contain settings of a profile."""


def _with_path_prefix(
    prefix: str, rule: RenamedSetting | RenamedValue | RemovedSetting
) -> UpgradeRule:
    """Return a rule for settings of a profile, with `prefix` before its setting paths."""
    if isinstance(rule, RenamedSetting):
        return replace(rule, old=prefix + rule.old, new=prefix + rule.new)
    return replace(rule, setting=prefix + rule.setting)


CONFIG_RULES: tuple[UpgradeRule, ...] = (
    _ReplacedApiKeyEnv(),
    *CONFIG_REMOVALS,
    *CONFIG_RENAMES,
    *(_with_path_prefix(prefix, rule) for prefix in _PROFILE_PREFIXES for rule in _PROFILE_RULES),
)
REQUEST_RULES: tuple[UpgradeRule, ...] = (
    RenamedSetting("documents", "offload_documents"),
    *_PROFILE_RULES,
)
HEADER_RENAMES: Mapping[str, str] = {
    RequestHeader.ENABLED: "x-sandbox-computer",
    RequestHeader.OFFLOAD_DOCUMENTS: "x-sandbox-documents",
}
"""The old name of each renamed header."""


def find_header(headers: Mapping[str, str], name: str) -> str | None:
    """Return the value of a header, which the client may have sent under its old name. `headers`
    have lower-case names. Raises DuplicateSettingError."""
    value, old = headers.get(name), headers.get(HEADER_RENAMES.get(name, ""))
    if value and old:
        raise DuplicateSettingError(HEADER_RENAMES[name], name)
    return value or old or None


def new_spelling(path: str) -> str | None:
    """Return the new path of a setting in config.yaml, or None if `path` is not an old spelling."""
    renames = (*CONFIG_RENAMES, *PROFILE_RENAMES)
    return next((rename.new for rename in renames if rename.old == path), None)


# Trees. Functions return changed copies.

Path = tuple[str, ...]


def _split_at_wildcard(path: str) -> tuple[Path, Path]:
    """Return the part of a path up to its last `*`, and the rest. The first part is empty if the
    path has no `*`."""
    section_path, star, rest = path.rpartition("*.")
    return tuple(f"{section_path}*".split(".")) if star else (), tuple(rest.split("."))


def _change_sections(
    tree: Any, section_path: Path, change: Callable[[Mapping[str, Any], str], Any], prefix: str = ""
) -> Any:
    """Return the tree with each section at `section_path` changed. `change` gets the section and
    the path of the section, which ends in a dot."""
    if not section_path:
        return change(tree, prefix) if isinstance(tree, Mapping) else tree
    key, *rest = section_path
    if key == "*" and isinstance(tree, list):
        return [
            _change_sections(entry, tuple(rest), change, f"{prefix}{n}.")
            for n, entry in enumerate(tree)
        ]
    if not isinstance(tree, Mapping):
        return tree
    keys = tree.keys() if key == "*" else tree.keys() & {key}
    return {
        name: _change_sections(value, tuple(rest), change, f"{prefix}{name}.")
        if name in keys
        else value
        for name, value in tree.items()
    }


def _get_setting(tree: Any, path: Path) -> Any:
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return _MISSING
        tree = tree[key]
    return tree


def _without_setting(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the tree without a setting, and without sections that are then empty."""
    key, *rest = path
    inner = _without_setting(tree[key], tuple(rest)) if rest else {}
    others = {name: value for name, value in tree.items() if name != key}
    return {**others, key: inner} if inner else others


def _with_setting(tree: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    key, *rest = path
    if not rest:
        return {**tree, key: value}
    section = tree.get(key, {})
    if not isinstance(section, Mapping):
        return {**tree}  # validation refuses this section
    return {**tree, key: _with_setting(section, tuple(rest), value)}
