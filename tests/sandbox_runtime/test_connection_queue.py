"""A burst of connections is served at once; connections without end are served at a rate."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import pytest

from policies.egress import Egress
from sandbox_runtime.connection_queue import BURST_CONNECTIONS, CONNECTIONS_PER_S
from sandbox_runtime.egress.gateway import EgressGateways
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.protocol import (
    DATA,
    EOF,
    FIRST_WINDOW_BYTES,
    MAX_CONNECTIONS,
    OPEN,
    RESET,
    frame,
)
from tests.fakes.manual_clock import ManualClock
from tests.fakes.waiting import until
from tests.sandbox_runtime.scripted_guest import ScriptedGuest, scripted_sandbox

REQUEST = b"CONNECT refused.example:443 HTTP/1.1\r\n\r\n"


class ScriptedPrograms:
    """Programs of one sandbox, whose agent is scripted."""

    def __init__(self, sandbox: GuestSandbox, guest: ScriptedGuest, clock: ManualClock) -> None:
        self.sandbox = sandbox
        self.guest = guest
        self.clock = clock
        self._opened = 0

    def bind_gateway(self) -> Callable[[], Awaitable[None]]:
        """Bind a gateway that allows no host; return the function that removes it."""
        gateway = EgressGateways(resolve=_no_names).create(Egress())
        self.sandbox.set_connection_handler(gateway.serve)

        async def end() -> None:
            self.sandbox.set_connection_handler(None)
            await gateway.aclose()

        return end

    def open(self, count: int, *then: tuple[int, bytes]) -> None:
        """Open connections, and send these frames on each."""
        frames = ((OPEN, b""), *then)
        for _ in range(count):
            self._opened += 2
            self.guest.send_frames(b"".join(frame(self._opened, *each) for each in frames))

    def ask(self, count: int = MAX_CONNECTIONS) -> None:
        """Request a host on each of `count` new connections."""
        self.open(count, (DATA, REQUEST), (EOF, b""))

    async def answered(self) -> int:
        """Return the number of answered connections once all tasks wait."""
        await self.guest.wait_delivered()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        return self.guest.kinds.count(DATA)

    async def use_up_burst(self) -> None:
        """Open BURST_CONNECTIONS connections, so that further ones must wait."""
        before = self.guest.kinds.count(DATA)
        self.ask(BURST_CONNECTIONS)
        assert await self.answered() == before + BURST_CONNECTIONS


async def _no_names(host: str) -> list[str]:
    raise OSError(-2, "Name or service not known")


@pytest.fixture
async def programs() -> AsyncIterator[ScriptedPrograms]:
    clock = ManualClock()
    sandbox, guest = await scripted_sandbox(lambda n: b"", clock)
    yield ScriptedPrograms(sandbox, guest, clock)
    await sandbox.close()


async def test_burst_of_connections_is_answered_without_a_pause(programs: ScriptedPrograms) -> None:
    programs.bind_gateway()
    await programs.use_up_burst()
    assert programs.clock.asked == []


async def test_refusal_and_end_of_a_connection_are_sent_together(
    programs: ScriptedPrograms,
) -> None:
    programs.bind_gateway()
    programs.ask(10)
    assert await programs.answered() == 10
    assert programs.guest.writes == 20  # a RESET is written for itself
    assert programs.guest.kinds.count(EOF) == 10
    assert programs.guest.kinds.count(RESET) == 10


async def test_endless_sequence_of_connections_is_answered_at_the_allowed_rate(
    programs: ScriptedPrograms,
) -> None:
    programs.bind_gateway()
    await programs.use_up_burst()
    programs.ask()
    assert await programs.answered() == BURST_CONNECTIONS
    programs.clock.advance(1.0)
    assert await programs.answered() == BURST_CONNECTIONS + CONNECTIONS_PER_S
    programs.clock.advance(1.0)
    assert await programs.answered() == BURST_CONNECTIONS + 2 * CONNECTIONS_PER_S
    assert programs.guest.killed == 0


async def test_connections_are_answered_at_once_after_a_quiet_time(
    programs: ScriptedPrograms,
) -> None:
    programs.bind_gateway()
    await programs.use_up_burst()
    programs.clock.advance(BURST_CONNECTIONS / CONNECTIONS_PER_S)
    await programs.use_up_burst()
    assert programs.clock.asked == []


async def test_connection_whose_program_hangs_up_is_not_served(programs: ScriptedPrograms) -> None:
    programs.bind_gateway()
    await programs.use_up_burst()
    for _ in range(10):
        programs.open(MAX_CONNECTIONS, (DATA, REQUEST), (RESET, b""))
    programs.ask(1)
    assert await programs.answered() == BURST_CONNECTIONS
    programs.clock.advance(1 / CONNECTIONS_PER_S)
    assert await programs.answered() == BURST_CONNECTIONS + 1
    assert programs.clock.alarms == []
    assert programs.guest.killed == 0


async def test_end_of_a_lease_closes_waiting_connections_and_resets_the_rate(
    programs: ScriptedPrograms,
) -> None:
    shut = programs.bind_gateway()
    await programs.use_up_burst()
    programs.ask()
    await programs.answered()
    await shut()
    assert programs.guest.kinds.count(RESET) == BURST_CONNECTIONS + MAX_CONNECTIONS
    programs.bind_gateway()
    programs.ask()
    assert await programs.answered() == BURST_CONNECTIONS + MAX_CONNECTIONS


async def test_connections_without_a_lease_are_closed_at_the_allowed_rate(
    programs: ScriptedPrograms,
) -> None:
    programs.open(BURST_CONNECTIONS)
    await programs.answered()
    programs.open(MAX_CONNECTIONS)
    await programs.answered()
    assert programs.guest.kinds.count(RESET) == BURST_CONNECTIONS
    programs.clock.advance(1.0)
    await programs.answered()
    assert programs.guest.kinds.count(RESET) == BURST_CONNECTIONS + CONNECTIONS_PER_S


async def test_closing_the_sandbox_drops_waiting_connections(
    programs: ScriptedPrograms,
) -> None:
    before = asyncio.all_tasks()
    programs.bind_gateway()
    await programs.use_up_burst()
    programs.ask()
    await programs.answered()
    assert len(programs.clock.alarms) == 1
    await programs.sandbox.close()
    assert programs.clock.alarms == []
    assert {task.get_name() for task in asyncio.all_tasks() - before} == set()


async def test_data_beyond_the_first_window_of_a_waiting_connection_marks_the_sandbox_as_lost(
    programs: ScriptedPrograms,
) -> None:
    programs.bind_gateway()
    await programs.use_up_burst()
    full = [(DATA, bytes(FIRST_WINDOW_BYTES))]
    programs.open(1, *full)
    await programs.answered()
    assert programs.guest.killed == 0
    programs.open(1, *full, (DATA, b"x"))
    with anyio.fail_after(20):
        await until(lambda: programs.sandbox.lost is not None)
