"""Counts the executions of commands: each reports itself over TCP from its Pod to this process.

The test cluster enforces no network policy, so Pods reach this machine's address in the cluster.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

SANDBOX_FILE = "/tmp/sandbox"
MAX_REPORT_BYTES = 200


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of a command."""

    command: str
    sandbox: str
    """A random name that the first command in a sandbox gives to it."""


class CommandCounter:
    """The executions that were reported so far, in the order of their begin."""

    def __init__(self, host: str) -> None:
        self.executions: list[Execution] = []
        self._host = host
        self._port = 0
        self._changed = asyncio.Condition()

    def command(self, name: str, then: str = "true") -> str:
        """Return a shell command that reports itself under a name, runs `then`, and prints
        `ran in SANDBOX`."""
        return (
            f"[ -e {SANDBOX_FILE} ] || cat /proc/sys/kernel/random/uuid > {SANDBOX_FILE}\n"
            f'echo "{name} $(cat {SANDBOX_FILE})" > /dev/tcp/{self._host}/{self._port}\n'
            f"{then}\n"
            f'echo "ran in $(cat {SANDBOX_FILE})"'
        )

    def sandboxes(self, command: str) -> list[str]:
        """Return the sandboxes in which a command was executed, in order, each once. Fail if a
        sandbox has executed it twice."""
        found = Counter(each.sandbox for each in self.executions if each.command == command)
        assert set(found.values()) <= {1}, f"{command} was executed again: {found}"
        return list(found)

    async def began(self, command: str, times: int = 1) -> None:
        """Wait until a command was begun so many times."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: sum(each.command == command for each in self.executions) >= times
            )

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        report = await reader.read(MAX_REPORT_BYTES)
        writer.close()
        async with self._changed:
            self.executions.append(Execution(*report.decode().split()))
            self._changed.notify_all()

    async def listen(self) -> asyncio.Server:
        """Begin to receive reports."""
        server = await asyncio.start_server(self._receive, self._host, 0, limit=MAX_REPORT_BYTES)
        self._port = server.sockets[0].getsockname()[1]
        return server


@asynccontextmanager
async def command_counter(host: str) -> AsyncIterator[CommandCounter]:
    """Count executions on an address of this machine."""
    counter = CommandCounter(host)
    server = await counter.listen()
    try:
        yield counter
    finally:
        server.close()
