"""What the host does with commands: start one and hear it, hear one again or on, stop one."""

from __future__ import annotations

import os
from functools import partial

from sandbox_runtime.guest.commands import Command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_runtime.guest.agent import Agent
    from sandbox_runtime.guest.commands import Reading


class UnknownCommand(ValueError):
    """There is no such command, or no such reading of it."""


class Attachment:
    """A stream on which one reading of a command is delivered."""

    def __init__(self, agent: Agent, stream: int, request: dict[str, Any]) -> None:
        self._agent = agent
        self._stream = stream
        self._request = request
        self._command: Command | None = None
        self._next = self._offset = 0

    def follow(self, command: Command, reading: Reading) -> None:
        """Deliver a reading, from its start."""
        if command.listener:
            command.listener.detach()
        self._command, self._reading = command, reading
        command.listener = self
        if self._request["wait_s"] is not None:
            self._agent.after(self._request["wait_s"], partial(self._pause, reading))
        command.look_after(reading)
        self.tell()

    def _pause(self, reading: Reading) -> None:
        if self._command and self._command.listener is self:
            self._command.pause(reading)

    def tell(self) -> None:
        """There is something to deliver."""
        self._agent.pump(self._stream)

    def detach(self) -> None:
        """Another stream has taken over."""
        self._agent.fail(self._stream, "detached", "another stream has taken over")

    def pump(self, credit: int) -> tuple[int, bytes] | None:
        """The next piece of output to send, no longer than `credit`."""
        if not self._command:
            return None
        if self._next == len(self._reading.pieces):
            if self._reading.report is not None:
                self._command.listener = None
                self._agent.finish(self._stream, self._reading.report)
            return None
        kind, data = self._reading.pieces[self._next]
        piece = data[self._offset : self._offset + credit]
        self._offset += len(piece)
        if self._offset == len(data):
            self._next, self._offset = self._next + 1, 0
        return kind, piece

    def feed(self, data: bytes) -> None:
        """Somebody types."""
        if self._command:
            self._command.type(data, self._taken)

    def finish_input(self) -> None:
        """Somebody types the end of input."""
        if self._command:
            self._command.type_end()

    def _taken(self, count: int) -> None:
        self._agent.credit(self._stream, count)

    def reset(self) -> None:
        """The host has lost interest in the command."""
        if self._command:
            self._command.kill()
            self._agent.outcomes.acknowledge(self._command.id)


class Exec(Attachment):
    """A command that is started, or found if it was started before."""

    def __init__(self, agent: Agent, stream: int, request: dict[str, Any]) -> None:
        super().__init__(agent, stream, request)
        self._stdin = -1
        known = agent.outcomes.find(request["id"])
        if known:
            self.follow(known, known.finished or known.reading)
        elif request["stdin"] == "data":
            self._stdin = os.memfd_create("stdin")
        elif request["stdin"] == "terminal":
            self._run(-1)
        else:
            self._run(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def feed(self, data: bytes) -> None:
        """More of the standard input, all of which is collected first; or somebody types."""
        if self._stdin < 0:
            super().feed(data)
            return
        self._taken(len(data))
        while data:
            data = data[os.write(self._stdin, data) :]

    def finish_input(self) -> None:
        """The standard input is complete: start."""
        if self._stdin < 0:
            super().finish_input()
            return
        stdin, self._stdin = self._stdin, -1
        os.lseek(stdin, 0, os.SEEK_SET)
        self._run(stdin)

    def _run(self, stdin: int) -> None:
        command = Command(self._agent, self._request, stdin)
        self._agent.outcomes.add(command)
        self.follow(command, command.reading)

    def reset(self) -> None:
        """The host has lost interest in the command."""
        if self._stdin >= 0:
            os.close(self._stdin)
        super().reset()


class Attach(Attachment):
    """A reading of a known command: the last one once more, or the next."""

    def __init__(self, agent: Agent, stream: int, request: dict[str, Any]) -> None:
        super().__init__(agent, stream, request)
        command = agent.outcomes.find(request["id"])
        if not command:
            raise UnknownCommand(f"there is no command {request['id']}")
        if request["reading"] == command.reading.number:
            command.finished = None
            self.follow(command, command.reading)
        elif command.finished and request["reading"] == command.finished.number:
            self.follow(command, command.finished)
        else:
            raise UnknownCommand(f"there is no reading {request['reading']} of {request['id']}")


class Stop:
    """A command that is to end; its reading tells how it did."""

    def __init__(self, agent: Agent, stream: int, request: dict[str, Any]) -> None:
        command = agent.outcomes.find(request["id"])
        if not command:
            raise UnknownCommand(f"there is no command {request['id']}")
        command.stop()
        agent.finish(stream, {})
