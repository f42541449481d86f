"""The wheel's build hook: it has the agent for every machine that a wheel serves."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MACHINES = ("x86_64", "aarch64")


class AgentHook(BuildHookInterface[Any]):
    """Builds the agent: an editable install has it for its own machine only."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        machines = () if version == "editable" else MACHINES
        build = Path(self.root, "sandbox_runtime/guest/native/build")
        subprocess.run([build, sys.executable, *machines], check=True)
