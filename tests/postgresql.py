"""A PostgreSQL server of Debian's package `postgresql`, for tests."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import URL

from proxy.store import postgresql

SETTINGS = {
    "fsync": "off",  # nothing has to outlive the machine
    "full_page_writes": "off",
    "max_connections": "400",
    "unix_socket_directories": "''",
}
DEMOTED = "postgres"
"""The user that runs the server in place of root, as which it refuses to run."""


def find_programs() -> Path | None:
    """Return the directory of the newest PostgreSQL server's programs, or None."""
    found = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = sorted(found, key=lambda path: int(path.parts[-3]))
    return newest[-1].parent if newest else None


class PostgresqlServer:
    """A server on a free port of 127.0.0.1, with a password of its own."""

    def __init__(self, programs: Path, directory: Path) -> None:
        """Create the database cluster in an empty directory."""
        self._programs = programs
        self._data = directory / "data"
        self._log = directory / "log"
        self._user = DEMOTED if os.geteuid() == 0 else None
        if self._user:
            shutil.chown(directory, self._user)
        password = secrets.token_hex(8)
        password_file = directory / "password"
        password_file.write_text(password)
        if self._user:
            shutil.chown(password_file, self._user)
        self.port = _free_port()
        self.url = f"postgresql://proxy:{password}@127.0.0.1:{self.port}/postgres"
        self._run("initdb", "--auth=scram-sha-256", "--username=proxy", f"--pwfile={password_file}")

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        settings = {**SETTINGS, "port": str(self.port), "listen_addresses": "127.0.0.1"}
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        self._run("pg_ctl", "start", "--wait", f"--log={self._log}", f"--options={options}")

    def stop(self, mode: str = "immediate") -> None:
        """Stop the server: `immediate`, as a crash does, or `fast`."""
        self._run("pg_ctl", "stop", "--wait", f"--mode={mode}")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), f"--pgdata={self._data}", *arguments]
        done = subprocess.run(
            command,
            user=self._user,
            cwd="/",
            stdout=subprocess.DEVNULL if program == "pg_ctl" else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stdout or self._log.read_text()}")


@contextmanager
def running_server(programs: Path) -> Iterator[PostgresqlServer]:
    """Run a server, and remove it with its data at the end."""
    with tempfile.TemporaryDirectory(prefix="postgresql-") as name:
        server = PostgresqlServer(programs, Path(name))
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def server_for_tests() -> Iterator[PostgresqlServer]:
    """Run a server. Without its programs, skip the test, or fail with REQUIRE_POSTGRESQL."""
    programs = find_programs()
    if programs is None:
        if os.environ.get("REQUIRE_POSTGRESQL"):
            pytest.fail("Debian's package postgresql is missing")
        pytest.skip("Debian's package postgresql is missing")
    with running_server(programs) as server:
        yield server


def new_database(server: PostgresqlServer, name: str) -> URL:
    """Return the URL of a new schema with a name, which begins with a letter."""
    url = postgresql.database_url(server.url)
    engine = postgresql.create_pool(url, 1)
    with engine.begin() as connection:
        connection.exec_driver_sql(f'CREATE SCHEMA "{name}"')
    engine.dispose()
    return url.update_query_dict({"options": f"-csearch_path={name}"})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
