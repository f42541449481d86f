"""The guest agent's program and its configuration, for the backends that start it.

The agent is a static program in C (`native/`), so an image needs no interpreter or library for it.
The backend brings the program into the sandbox, starts it without arguments and writes
`config_message` to its standard input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path

from policies.json_bounds import encode_json
from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR
from sandbox_runtime.errors import SandboxStartError

EGRESS_PORT = 3128
LIFETIME_S = 24 * 3600.0
_PROXY = f"http://127.0.0.1:{EGRESS_PORT}"
_ENV = {
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "UV_BREAK_SYSTEM_PACKAGES": "1",
    # Without network access pip retries 5 times and uv 3 times by default, which takes 8 s. One
    # retry is kept: pip makes it at once, and prints the proxy's reason only when it retries.
    "PIP_RETRIES": "1",
    "UV_HTTP_RETRIES": "1",
    "MPLBACKEND": "Agg",
    "NODE_USE_ENV_PROXY": "1",
    # Some programs read only the lower-case names, others only the upper-case ones.
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
    """The configuration that the agent reads before it serves requests."""

    rlimits: Mapping[str, int] = field(default_factory=dict)
    """Hard limits that the agent sets for itself and all commands, by name (`RLIMIT_NPROC`)."""
    env: Mapping[str, str] = field(default_factory=lambda: _ENV)
    """Environment variables of every command, besides those of the image."""
    working_dir: str = WORKING_DIR
    directories: tuple[str, ...] = (WORKING_DIR, INPUT_DIR, OUTPUT_DIR)
    """Directories that the agent creates at start."""
    watchdog_s: float = 30.0
    """The agent ends if it receives nothing from the host for this long; 0: no limit. With a link
    token, the time begins when the agent sent the last packet whose receipt the host has
    confirmed."""
    lifetime_s: float = LIFETIME_S
    """The agent ends this long after its start; 0: no limit."""
    egress_port: int = EGRESS_PORT
    """The port of the egress proxy on the sandbox's loopback; 0: no egress proxy."""
    pressure: Mapping[str, Sequence[str]] = field(default_factory=lambda: _PRESSURE)
    """The files that count limit events; the agent uses the first readable file of each list."""
    link_token: str | None = None
    """The token of the link's packets, in hexadecimal digits; None: the link has no packets and
    ends with the agent's input. See `sandbox_runtime.packets`."""


def agent_program(machine: str) -> Path:
    """Return the path of the agent's program for a machine (as `uname -m` names it).

    Raises SandboxStartError if no program was built for the machine.
    """
    path = _program_directory() / f"agent-{machine}"
    if not path.is_file():
        raise SandboxStartError(
            f"there is no guest agent for the machine {machine!r} in {path.parent}: `make install`"
            " builds it for this machine, `make agents` for x86_64 and aarch64"
        )
    return path


@cache
def _program_directory() -> Path:
    return Path(str(resources.files("sandbox_runtime"))) / "guest" / "bin"


def config_message(config: GuestConfig) -> bytes:
    """Return the bytes of the configuration that the agent reads from its standard input."""
    # Not dataclasses.asdict, which makes a deep copy for every sandbox.
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    text = encode_json(values)
    return len(text).to_bytes(4, "big") + text
