"""Messages between the processes that share a PostgreSQL database, by LISTEN and NOTIFY.

A message may be lost, for example while the database is being restarted. The sender checks in the
database whether the message had an effect.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import URL, Engine, func, select
from sqlalchemy.exc import SQLAlchemyError

from proxy.errors import StoreUnavailableError
from proxy.store import postgresql
from proxy.store.records import ProcessRegistration

log = logging.getLogger(__name__)

CHANNEL = "sandbox_proxy"
"""The channel of all processes. Each process ignores the messages to other processes, which are
few."""
RECONNECT_S = 1.0
"""Pause before the next attempt to connect, in seconds."""
WAKE_S = 30.0
"""Seconds without a message after which the connection is checked."""
STOP = "stop"
MessageKind = Literal["cancel", "follow", "follow_frames", "published"]
"""cancel: cancel the run. follow: publish the events of the run for the sender. follow_frames:
publish the frames of the run's stored response for the sender. published: the sender has published
events or frames of the run."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message to another process about a run."""

    kind: MessageKind
    run_id: str
    sender: str = ""
    """The id of the process that sent the message. `ProcessMessenger` sets this field."""


class ProcessMessenger:
    """Sends messages to other processes, and receives the messages to this process in a thread,
    from construction until `close`."""

    def __init__(self, url: URL, process: ProcessRegistration) -> None:
        self._process = process
        self._engine: Engine = postgresql.create_pool(url, 1, 1).execution_options(
            isolation_level="AUTOCOMMIT"
        )
        self._on_message: Callable[[Message], object] = lambda _: None
        self._closing = threading.Event()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="messages", daemon=True)
        self._thread.start()

    def call_on_message(self, callback: Callable[[Message], object]) -> None:
        """Call `callback` for each message, in the thread that receives it."""
        self._on_message = callback

    def wait_until_listening(self, timeout_s: float) -> bool:
        """Return True once this process receives messages, False after the timeout. Blocks."""
        return self._listening.wait(timeout_s)

    def send(self, process_id: str, message: Message) -> None:
        """Send a message to a process. Blocks. Raises StoreUnavailableError."""
        try:
            self._notify(f"{process_id} {message.kind} {message.run_id} {self._process.id}")
        except SQLAlchemyError as error:
            raise StoreUnavailableError from error

    def close(self) -> None:
        """Stop receiving and close the connections. Safe to call twice."""
        if not self._closing.is_set():
            self._closing.set()
            with suppress(SQLAlchemyError):  # then the thread ends at its next check
                self._notify(f"{self._process.id} {STOP} - -")
            self._thread.join(2 * RECONNECT_S)
            self._engine.dispose()

    def _notify(self, payload: str) -> None:
        with self._engine.connect() as connection:
            connection.execute(select(func.pg_notify(CHANNEL, payload)))

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                with self._engine.connect() as connection:
                    connection.exec_driver_sql(f"LISTEN {CHANNEL}")
                    self._listening.set()
                    self._receive(connection.connection.driver_connection)
                    connection.exec_driver_sql("UNLISTEN *")
            except Exception as error:  # noqa: BLE001 - the driver's, whose package is optional
                self._listening.clear()
                if not self._closing.wait(RECONNECT_S):
                    log.warning("messages of other processes cannot be received: %s", error)

    def _receive(self, connection: Any) -> None:
        """Process messages until `close` is called. Raises the driver's errors."""
        while not self._closing.is_set():
            for notification in connection.notifies(timeout=WAKE_S, stop_after=1):
                self._process_payload(notification.payload)
            connection.execute("SELECT 1")

    def _process_payload(self, payload: str) -> None:
        process_id, kind, run_id, sender, *_ = [*payload.split(" "), "", "", ""]
        if process_id == self._process.id and kind in get_args(MessageKind):
            try:
                self._on_message(Message(kind, run_id, sender))  # type: ignore[arg-type]  # checked above
            except Exception:
                log.exception("a message of another process cannot be processed")
