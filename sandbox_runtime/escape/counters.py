"""Attacks on resources that the kernel counts per user or for the whole host.

Each program takes a few times the amount that one sandbox may have and keeps it. Meanwhile the
neighbour sandbox does something that needs the same resource, and must get the same result as
before.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from sandbox_runtime.escape.context import (
    Attack,
    EscapeContext,
    EscapeSandbox,
    NeighbourDisturbedError,
    NotTriedError,
    run_python,
    running_python,
)
from sandbox_runtime.escape.inside.attempt import NUMBERS

_MANY_TERMINALS, _MANY_TIMERS, _MANY_QUEUES, _MANY_CONTEXTS = 128, 8192, 4, 16
_MANY_IN_FLIGHT, _MANY_HUGE_PAGES = 8192, 4
"""Amounts of each resource that the programs use up if nothing stops them."""
_HOLD_S = 60
_ANSWER_S = 20.0

_CALLS = f"""
import ctypes, os, signal, time
libc = ctypes.CDLL(None)
column = ("x86_64", "aarch64").index(os.uname().machine)
def call(numbers, *arguments):
    return libc.syscall(ctypes.c_long(numbers[column]), *arguments)
IO_SETUP, IO_DESTROY = {NUMBERS["io_setup"]}, {NUMBERS["io_destroy"]}
TIMER_CREATE = {NUMBERS["timer_create"]}
MQ_OPEN, MQ_UNLINK = {NUMBERS["mq_open"]}, {NUMBERS["mq_unlink"]}
NEW_QUEUE = os.O_CREAT | os.O_RDWR
"""
_TAKE = f"""
taken = 0
while taken < {{many}} and {{one}}:
    taken += 1
print(taken, flush=True)
time.sleep({_HOLD_S})
"""
TERMINALS = f"""
import os, time
held = []
try:
    while len(held) < {_MANY_TERMINALS}:
        held.append(os.openpty())
except OSError:
    pass
print(len(held), flush=True)
time.sleep({_HOLD_S})
"""
_NEW_TIMER = "call(TIMER_CREATE, 1, None, ctypes.byref(ctypes.c_long())) == 0"
TIMERS = _CALLS + _TAKE.format(many=_MANY_TIMERS, one=_NEW_TIMER)
ONE_TIMER = f"{_CALLS}print({_NEW_TIMER})"
_QUEUEING = f"{_CALLS}signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])\n"
_NEW_SIGNAL = "libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), None) == 0"
SIGNALS = _QUEUEING + _TAKE.format(many=_MANY_TIMERS, one=_NEW_SIGNAL)
ONE_SIGNAL = f"{_QUEUEING}print({_NEW_SIGNAL})"
IN_FLIGHT = f"""
import socket, time
(near, far), taken, at_once = socket.socketpair(), 0, 64
try:
    while taken < {_MANY_IN_FLIGHT}:
        socket.send_fds(near, [b"x"], [0] * at_once)
        taken += at_once
except OSError:
    pass
print(taken, flush=True)
time.sleep({_HOLD_S})
"""
ONE_IN_FLIGHT = """
import socket
near, far = socket.socketpair()
try:
    print(socket.send_fds(near, [b"x"], [0]) == 1)
except OSError as error:
    print(error)
"""
_MAKE_QUEUE = """
def make_queue(name):
    made = call(MQ_OPEN, name, NEW_QUEUE, 0o600, None) >= 0
    call(MQ_UNLINK, name)
    return made
"""
QUEUES = f"{_CALLS}{_MAKE_QUEUE}" + _TAKE.format(
    many=_MANY_QUEUES, one='make_queue(b"bomb-%d-%d" % (os.getpid(), taken))'
)
ONE_QUEUE = f'{_CALLS}{_MAKE_QUEUE}print(make_queue(b"one-%d" % os.getpid()))'
CONTEXTS = _CALLS + _TAKE.format(
    many=_MANY_CONTEXTS, one="call(IO_SETUP, 1024, ctypes.byref(ctypes.c_ulong())) == 0"
)
ONE_CONTEXT = f"""{_CALLS}
context = ctypes.c_ulong()
print(call(IO_SETUP, 1024, ctypes.byref(context)) == 0)
call(IO_DESTROY, context)
"""
_MAP_HUGE_PAGE = """
import mmap
MAP_HUGETLB, held = 0x40000, []
def map_huge_page():
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB
    try:
        held.append(mmap.mmap(-1, 2 << 20, flags=flags))
    except OSError:
        return False
    return True
"""
HUGE_PAGES = f"{_CALLS}{_MAP_HUGE_PAGE}" + _TAKE.format(
    many=_MANY_HUGE_PAGES, one="map_huge_page()"
)
ONE_HUGE_PAGE = f"{_MAP_HUGE_PAGE}print(map_huge_page())"


async def _use_terminal(sandbox: EscapeSandbox) -> str:
    command = "test -t 0 && echo well"
    result = await sandbox.exec(command, timeout_s=_ANSWER_S, stdin=None, shell_state="none")
    return result.stdout


def _program_runner(text: str) -> Callable[[EscapeSandbox], Awaitable[str]]:
    async def run(sandbox: EscapeSandbox) -> str:
        return (await run_python(sandbox, text)).stdout

    return run


@dataclass(frozen=True, slots=True)
class _Bomb:
    """An attack with a program that takes as much of a resource as it can, prints the amount and
    keeps it."""

    name: str
    resource: str
    program: str
    min_amount: int
    """The smallest amount with which the attack succeeds."""
    use_one: Callable[[EscapeSandbox], Awaitable[str]]
    """Uses the resource once, in the neighbour sandbox, and returns the output."""
    output_of_one: str | None = "True"
    """The output of `use_one` if it succeeds; None if it may fail even without an attack, because
    a sandbox may have none of the resource."""

    def attack(self) -> Attack:
        async def make(context: EscapeContext) -> str | None:
            neighbour = await context.neighbour()
            async with context.victim() as sandbox:
                return await self._run(sandbox, neighbour)

        return self._attack(make)

    def attack_at_strict_level(self) -> Attack:
        """Return the attack at level strict, where each sandbox has its own user on the host."""

        async def make(context: EscapeContext) -> str | None:
            strict = replace(context.isolation, level="strict")
            async with context.victim(strict) as neighbour, context.victim(strict) as sandbox:
                return await self._run(sandbox, neighbour)

        return self._attack(make)

    def _attack(self, make: Callable[[EscapeContext], Awaitable[str | None]]) -> Attack:
        description = f"Takes {self.resource} and keeps them."
        # A sandbox's own kernel has its own counters.
        return Attack(self.name, "bombs", description, make, own_kernel_holds=True)

    async def _run(self, sandbox: EscapeSandbox, neighbour: EscapeSandbox) -> str | None:
        before = await self.use_one(neighbour)
        if self.output_of_one not in (None, before.strip()):
            raise NotTriedError(f"the neighbour got no {self.resource} before: {before!r}")
        async with running_python(sandbox, self.program) as printed:
            after = await self.use_one(neighbour)
        if after != before:
            none = f"the neighbour sandbox gets no {self.resource} any more"
            raise NeighbourDisturbedError(f"{none}: {after!r}, before {before!r}")
        return (
            f"it took {printed.strip()} {self.resource}"
            if int(printed) >= self.min_amount
            else None
        )


_AT_STANDARD_LEVEL = (
    _Bomb(
        "terminal_bomb",
        "pseudo-terminals",
        TERMINALS,
        _MANY_TERMINALS,
        _use_terminal,
        output_of_one="well",
    ),
    _Bomb("timer_bomb", "timers", TIMERS, _MANY_TIMERS, _program_runner(ONE_TIMER)),
    _Bomb("signal_bomb", "queued signals", SIGNALS, _MANY_TIMERS, _program_runner(ONE_SIGNAL)),
    _Bomb(
        "message_queue_bomb",
        "message queues",
        QUEUES,
        _MANY_QUEUES,
        _program_runner(ONE_QUEUE),
        output_of_one=None,
    ),
    _Bomb(
        "aio_bomb",
        "contexts of I/O",
        CONTEXTS,
        _MANY_CONTEXTS,
        _program_runner(ONE_CONTEXT),
        output_of_one=None,
    ),
    _Bomb(
        "huge_page_bomb",
        "reserved huge pages",
        HUGE_PAGES,
        _MANY_HUGE_PAGES,
        _program_runner(ONE_HUGE_PAGE),
        output_of_one=None,
    ),
)
_AT_STRICT_LEVEL = (
    _Bomb(
        "strict_terminal_bomb",
        "pseudo-terminals",
        TERMINALS,
        _MANY_TERMINALS,
        _use_terminal,
        output_of_one="well",
    ),
    _Bomb("strict_timer_bomb", "timers", TIMERS, _MANY_TIMERS, _program_runner(ONE_TIMER)),
    _Bomb(
        "strict_signal_bomb", "queued signals", SIGNALS, _MANY_TIMERS, _program_runner(ONE_SIGNAL)
    ),
    _Bomb(
        "strict_in_flight_bomb",
        "files in flight",
        IN_FLIGHT,
        _MANY_IN_FLIGHT,
        _program_runner(ONE_IN_FLIGHT),
    ),
)
ATTACKS = (
    *(bomb.attack() for bomb in _AT_STANDARD_LEVEL),
    *(bomb.attack_at_strict_level() for bomb in _AT_STRICT_LEVEL),
)
