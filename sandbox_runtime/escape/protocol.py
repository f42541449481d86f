"""Attacks on the protocol between host and agent: forged frames, floods and a killed agent must
not give the host a wrong result."""

import os
from pathlib import Path

from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.escape.context import (
    NO_SUCH_COMMAND,
    Attack,
    EscapeContext,
    NotTriedError,
    run_python,
)
from sandbox_runtime.protocol import DATA, END, frame, json_frame
from sandbox_runtime.sandbox import ExecResult, OutputCap

_STREAM = 1
"""The stream of a sandbox's first command."""
_FORGED_REPORT = {
    **dict.fromkeys(("exit_code", "duration_s", "cpu_s", "peak_memory_bytes", "reading"), 0),
    **dict.fromkeys(("stdout_bytes", "stderr_bytes", "oom_kills", "pids_refused"), 0),
    **dict.fromkeys(("stdout_omitted_lines", "stderr_omitted_lines"), 0),
    **dict.fromkeys(("stdout_kept_bytes", "stderr_kept_bytes"), 0),
    **dict.fromkeys(("timed_out", "running", "waiting"), False),
}
_FORGED = frame(_STREAM, DATA, b"forged\n") + json_frame(_STREAM, END, _FORGED_REPORT)
_FORGE = f"""
import glob, os
for link in glob.glob("/proc/[0-9]*/fd/1"):
    try:
        if os.getsid(int(link.split("/")[2])) == os.getsid(0):
            continue  # our own output
        descriptor = os.open(link, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.write(descriptor, {_FORGED!r})
    except OSError:
        pass
print("true")
raise SystemExit(7)
"""
_SAY = f"import os; os.write(1, {_FORGED!r}); raise SystemExit(7)"
_SIGNALS = "HUP INT QUIT USR1 USR2 PIPE ALRM TERM CHLD CONT TSTP TTIN TTOU URG WINCH IO SYS ABRT"
_ALIVE = ("alive\n", 7)
_TYPE = """
import fcntl, os, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 1)
for character in b"typed\\n":
    fcntl.ioctl(0, 0x5412, bytes([character]))
print(os.read(0, 10).decode())
"""
_FLOOD_BYTES = 64 << 20
_FLOOD_CAP = OutputCap(max_bytes=64 << 10, max_lines=1000)
_FLOOD = f"head -c {_FLOOD_BYTES} /dev/zero | tee /dev/stderr"
_MAX_GROWN_BYTES = 64 << 20
"""Maximum growth of the proxy's memory during the flood."""


async def _forge_frames(context: EscapeContext) -> str | None:
    async with context.victim() as sandbox:
        try:
            result = await run_python(sandbox, _FORGE)
        except SandboxLostError:
            return None  # the host noticed
        return _difference(result, "true\n", 7)


async def _print_frames(context: EscapeContext) -> str | None:
    async with context.victim() as sandbox:
        result = await run_python(sandbox, _SAY)
        return _difference(result, _FORGED.decode(errors="replace"), 7)


async def _kill_agent(context: EscapeContext) -> str | None:
    return await _signal_agent(context, "kill -KILL 1 $PPID")


async def _stop_agent(context: EscapeContext) -> str | None:
    return await _signal_agent(context, "kill -STOP 1 $PPID", timeout_s=3)


async def _send_other_signals(context: EscapeContext) -> str | None:
    return await _signal_agent(context, f"for signal in {_SIGNALS}; do kill -$signal 1 $PPID; done")


async def _signal_agent(
    context: EscapeContext, command: str, *, timeout_s: float = 10
) -> str | None:
    """Run a command that signals the agent. Return None if the agent survives or the host reports
    the loss of the sandbox, and the neighbour works. Otherwise return what went wrong."""
    await context.neighbour()
    async with context.victim() as sandbox:
        try:
            for line in (f"{command} 2>/dev/null; echo alive; exit 7", "echo alive; exit 7"):
                result = await sandbox.exec(line, timeout_s=timeout_s, shell_state="none")
                if found := _difference(result, *_ALIVE):
                    return found
        except SandboxLostError:
            pass
    return await context.disturbance()


async def _kill_everything(context: EscapeContext) -> str | None:
    return await _signal_agent(context, "kill -KILL -1")


async def _type_into_own_terminal(context: EscapeContext) -> str | None:
    async with context.victim() as sandbox:
        result = await sandbox.exec(
            f"python3 -I -S -c '{_TYPE}'", timeout_s=5, stdin=None, shell_state="none"
        )
        if result.exit_code == NO_SUCH_COMMAND:
            raise NotTriedError("there is no python3 inside")
        return "a program can write input to its own terminal" if "typed" in result.stdout else None


async def _print_endless_output(context: EscapeContext) -> str | None:
    async with context.victim() as sandbox:
        before = _proxy_memory_bytes()
        result = await sandbox.exec(_FLOOD, timeout_s=40, cap=_FLOOD_CAP, shell_state="none")
        grown = _proxy_memory_bytes() - before
    if grown > _MAX_GROWN_BYTES:
        return f"the proxy's memory grew by {grown >> 20} MiB"
    longest = max(len(result.stdout), len(result.stderr))
    return f"{longest} characters were returned" if longest > 2 * _FLOOD_CAP.max_bytes else None


def _difference(result: ExecResult, stdout: str, exit_code: int) -> str | None:
    if (result.stdout, result.exit_code) == (stdout, exit_code):
        return None
    return f"a command exited with {result.exit_code} and printed {result.stdout[:60]!r}"


def _proxy_memory_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


ATTACKS = tuple(
    # On gVisor root can open the agent's descriptors. Forged frames affect only that sandbox, whose
    # commands could have produced the same output themselves.
    Attack(name, "protocol", description, make, own_kernel_holds=name == "forged_frames")
    for name, description, make in (
        ("forged_frames", "Writes frames to the output of other processes.", _forge_frames),
        ("frames_as_output", "Prints frames.", _print_frames),
        ("agent_killed", "Kills the agent.", _kill_agent),
        ("agent_stopped", "Stops the agent.", _stop_agent),
        ("agent_signalled", "Sends the agent every other signal.", _send_other_signals),
        ("everything_killed", "Kills everything that it can.", _kill_everything),
        (
            "own_terminal",
            "Types into the terminal that is its standard input.",
            _type_into_own_terminal,
        ),
        ("endless_output", "Prints far more than the host accepts.", _print_endless_output),
    )
)
