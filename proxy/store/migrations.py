"""The migration steps of the database's schema, in SQLite's spelling of the types. Released steps
must not be changed."""

from typing import Protocol

from sqlalchemy import Connection

from proxy.errors import StoreError

FILES = (
    """CREATE TABLE files (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        filename TEXT NOT NULL,
        purpose TEXT NOT NULL,
        mime_type TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        sha256 TEXT NOT NULL,
        blob TEXT NOT NULL,
        created_at BIGINT NOT NULL,
        expires_at BIGINT NOT NULL,
        deleted_at BIGINT
    )""",
    "CREATE INDEX files_of_owner ON files (owner, seq)",
)
CONTAINERS = (
    """CREATE TABLE containers (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        minutes BIGINT NOT NULL,
        memory_limit TEXT,
        network_policy TEXT,
        created_at BIGINT NOT NULL,
        last_active_at BIGINT NOT NULL,
        expires_at BIGINT NOT NULL,
        deleted_at BIGINT
    )""",
    "CREATE INDEX containers_of_owner ON containers (owner, seq)",
    """CREATE TABLE container_files (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        container_id TEXT NOT NULL,
        path TEXT NOT NULL,
        mime_type TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        sha256 TEXT NOT NULL,
        blob TEXT NOT NULL,
        source TEXT NOT NULL,
        created_at BIGINT NOT NULL,
        deleted_at BIGINT
    )""",
    "CREATE INDEX files_of_container ON container_files (container_id, seq)",
    "CREATE INDEX container_files_of_owner ON container_files (owner)",
)
WORKSPACES = (
    """CREATE TABLE workspaces (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        owner TEXT NOT NULL,
        session TEXT NOT NULL,
        state TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        sha256 TEXT NOT NULL,
        blob TEXT NOT NULL,
        expires_at BIGINT NOT NULL,
        UNIQUE (owner, session, state)
    )""",
    """CREATE TABLE parked_runs (
        run_id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        record TEXT NOT NULL,
        expires_at BIGINT NOT NULL
    )""",
)
RESPONSES = (
    """CREATE TABLE responses (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        session TEXT NOT NULL,
        state TEXT NOT NULL,
        record TEXT NOT NULL,
        previous_id TEXT,
        conversation_id TEXT,
        seen_seq BIGINT,
        worker TEXT,
        bytes BIGINT NOT NULL,
        created_at BIGINT NOT NULL,
        expires_at BIGINT NOT NULL
    )""",
    "CREATE TABLE streams (response_id TEXT PRIMARY KEY, frames TEXT NOT NULL)",
    "CREATE INDEX responses_of_owner ON responses (owner, expires_at, created_at, bytes)",
    """CREATE TABLE conversations (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        metadata TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        created_at BIGINT NOT NULL,
        expires_at BIGINT NOT NULL
    )""",
    "CREATE INDEX conversations_of_owner ON conversations (owner, expires_at, created_at, bytes)",
    """CREATE TABLE items (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL,
        owner TEXT NOT NULL,
        holder TEXT NOT NULL,
        source TEXT NOT NULL,
        body TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        deleted_at BIGINT
    )""",
    "CREATE UNIQUE INDEX items_of_holder ON items (holder, id)",
    "CREATE INDEX items_in_order ON items (holder, seq)",
    "CREATE INDEX items_of_owner ON items (owner, id)",
)
STORED_RUNS = (
    # The format of `record` depends on the code: a step for a new format must empty this table.
    """CREATE TABLE runs (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        key TEXT,
        fingerprint TEXT NOT NULL,
        status TEXT NOT NULL,
        process TEXT NOT NULL,
        for_retry BOOLEAN NOT NULL,
        model TEXT NOT NULL,
        container_id TEXT NOT NULL,
        created_at BIGINT NOT NULL,
        record TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        expires_at BIGINT
    )""",
    "CREATE INDEX runs_by_key ON runs (owner, key)",
    "CREATE INDEX runs_by_fingerprint ON runs (owner, fingerprint)",
    "ALTER TABLE parked_runs RENAME TO parked_runs_before",
    """CREATE TABLE parked_runs (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        record TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        expires_at BIGINT NOT NULL,
        UNIQUE (owner, name)
    )""",
    """INSERT INTO parked_runs (owner, name, record, bytes, expires_at)
        SELECT owner, run_id, record, length(record), expires_at
        FROM parked_runs_before ORDER BY expires_at""",
    "DROP TABLE parked_runs_before",
    "CREATE INDEX parked_runs_of_owner ON parked_runs (owner, seq)",
)
SPENDING = (
    """CREATE TABLE spending (
        owner TEXT NOT NULL,
        day BIGINT NOT NULL,
        runs BIGINT NOT NULL,
        tokens BIGINT NOT NULL,
        cost_usd FLOAT NOT NULL,
        commands BIGINT NOT NULL,
        cpu_s FLOAT NOT NULL,
        egress_bytes BIGINT NOT NULL,
        tool_output_chars BIGINT NOT NULL,
        PRIMARY KEY (owner, day)
    )""",
)
RUN_SUMMARIES = (
    """CREATE TABLE run_summaries (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        status TEXT NOT NULL,
        process TEXT NOT NULL,
        model TEXT NOT NULL,
        container_id TEXT NOT NULL,
        created_at BIGINT NOT NULL,
        record TEXT NOT NULL,
        expires_at BIGINT NOT NULL
    )""",
    "CREATE INDEX run_summaries_of_owner ON run_summaries (owner, seq)",
    "CREATE INDEX run_summaries_by_end ON run_summaries (expires_at)",
)
TOOL_VERDICTS = (
    """CREATE TABLE tool_verdicts (
        backend TEXT NOT NULL,
        model TEXT NOT NULL,
        reason TEXT,
        words TEXT NOT NULL,
        version TEXT,
        found_at FLOAT NOT NULL,
        PRIMARY KEY (backend, model)
    )""",
)
BACKEND_RESPONSES = (
    """CREATE TABLE backend_responses (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        expires_at BIGINT NOT NULL,
        UNIQUE (owner, id)
    )""",
    "CREATE INDEX backend_responses_in_order ON backend_responses (owner, seq)",
)
TRAJECTORIES = (
    """CREATE TABLE trajectories (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        process TEXT,
        gone TEXT,
        bytes BIGINT NOT NULL,
        created_at BIGINT NOT NULL,
        expires_at BIGINT NOT NULL,
        deleted_at BIGINT
    )""",
    "CREATE INDEX trajectories_of_owner ON trajectories (owner, seq)",
    "CREATE INDEX trajectories_by_end ON trajectories (expires_at)",
    """CREATE TABLE trajectory_parts (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        trajectory_id TEXT NOT NULL,
        data BLOB NOT NULL
    )""",
    "CREATE INDEX parts_of_trajectory ON trajectory_parts (trajectory_id, seq)",
)
# Earlier rows have no `root_run_id`, so each becomes the first choice of its own run. They have no
# `ended_at` either, so the time of creation takes its place.
TRAJECTORY_ENDS = (
    "ALTER TABLE trajectories RENAME COLUMN gone TO deletion_reason",
    "ALTER TABLE trajectories ADD COLUMN root_run_id TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE trajectories ADD COLUMN ended_at BIGINT",
    "UPDATE trajectories SET root_run_id = id",
    """UPDATE trajectories SET ended_at = created_at
        WHERE process IS NULL OR deletion_reason IS NOT NULL""",
    "CREATE INDEX trajectories_by_root ON trajectories (root_run_id)",
)
TRAJECTORY_REWARDS = (
    """CREATE TABLE trajectory_rewards (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        trajectory_id TEXT NOT NULL,
        value FLOAT,
        source TEXT NOT NULL,
        reason TEXT NOT NULL,
        created_at BIGINT NOT NULL
    )""",
    "CREATE INDEX rewards_of_trajectory ON trajectory_rewards (trajectory_id, seq)",
)
TRAJECTORY_LABELS = (
    "ALTER TABLE trajectories ADD COLUMN group_id TEXT",
    "ALTER TABLE trajectories ADD COLUMN task_id TEXT",
    "ALTER TABLE trajectories ADD COLUMN session_id TEXT",
    """CREATE INDEX trajectories_of_group ON trajectories (owner, group_id, seq)
        WHERE group_id IS NOT NULL""",
    """CREATE INDEX trajectories_of_task ON trajectories (owner, task_id, seq)
        WHERE task_id IS NOT NULL""",
    """CREATE INDEX trajectories_of_session ON trajectories (owner, session_id, seq)
        WHERE session_id IS NOT NULL""",
)
# For the processes of several machines that share a PostgreSQL database. With SQLite these tables
# stay empty: the link key and the locks of the processes are files.
REPLICAS = (
    """CREATE TABLE processes (
        id TEXT PRIMARY KEY,
        expires_at FLOAT NOT NULL,
        is_dead BOOLEAN NOT NULL
    )""",
    "CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL)",
    """CREATE TABLE run_events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        run_id TEXT NOT NULL,
        events TEXT NOT NULL,
        is_first BOOLEAN NOT NULL,
        is_last BOOLEAN NOT NULL,
        created_at BIGINT NOT NULL
    )""",
    "CREATE INDEX events_of_run ON run_events (run_id, seq)",
)
DEFAULT_INSTRUCTIONS = (
    """CREATE TABLE default_instructions (
        backend TEXT NOT NULL,
        model TEXT NOT NULL,
        instruction TEXT NOT NULL,
        found_at FLOAT NOT NULL,
        PRIMARY KEY (backend, model)
    )""",
)
RUN_CHECKPOINTS = ("ALTER TABLE runs ADD COLUMN checkpoint TEXT",)
STEPS = (
    *(FILES, CONTAINERS, WORKSPACES, RESPONSES, STORED_RUNS, SPENDING, RUN_SUMMARIES),
    *(TOOL_VERDICTS, BACKEND_RESPONSES, TRAJECTORIES, TRAJECTORY_ENDS, TRAJECTORY_REWARDS),
    *(TRAJECTORY_LABELS, REPLICAS, DEFAULT_INSTRUCTIONS, RUN_CHECKPOINTS),
)


class SchemaDialect(Protocol):
    """The differences between databases in a migration of the schema. See `sqlite` and
    `postgresql`."""

    def schema_version(self, connection: Connection) -> int: ...

    def set_schema_version(self, connection: Connection, version: int) -> None: ...

    def adapt_statement(self, statement: str) -> str: ...


def migrate(connection: Connection, dialect: SchemaDialect) -> None:
    """Apply the missing migration steps in the caller's transaction. Raises StoreError."""
    version = dialect.schema_version(connection)
    if version > len(STEPS):
        raise StoreError("it was written by a newer version of this proxy")
    if version == len(STEPS):
        return
    for step in STEPS[version:]:
        for statement in step:
            connection.exec_driver_sql(dialect.adapt_statement(statement))
    dialect.set_schema_version(connection, len(STEPS))
