"""The lease of a process on its runs, for processes of several machines, which cannot see each
other's file locks.

Each process has a row in the database and regularly postpones the row's expiry. A process that
finds the row of another process expired marks that process as dead. Only then may other processes
take over the runs of the dead process. The mark is permanent: a process that was cut off, and then
finds itself marked as dead, gives up its runs and continues under a new id.
"""

import logging
import threading
import uuid
from collections.abc import Callable

from sqlalchemy import (
    URL,
    ColumnElement,
    Float,
    delete,
    extract,
    func,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from proxy.errors import StoreError
from proxy.store import postgresql
from proxy.store.tables import PROCESSES

log = logging.getLogger(__name__)

LEASE_S = 15.0
"""Seconds after the last renewal for which a process counts as alive."""
RENEW_S = 3.0
"""Interval of the renewals, in seconds."""
REMEMBER_S = 24 * 3600
"""Seconds for which the row of a dead process stays. A process without a row counts as dead,
too."""
CONNECTIONS = 2
"""Maximum number of connections: one for the renewals, and one for `is_dead`."""


class ProcessLease:
    """The lease of this process on its runs. A background thread renews the lease until `release`
    is called. The lease has its own database connections, so that a renewal does not wait for other
    transactions."""

    def __init__(self, url: URL, *, lease_s: float = LEASE_S, renew_s: float = RENEW_S) -> None:
        """Insert the row of this process and start the renewals. Raises StoreError."""
        self.id = ""
        self.on_lost: Callable[[], object] = lambda: None
        """Called, in a thread, after this process was found dead and has got a new id."""
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._engine = postgresql.create_pool(url, CONNECTIONS).execution_options(
            isolation_level="AUTOCOMMIT"
        )
        self._released = threading.Event()
        try:
            self._register()
        except SQLAlchemyError as error:
            self._engine.dispose()
            raise StoreError(f"the process cannot be registered: {error}") from error
        self._thread = threading.Thread(
            target=self._renew_until_released, name="lease", daemon=True
        )
        self._thread.start()

    def is_dead(self, process_id: str) -> bool:
        """Return True if the process's row is missing or marked as dead. A row that has expired is
        marked first, unless the database server has been up for less than the time of a lease.
        Blocks for the queries. Raises SQLAlchemyError."""
        if process_id == self.id:
            return False
        row = PROCESSES.c
        is_dead = row.is_dead | (row.expires_at < _now())
        with self._engine.connect() as connection:
            query = select(is_dead).where(row.id == process_id)
            if connection.execute(query).scalar_one_or_none() is False:
                return False
            dead = update(PROCESSES).where(
                row.id == process_id, is_dead, _server_has_been_up(self._lease_s)
            )
            connection.execute(dead.values(is_dead=True))
            query = select(row.is_dead).where(row.id == process_id)
            return connection.execute(query).scalar_one_or_none() is not False

    def renew(self) -> None:
        """Postpone the expiry of this process's row. A thread calls this method regularly. If this
        process was marked as dead, give it a new id and call `on_lost`. Raises SQLAlchemyError."""
        row = PROCESSES.c
        change = update(PROCESSES).where(row.id == self.id, ~row.is_dead)
        with self._engine.connect() as connection:
            renewed = connection.execute(change.values(expires_at=_now() + self._lease_s))
        if not renewed.rowcount:
            log.error("other processes have found this process dead: its runs end")
            self._register()
            self.on_lost()

    def remove_dead_records(self) -> None:
        """Delete the rows that expired more than `REMEMBER_S` ago. Rows that no process has marked
        as dead are deleted too, once the database server has been up for the time of a lease."""
        row = PROCESSES.c
        is_dead = row.is_dead | _server_has_been_up(self._lease_s)
        with self._engine.connect() as connection:
            connection.execute(
                delete(PROCESSES).where(is_dead, row.expires_at < _now() - REMEMBER_S)
            )

    def release(self) -> None:
        """Give up the lease and close the connections. Safe to call twice."""
        if not self._released.is_set():
            self._released.set()
            self._thread.join()
            try:
                with self._engine.connect() as connection:
                    connection.execute(delete(PROCESSES).where(PROCESSES.c.id == self.id))
            except SQLAlchemyError as error:  # the lease ends by itself
                log.warning("the lease of this process cannot be given up: %s", error)
            self._engine.dispose()

    def _renew_until_released(self) -> None:
        while not self._released.wait(self._renew_s):
            try:
                self.renew()
            except SQLAlchemyError as error:
                log.warning("the lease of this process cannot be renewed: %s", error)

    def _register(self) -> None:
        process_id = uuid.uuid4().hex[:16]
        row = {"id": process_id, "expires_at": _now() + self._lease_s, "is_dead": False}
        with self._engine.connect() as connection:
            connection.execute(insert(PROCESSES).values(row))
        self.id = process_id


def _now() -> ColumnElement[float]:
    """Return an expression for the database server's time, so that the clocks of the machines need
    not agree."""
    return extract("epoch", func.clock_timestamp()).cast(Float)


def _server_has_been_up(seconds: float) -> ColumnElement[bool]:
    """Return a condition that is true if the database server has run for at least `seconds`. After
    a restart of the server, processes thus have time to renew their leases."""
    started = extract("epoch", func.pg_postmaster_start_time()).cast(Float)
    return started < _now() - literal(seconds)
