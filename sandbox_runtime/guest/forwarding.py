"""The way out: every connection to a port on the sandbox's loopback becomes a stream to the host,
which decides. Nothing of what passes is looked at in here."""

from __future__ import annotations

import socket

from sandbox_runtime.protocol import DATA, MAX_DATA_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandbox_runtime.guest.agent import Agent

MAX_CONNECTIONS = 256


class Forwarding:
    """The port that programs connect to."""

    def __init__(self, agent: Agent, port: int) -> None:
        self._agent = agent
        self._open = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
            self._socket.listen(128)
        except OSError:
            self._socket.close()  # there is no loopback, or a program of the image has the port
            return
        self._socket.setblocking(False)
        agent.watch(self._socket.fileno(), read=self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._open += 1
        if self._open == MAX_CONNECTIONS:
            self._agent.unwatch(self._socket.fileno())
        self._agent.open(lambda stream: Forwarded(self._agent, stream, connection, self))

    def closed(self) -> None:
        """One of them is over."""
        self._open -= 1
        if self._open == MAX_CONNECTIONS - 1:
            self._agent.watch(self._socket.fileno(), read=self._accept)


class Forwarded:
    """One connection of a program inside."""

    def __init__(
        self, agent: Agent, stream: int, connection: socket.socket, port: Forwarding
    ) -> None:
        self._agent = agent
        self._stream = stream
        self._socket = connection
        self._fd = connection.fileno()
        self._port = port
        self._unwritten = bytearray()
        self._reading = False
        self._sent_all = self._host_ends = self._shut = False
        agent.pump(stream)

    # From the program to the host

    def pump(self, credit: int) -> tuple[int, bytes] | None:
        """The next piece that the program wrote; it is asked for again once there is some."""
        if self._sent_all:
            return None
        try:
            data = self._socket.recv(min(credit, MAX_DATA_BYTES))
        except BlockingIOError:
            self._reading = True
            self._watch()
            return None
        except OSError:
            self._abort()
            return None
        if data:
            return DATA, data
        self._sent_all = True
        self._agent.send_end(self._stream)
        self._close_if_over()
        return None

    def _readable(self) -> None:
        self._reading = False
        self._watch()
        self._agent.pump(self._stream)

    # From the host to the program

    def feed(self, data: bytes) -> None:
        """Bytes for the program."""
        self._unwritten += data
        self._write()

    def finish_input(self) -> None:
        """The host has no more."""
        self._host_ends = True
        self._write()

    def _write(self) -> None:
        try:
            if self._unwritten:
                count = self._socket.send(self._unwritten)
                del self._unwritten[:count]
                self._agent.credit(self._stream, count)
        except BlockingIOError:
            pass
        except OSError:
            self._abort()
            return
        if self._host_ends and not self._unwritten and not self._shut:
            self._shut = True
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self._abort()
                return
        self._watch()
        self._close_if_over()

    # Its life

    def _watch(self) -> None:
        read = self._readable if self._reading else None
        self._agent.watch(self._fd, read=read, write=self._write if self._unwritten else None)

    def _close_if_over(self) -> None:
        if self._sent_all and self._shut:
            self._agent.leave(self._stream)
            self.reset()

    def _abort(self) -> None:
        self._agent.send_reset(self._stream)
        self.reset()

    def reset(self) -> None:
        """Close it."""
        self._agent.unwatch(self._fd)
        self._socket.close()
        self._port.closed()
