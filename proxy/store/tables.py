"""The tables, for queries. `migrations` creates them, with their keys and constraints."""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    types,
)


class Text(types.TypeDecorator[str]):
    """Text that may come from clients. A character that a database cannot store becomes a question
    mark: an unpaired surrogate, which JSON can contain, and with PostgreSQL the NUL character."""

    impl = types.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return value
        if not value.isascii():
            value = value.encode(errors="replace").decode()
        return value.replace("\0", "?") if dialect.name == "postgresql" else value


METADATA = MetaData()
_SEQ = BigInteger().with_variant(Integer, "sqlite")


def _table_with_seq(name: str, *columns: Column[Any]) -> Table:
    """Return a table with a `seq` column, which numbers the rows in the order of creation."""
    return Table(name, METADATA, Column("seq", _SEQ, primary_key=True), *columns)


def _text_columns(*names: str) -> list[Column[str]]:
    return [Column(name, Text) for name in names]


def _integer_columns(*names: str) -> list[Column[int]]:
    return [Column(name, BigInteger) for name in names]


def _float_columns(*names: str) -> list[Column[float]]:
    return [Column(name, Float) for name in names]


# A row with `deleted_at` stays for a while, so that a client that deletes items while it lists them
# can continue after a deleted item.
FILES = _table_with_seq(
    "files",
    *_text_columns("id", "owner", "filename", "purpose", "mime_type"),
    *_integer_columns("bytes"),
    *_text_columns("sha256", "blob"),
    *_integer_columns("created_at", "expires_at", "deleted_at"),
)
CONTAINERS = _table_with_seq(
    "containers",
    *_text_columns("id", "owner", "name"),
    *_integer_columns("minutes"),
    *_text_columns("memory_limit", "network_policy"),
    *_integer_columns("created_at", "last_active_at", "expires_at", "deleted_at"),
)
CONTAINER_FILES = _table_with_seq(
    "container_files",
    *_text_columns("id", "owner", "container_id", "path", "mime_type"),
    *_integer_columns("bytes"),
    *_text_columns("sha256", "blob", "source"),
    *_integer_columns("created_at", "deleted_at"),
)
WORKSPACES = _table_with_seq(
    "workspaces",
    *_text_columns("owner", "session", "state"),
    *_integer_columns("bytes"),
    *_text_columns("sha256", "blob"),
    *_integer_columns("expires_at"),
)
RESPONSES = _table_with_seq(
    "responses",
    *_text_columns("id", "owner", "session", "state", "record", "previous_id", "conversation_id"),
    *_integer_columns("seen_seq"),
    *_text_columns("worker"),
    *_integer_columns("bytes", "created_at", "expires_at"),
)
# A separate table: streams are long, and SQLite rewrites the whole row on an update.
STREAMS = Table(
    "streams",
    METADATA,
    *_text_columns("response_id", "frames"),
)
CONVERSATIONS = _table_with_seq(
    "conversations",
    *_text_columns("id", "owner", "metadata"),
    *_integer_columns("bytes", "created_at", "expires_at"),
)
# `holder` is the id of the item's parent, which is a response or a conversation.
ITEMS = _table_with_seq(
    "items",
    *_text_columns("id", "owner", "holder", "source", "body"),
    *_integer_columns("bytes", "deleted_at"),
)
SUSPENDED_RUNS = _table_with_seq(
    "parked_runs",
    *_text_columns("owner", "name", "record"),
    *_integer_columns("bytes", "expires_at"),
)
# `checkpoint` is null for a run that has ended or has no checkpoint. `bytes` does not include it.
RUNS = _table_with_seq(
    "runs",
    *_text_columns("id", "owner", "key", "fingerprint", "status", "process"),
    Column("for_retry", Boolean),
    *_text_columns("model", "container_id"),
    *_integer_columns("created_at"),
    *_text_columns("record"),
    *_integer_columns("bytes", "expires_at"),
    *_text_columns("checkpoint"),
)
# Summaries of all runs, without any text, for the runs API.
RUN_SUMMARIES = _table_with_seq(
    "run_summaries",
    *_text_columns("id", "owner", "status", "process", "model", "container_id"),
    *_integer_columns("created_at"),
    *_text_columns("record"),
    *_integer_columns("expires_at"),
)
# `root_run_id` is the run of the first choice. `deletion_reason` is null unless the row is a
# tombstone. `process` is null once the end of the run is stored; the id of a dead process stays.
# `ended_at` is null while the run is running.
TRAJECTORIES = _table_with_seq(
    "trajectories",
    *_text_columns("id", "owner", "process", "deletion_reason"),
    *_integer_columns("bytes", "created_at", "expires_at", "deleted_at"),
    *_text_columns("root_run_id"),
    *_integer_columns("ended_at"),
    *_text_columns("group_id", "task_id", "session_id"),
)
TRAJECTORY_PARTS = _table_with_seq(
    "trajectory_parts",
    *_text_columns("trajectory_id"),
    Column("data", LargeBinary),
)
# `value` is null if the trajectory cannot be scored.
TRAJECTORY_REWARDS = _table_with_seq(
    "trajectory_rewards",
    *_text_columns("trajectory_id"),
    *_float_columns("value"),
    *_text_columns("source", "reason"),
    *_integer_columns("created_at"),
)
# The owners of responses that the backend stores for `:plain` models. `id` is the backend's id.
BACKEND_RESPONSES = _table_with_seq(
    "backend_responses",
    *_text_columns("owner", "id"),
    *_integer_columns("expires_at"),
)
# `day` is the number of days since 1970-01-01, UTC.
SPENDING = Table(
    "spending",
    METADATA,
    *_text_columns("owner"),
    *_integer_columns("day", "runs", "tokens"),
    *_float_columns("cost_usd"),
    *_integer_columns("commands"),
    *_float_columns("cpu_s"),
    *_integer_columns("egress_bytes", "tool_output_chars"),
)
# `reason` is the reason why a model gets no tools; null if the model gets tools. `words` is the
# message of the ToolVerdict.
TOOL_VERDICTS = Table(
    "tool_verdicts",
    METADATA,
    *_text_columns("backend", "model", "reason", "words", "version"),
    *_float_columns("found_at"),
)
# The system message that a model's chat template adds to a request without a system message.
DEFAULT_INSTRUCTIONS = Table(
    "default_instructions",
    METADATA,
    *_text_columns("backend", "model", "instruction"),
    *_float_columns("found_at"),
)
# The events of runs that other processes follow, or the frames of their responses, as JSON; see
# `CrossProcessRuns`. `run_id` is the publication id of `RunRepository.publish`.
RUN_EVENTS = _table_with_seq(
    "run_events",
    *_text_columns("run_id", "events"),
    Column("is_first", Boolean),
    Column("is_last", Boolean),
    *_integer_columns("created_at"),
)
# Keys that all processes with the same PostgreSQL database share, such as the key that signs links.
SECRETS = Table("secrets", METADATA, *_text_columns("name"), Column("value", LargeBinary))
# The processes that share a PostgreSQL database; see `ProcessLease`. `expires_at` is in seconds
# since 1970.
PROCESSES = Table(
    "processes",
    METADATA,
    *_text_columns("id"),
    *_float_columns("expires_at"),
    Column("is_dead", Boolean),
)
