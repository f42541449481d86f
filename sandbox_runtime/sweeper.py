"""Removes, again and again, what proxies that died have left behind on this host."""

import logging

from sandbox_runtime.backends.base import Backend
from sandbox_runtime.clock import Clock

logger = logging.getLogger(__name__)

SWEEP_S = 60.0


async def sweep_forever(backend: Backend, clock: Clock) -> None:
    """Sweep now and every minute, until cancelled."""
    while True:
        try:
            removed = await backend.sweep()
        except OSError as error:  # a lock or a cgroup that somebody else removes just now
            logger.warning("leftovers could not be swept, the next sweep will: %s", error)
        else:
            if removed:
                logger.info("removed %d sandboxes that dead owners had left behind", removed)
        await clock.sleep(SWEEP_S)
