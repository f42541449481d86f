"""All that is tried against a sandbox's walls."""

from sandbox_runtime.escape import batch, bombs, counters, egress, files, host, protocol
from sandbox_runtime.escape.probe import Attack, Probe

PROBES: tuple[Probe, ...] = tuple(batch.probes())
"""From inside, all in one program: what a server tries at its start."""
ATTACKS: tuple[Attack, ...] = (
    *host.ATTACKS,
    *files.ATTACKS,
    *protocol.ATTACKS,
    *egress.ATTACKS,
    *bombs.ATTACKS,
    *counters.ATTACKS,
)
"""With the host's side, one by one: what `doctor --self-test` tries as well."""
