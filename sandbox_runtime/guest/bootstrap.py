"""How the agent gets into a sandbox: a one-line Python reads its program from standard input.

Nothing is mounted, copied into an image or passed in arguments, so any image with python3 works,
on a remote engine too.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources

from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR

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
    ("sandbox_runtime.protocol", "protocol.py"),
    ("sandbox_runtime.guest.commands", "guest/commands.py"),
    ("sandbox_runtime.guest.files", "guest/files.py"),
    ("sandbox_runtime.guest.agent", "guest/agent.py"),
)
_LOADER = """
import sys, types, json
for name in ("sandbox_runtime", "sandbox_runtime.guest"):
    sys.modules[name] = types.ModuleType(name)
for name, source in json.loads({modules!r}):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main(json.loads({config!r}))
"""


@dataclass(frozen=True, slots=True)
class GuestConfig:
    """What the agent is told before it serves."""

    rlimits: Mapping[str, int] = field(default_factory=dict)
    """Hard limits it puts on itself and so on all commands, by name (`RLIMIT_NPROC`)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables every command starts with, beside those of the image."""
    working_dir: str = WORKING_DIR
    directories: tuple[str, ...] = (WORKING_DIR, INPUT_DIR, OUTPUT_DIR)
    """Made at start."""


def program(config: GuestConfig) -> bytes:
    """The agent and its configuration, as COMMAND expects them."""
    here = resources.files("sandbox_runtime")
    modules = [(name, (here / path).read_text(encoding="utf-8")) for name, path in _MODULES]
    text = _LOADER.format(modules=json.dumps(modules), config=json.dumps(asdict(config)))
    source = text.encode()
    return len(source).to_bytes(4, "big") + source
