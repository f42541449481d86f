"""How a sandbox is started."""

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.channel import Channel
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.sandbox import SandboxRef

START_TIMEOUT_S = 60.0


async def start_sandbox(backend: Backend, isolation: Isolation) -> GuestSandbox:
    """A new sandbox, ready for its first command. Raises SandboxStartError."""
    channel = Channel(await backend.start(isolation))
    await channel.connect(START_TIMEOUT_S)
    return GuestSandbox(channel, SandboxRef(backend.name, channel.guest.id))
