"""How the agent gets into a sandbox.

A static program of its own where there is one for the machine, so that images need not have Python:
the backend brings it in and starts it without arguments. Else a one-line Python reads the agent's
source from standard input: any image with python3 works. Either is told its configuration there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR
from sandbox_runtime.errors import SandboxStartError

AgentKind = Literal["auto", "python", "native"]
"""auto: the native one where there is one for the machine."""

_READ_AND_RUN = (
    "import os\n"
    "def r(n,b=b''):\n"
    " while len(b)<n:\n"
    "  c=os.read(0,n-len(b))\n"
    "  if not c:os._exit(0)\n"
    "  b+=c\n"
    " return b\n"
    "exec(r(int.from_bytes(r(4),'big')))"
)
COMMAND = ("python3", "-I", "-S", "-c", _READ_AND_RUN)
"""The argv that a backend starts; it waits for `program(...)` on standard input."""

_MODULES = (
    "sandbox_runtime.protocol",
    "sandbox_runtime.guest.pressure",
    "sandbox_runtime.guest.capture",
    "sandbox_runtime.guest.spool",
    "sandbox_runtime.guest.shell",
    "sandbox_runtime.guest.terminal",
    "sandbox_runtime.guest.commands",
    "sandbox_runtime.guest.attachments",
    "sandbox_runtime.guest.pipes",
    "sandbox_runtime.guest.forwarding",
    "sandbox_runtime.guest.files",
    "sandbox_runtime.guest.agent",
)
_LOADER = """
import sys, types, json
for name, source in json.loads({modules!r}):
    package = name
    while "." in package:
        package = package.rpartition(".")[0]
        sys.modules.setdefault(package, types.ModuleType(package))
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main(json.loads({argument!r}))
"""


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


def native_agent(machine: str, kind: AgentKind) -> Path | None:
    """The agent's program for a machine, as `uname -m` calls it; None if Python is to serve.

    Raises SandboxStartError when the native one is wanted and there is none.
    """
    if kind == "python":
        return None
    path = _programs() / f"agent-{machine}"
    if path.is_file():
        return path
    if kind == "native":
        raise SandboxStartError(f"there is no native agent for {machine!r}: run `make agent`")
    return None


@cache
def _programs() -> Path:
    return Path(str(resources.files("sandbox_runtime"))) / "guest" / "bin"


def native_input(config: GuestConfig) -> bytes:
    """The configuration, as the native agent expects it."""
    text = json.dumps(_values(config)).encode()
    return len(text).to_bytes(4, "big") + text


def program(config: GuestConfig) -> bytes:
    """The agent and its configuration, as COMMAND expects them."""
    source = packed(_MODULES, _values(config))
    return len(source).to_bytes(4, "big") + source


def _values(config: GuestConfig) -> Mapping[str, object]:
    # Not asdict, which copies all that is in it, for every sandbox.
    return {each.name: getattr(config, each.name) for each in fields(config)}


def packed(names: Sequence[str], argument: object) -> bytes:
    """Modules of this package as one Python program, which calls `main` of the last one."""
    here = resources.files("sandbox_runtime")
    modules = []
    for name in names:
        path = name.removeprefix("sandbox_runtime.").replace(".", "/") + ".py"
        modules.append((name, (here / path).read_text(encoding="utf-8")))
    return _LOADER.format(modules=json.dumps(modules), argument=json.dumps(argument)).encode()
