"""What a backend needs to start the agent: its program, and the configuration that it reads first.

The agent is a static program in C (`native/`), so an image needs nothing of its own to run it. The
backend brings the program into the sandbox, starts it without arguments, and writes
`first_message` to its standard input.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path

from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR
from sandbox_runtime.errors import SandboxStartError

EGRESS_PORT = 3128
_PROXY = f"http://127.0.0.1:{EGRESS_PORT}"
_ENV = {
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "UV_BREAK_SYSTEM_PACKAGES": "1",
    # Where no host may be reached both try 5 and 3 times more, for 8 s; pip's first retry is at
    # once, and only a retry makes it print what the proxy gave as reason.
    "PIP_RETRIES": "1",
    "UV_HTTP_RETRIES": "1",
    "MPLBACKEND": "Agg",
    "NODE_USE_ENV_PROXY": "1",
    # Some programs read them in small letters only, some in capitals.
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), _PROXY),
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _PROXY),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1"),
}
_PRESSURE = {
    "oom": ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"),
    "pids": ("/sys/fs/cgroup/pids.events", "/sys/fs/cgroup/pids/pids.events"),
}


@dataclass(frozen=True, slots=True)
class GuestConfig:
    """What the agent is told before it serves."""

    rlimits: Mapping[str, int] = field(default_factory=dict)
    """Hard limits it puts on itself and so on all commands, by name (`RLIMIT_NPROC`)."""
    env: Mapping[str, str] = field(default_factory=lambda: _ENV)
    """Variables every command starts with, beside those of the image."""
    working_dir: str = WORKING_DIR
    directories: tuple[str, ...] = (WORKING_DIR, INPUT_DIR, OUTPUT_DIR)
    """Made at start."""
    watchdog_s: float = 30.0
    """It ends when nothing has come from the host for so long; 0: never for that."""
    lifetime_s: float = 0.0
    """It ends so long after its start; 0: never for that."""
    egress_port: int = EGRESS_PORT
    """Where on its loopback programs find the way out; 0: there is none."""
    pressure: Mapping[str, Sequence[str]] = field(default_factory=lambda: _PRESSURE)
    """Counters of limits that were hit; of each list the first file that can be read."""


def agent_program(machine: str) -> Path:
    """Return the agent's program for a machine, as `uname -m` calls it.

    Raises SandboxStartError where none was built.
    """
    path = _programs() / f"agent-{machine}"
    if not path.is_file():
        raise SandboxStartError(
            f"there is no guest agent for the machine {machine!r} in {path.parent}: `make install`"
            " builds it for this machine, `make agents` for x86_64 and aarch64"
        )
    return path


@cache
def _programs() -> Path:
    return Path(str(resources.files("sandbox_runtime"))) / "guest" / "bin"


def first_message(config: GuestConfig) -> bytes:
    """Return the configuration as the agent reads it from its standard input."""
    # Not asdict, which copies all that is in it, for every sandbox.
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    text = json.dumps(values).encode()
    return len(text).to_bytes(4, "big") + text
