"""The tables, for queries. `migrations` creates them."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    Integer,
    MetaData,
    Table,
    types,
)


class Text(types.TypeDecorator[str]):
    """Text of clients. Half a surrogate pair, which JSON can contain but no database stores,
    becomes a question mark."""

    impl = types.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or value.isascii():
            return value
        return value.encode(errors="replace").decode()


METADATA = MetaData()

# `seq` is the order of creation. A deleted row stays for a while, so that a client that deletes
# while it pages through a list can continue after the deleted row.
FILES = Table(
    "files",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("mime_type", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("blob", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("deleted_at", BigInteger),
)
CONTAINERS = Table(
    "containers",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("minutes", BigInteger, nullable=False),
    Column("memory_limit", Text),
    Column("network_policy", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("last_active_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("deleted_at", BigInteger),
)
CONTAINER_FILES = Table(
    "container_files",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("container_id", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("mime_type", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("blob", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("deleted_at", BigInteger),
)
WORKSPACES = Table(
    "workspaces",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("session", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("blob", Text, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
)
RESPONSES = Table(
    "responses",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("session", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("record", Text, nullable=False),
    Column("previous_id", Text),
    Column("conversation_id", Text),
    Column("seen_seq", BigInteger),
    Column("worker", Text),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
)
# A table of its own: streams are long, and SQLite rewrites a whole row.
STREAMS = Table(
    "streams",
    METADATA,
    Column("response_id", Text, primary_key=True),
    Column("frames", Text, nullable=False),
)
CONVERSATIONS = Table(
    "conversations",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("metadata", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
)
# The items of responses and conversations, in order; `holder` is the id of either.
ITEMS = Table(
    "items",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("holder", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("deleted_at", BigInteger),
)
SUSPENDED_RUNS = Table(
    "parked_runs",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("record", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
)
RUNS = Table(
    "runs",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("key", Text),
    Column("fingerprint", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("process", Text, nullable=False),
    Column("for_retry", Boolean, nullable=False),
    Column("model", Text, nullable=False),
    Column("container_id", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("record", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
)
# The summary of every run: what a client may ask about later, without its text.
RUN_SUMMARIES = Table(
    "run_summaries",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("process", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("container_id", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("record", Text, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
)
# Responses of `:plain` models, which the backend keeps under its own ids.
BACKEND_RESPONSES = Table(
    "backend_responses",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
)
# Days are counted from 1970, UTC.
SPENDING = Table(
    "spending",
    METADATA,
    Column("owner", Text, primary_key=True),
    Column("day", BigInteger, primary_key=True),
    Column("runs", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("cost_usd", Float, nullable=False),
    Column("commands", BigInteger, nullable=False),
    Column("cpu_s", Float, nullable=False),
    Column("egress_bytes", BigInteger, nullable=False),
    Column("tool_output_chars", BigInteger, nullable=False),
)
# `reason` is why a model is given no tools; null if it is given tools.
TOOL_VERDICTS = Table(
    "tool_verdicts",
    METADATA,
    Column("backend", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("reason", Text),
    Column("words", Text, nullable=False),
    Column("version", Text),
    Column("found_at", Float, nullable=False),
)
