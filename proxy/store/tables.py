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
    """Text that may come from clients. An unpaired surrogate, which JSON can contain but SQLite
    cannot store, becomes a question mark."""

    impl = types.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or value.isascii():
            return value
        return value.encode(errors="replace").decode()


METADATA = MetaData()


def _with_seq(name: str, *columns: Column[Any]) -> Table:
    """Return a table with a `seq` column, which numbers the rows in the order of creation."""
    return Table(name, METADATA, Column("seq", Integer, primary_key=True), *columns)


def _text(*names: str) -> list[Column[str]]:
    return [Column(name, Text) for name in names]


def _integer(*names: str) -> list[Column[int]]:
    return [Column(name, BigInteger) for name in names]


def _float(*names: str) -> list[Column[float]]:
    return [Column(name, Float) for name in names]


# A row with `deleted_at` stays for a while, so that a client that deletes items while it lists them
# can continue after a deleted item.
FILES = _with_seq(
    "files",
    *_text("id", "owner", "filename", "purpose", "mime_type"),
    *_integer("bytes"),
    *_text("sha256", "blob"),
    *_integer("created_at", "expires_at", "deleted_at"),
)
CONTAINERS = _with_seq(
    "containers",
    *_text("id", "owner", "name"),
    *_integer("minutes"),
    *_text("memory_limit", "network_policy"),
    *_integer("created_at", "last_active_at", "expires_at", "deleted_at"),
)
CONTAINER_FILES = _with_seq(
    "container_files",
    *_text("id", "owner", "container_id", "path", "mime_type"),
    *_integer("bytes"),
    *_text("sha256", "blob", "source"),
    *_integer("created_at", "deleted_at"),
)
WORKSPACES = _with_seq(
    "workspaces",
    *_text("owner", "session", "state"),
    *_integer("bytes"),
    *_text("sha256", "blob"),
    *_integer("expires_at"),
)
RESPONSES = _with_seq(
    "responses",
    *_text("id", "owner", "session", "state", "record", "previous_id", "conversation_id"),
    *_integer("seen_seq"),
    *_text("worker"),
    *_integer("bytes", "created_at", "expires_at"),
)
# A separate table: streams are long, and SQLite rewrites the whole row on an update.
STREAMS = Table(
    "streams",
    METADATA,
    *_text("response_id", "frames"),
)
CONVERSATIONS = _with_seq(
    "conversations",
    *_text("id", "owner", "metadata"),
    *_integer("bytes", "created_at", "expires_at"),
)
# `holder` is the id of the item's parent, which is a response or a conversation.
ITEMS = _with_seq(
    "items",
    *_text("id", "owner", "holder", "source", "body"),
    *_integer("bytes", "deleted_at"),
)
SUSPENDED_RUNS = _with_seq(
    "parked_runs",
    *_text("owner", "name", "record"),
    *_integer("bytes", "expires_at"),
)
RUNS = _with_seq(
    "runs",
    *_text("id", "owner", "key", "fingerprint", "status", "process"),
    Column("for_retry", Boolean),
    *_text("model", "container_id"),
    *_integer("created_at"),
    *_text("record"),
    *_integer("bytes", "expires_at"),
)
# Summaries of all runs, without any text, for the runs API.
RUN_SUMMARIES = _with_seq(
    "run_summaries",
    *_text("id", "owner", "status", "process", "model", "container_id"),
    *_integer("created_at"),
    *_text("record"),
    *_integer("expires_at"),
)
# `root_run_id` is the run of the first choice. `deletion_reason` is null unless the row is a
# tombstone. `process` is null once the end of the run is stored; that of a dead process stays.
# `ended_at` is null while the run is running.
TRAJECTORIES = _with_seq(
    "trajectories",
    *_text("id", "owner", "process", "deletion_reason"),
    *_integer("bytes", "created_at", "expires_at", "deleted_at"),
    *_text("root_run_id"),
    *_integer("ended_at"),
    *_text("group_id", "task_id", "session_id"),
)
TRAJECTORY_PARTS = _with_seq(
    "trajectory_parts",
    *_text("trajectory_id"),
    Column("data", LargeBinary),
)
# A row without a value: the trajectory cannot be scored.
TRAJECTORY_REWARDS = _with_seq(
    "trajectory_rewards",
    *_text("trajectory_id"),
    *_float("value"),
    *_text("source", "reason"),
    *_integer("created_at"),
)
# The owners of responses that the backend stores for `:plain` models, under the backend's ids.
BACKEND_RESPONSES = _with_seq(
    "backend_responses",
    *_text("owner", "id"),
    *_integer("expires_at"),
)
# Days are counted from 1970, UTC.
SPENDING = Table(
    "spending",
    METADATA,
    *_text("owner"),
    *_integer("day", "runs", "tokens"),
    *_float("cost_usd"),
    *_integer("commands"),
    *_float("cpu_s"),
    *_integer("egress_bytes", "tool_output_chars"),
)
# `reason` is why a model gets no tools; null if it gets tools.
TOOL_VERDICTS = Table(
    "tool_verdicts",
    METADATA,
    *_text("backend", "model", "reason", "words", "version"),
    *_float("found_at"),
)
