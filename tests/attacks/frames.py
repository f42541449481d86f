"""Sandboxes that send hostile frames to the server.

Two kinds of attack: a program that writes into the descriptors of the guest agent, as gVisor
permits, and a sandbox whose agent is hostile from the start (`hostile_agent.py`). The server starts
one program in all sandboxes: in the neighbour's, and in the ready ones, this program becomes the
real agent.
"""

import platform
import subprocess
from base64 import b85encode
from collections.abc import AsyncIterator
from functools import partial
from hashlib import sha256
from pathlib import Path

from bench.neighbours import BACKENDS, ISOLATION
from sandbox_runtime.guest.agent import agent_program
from tests.attacks.neighbour import SHARED, Outcome, Range, firing_range
from tests.attacks.report import Finding
from tests.sandbox_runtime.backends.test_runsc import FLOODS
from tests.sandbox_runtime.hostile import hostile_agent

HOSTILE_DISK_MIB = 77
"""The disk size by which the program recognizes a sandbox of the attacker."""
ATTACK_TIMEOUT_S = 5
ATTACKS = (
    *("garbage", "more_than_its_credit", "frames_of_one_byte", "frame_of_four_gigabytes"),
    *("deep_report", "children_that_write", "connections_finished", "report_before_its_command"),
    "data_of_one_byte",
)
"""Attacks of `hostile_agent.py` that end without a long timeout of the server. Its other attacks
are made by the tests beside it."""
LISTINGS = ("entries_without_end", "entry_byte_by_byte")
LOST = "Everything in the sandbox is lost"
_CHOICE = """
import os, resource
hostile_bytes = {disk_mib} << 20
disk = os.statvfs("/dev/shm")
sizes = (resource.getrlimit(resource.RLIMIT_FSIZE)[1], disk.f_blocks * disk.f_frsize)
if hostile_bytes not in sizes:
    import base64
    program = os.memfd_create("agent", os.MFD_CLOEXEC)
    os.write(program, base64.b85decode({agent!r}))
    os.execve("/proc/self/fd/%d" % program, ["agent"], dict(os.environ))
"""
"""The beginning of the program: it becomes the real agent unless its disk has the hostile size."""
_MAIN = """
def main():
    read(int.from_bytes(read(4), "big"))
    send(0, HELLO, GREETING.encode())
    listing = None
    while True:
        stream, kind, payload = receive()
        if kind == PING:
            send(0, PONG)
        if kind != OPEN:
            continue
        command = json.loads(payload).get("command")
        if command is None and listing:
            ATTACKS[listing](stream)
        elif command is None:
            send(stream, END, b'{"truncated": false}')
        elif command.startswith("list "):
            listing = command.split()[1]
            sound_result(stream)
        else:
            ATTACKS[command](stream)

def sound_result(stream):
    names = "duration_s cpu_s peak_memory_bytes oom_kills pids_refused reading"
    counts = "bytes omitted_lines kept_bytes"
    outputs = [output + "_" + count for output in ("stdout", "stderr") for count in counts.split()]
    flags = dict.fromkeys(("timed_out", "running", "waiting"), False)
    report(stream, **dict.fromkeys(names.split() + outputs, 0), **flags)

"""
"""Replaces the main function of `hostile_agent.py`, which expects the paths of a test."""


def hostile_program() -> bytes:
    """Return the program that is started in all sandboxes in place of the agent."""
    source = Path(hostile_agent.__file__).read_text(encoding="utf-8")
    interpreter, _, rest = source.partition("\n")
    agent = b85encode(agent_program(platform.machine()).read_bytes())
    choice = _CHOICE.format(disk_mib=HOSTILE_DISK_MIB, agent=agent)
    body, guard, _ = rest.partition('if __name__ == "__main__":')
    return f"{interpreter}\n{choice}\n{body}\n{_MAIN}\n{guard}\n    main()\n".encode()


async def attacks() -> AsyncIterator[Finding]:
    """Make every attack on every backend."""
    program = hostile_program()
    for backend in BACKENDS:
        try:
            async with firing_range(backend, {"isolation": ISOLATION}, agent=program) as area:
                for name, flood in FLOODS.items():
                    yield await area.measure(
                        f"{name} into the agent's descriptors",
                        partial(_flood, area, flood),
                        bounds=SHARED,
                    )
                for name in (*ATTACKS, *(f"list {each}" for each in LISTINGS)):
                    yield await area.measure(
                        f"agent: {name}", partial(_attack, area, name), bounds=SHARED
                    )
        except RuntimeError as error:
            yield Finding("frames", backend, None, str(error).splitlines()[-1])
        finally:
            _remove_volume(program)


async def _flood(area: Range, program: str) -> Outcome:
    """Write into the agent's descriptors. Only gVisor lets a program open them, and then ends the
    sandbox."""
    command = f"exec python3 -I -S - <<'END'\n{program}\nEND"
    observation = await area.run_inside(command, ATTACK_TIMEOUT_S)
    is_lost = LOST in observation
    held = is_lost if "runsc" in area.backend else "PermissionError" in observation
    return Outcome(held, "sandbox lost," if is_lost else f"{observation.splitlines()[-1][:50]},")


async def _attack(area: Range, name: str) -> Outcome:
    """Run one attack of the hostile agent. Only its own sandbox may be lost, and the request of the
    attacker must be answered."""
    isolation = {"isolation": {"disk_mib": HOSTILE_DISK_MIB}}
    observation = await area.run_inside(name, ATTACK_TIMEOUT_S, sandbox=isolation)
    is_lost = LOST in observation
    return Outcome(True, "sandbox lost," if is_lost else f"{observation.splitlines()[0][:60]},")


def _remove_volume(program: bytes) -> None:
    """Remove the engine's volume with the hostile program, if there is one."""
    name = f"llm-sandbox-proxy-agent-{sha256(program).hexdigest()[:12]}"
    subprocess.run(["docker", "volume", "rm", "--force", name], check=False, capture_output=True)
