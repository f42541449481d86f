"""A proxy whose sandboxes are simulated: `python -m bench.simulated_node CONFIG COMMAND_S`.

Everything but the sandboxes is what `sandbox-proxy serve` runs."""

import asyncio
import sys
from pathlib import Path

from bench.processes import raise_open_file_limit
from bench.simulated_sandboxes import SimulatedBackend
from proxy.__main__ import _serve, listen
from proxy.bootstrap import build_model
from proxy.config import load


def main(config_file: Path, command_s: float) -> None:
    """Serve until SIGTERM."""
    raise_open_file_limit()
    config = load(config_file)
    with listen(config.server.host, config.server.port) as listener:
        asyncio.run(_serve(config, build_model(config), SimulatedBackend(command_s), listener))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
