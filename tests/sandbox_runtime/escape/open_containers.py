"""Containers without isolation, in which every attempt must succeed: they have all that a sandbox
is denied, and fakes of what it must not reach. Their limits are set from outside. If they share the
host's network, attempts only look up routes there, or connect to its loopback."""

import asyncio
import platform
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from policies.isolation import Isolation
from sandbox_runtime.backends.docker_container import AGENT_PATH
from sandbox_runtime.backends.process_guest import spawn
from sandbox_runtime.channel import Channel
from sandbox_runtime.guest.agent import GuestConfig, agent_program, config_message
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE
from tests.sandbox_runtime.transfer import output, write

CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"),
    *("SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW"),
    *("IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT"),
    *("SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD"),
    *("LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG"),
)
"""By number; those that came later are parts of SYS_ADMIN, and older engines do not know them."""
BOUNDS = ("--memory=1g", "--memory-swap=1g", "--pids-limit=2000", "--cpus=2")
UNCONFINED = (
    *("--network=none", "--ipc=host", "--uts=host", "--init", "--ulimit=core=-1"),
    *("--security-opt=seccomp=unconfined", "--security-opt=systempaths=unconfined"),
    *("--volume=/sys:/sys", "--device=/dev/net/tun", "--device=/dev/null:/dev/unusual"),
    *("--device-cgroup-rule=b *:* r", "--device-cgroup-rule=c *:* rwm", "--shm-size=900m"),
)
FAKE_SERVICES = Path(__file__).parent / "fake_host_services.py"
BEGIN = """
python3 /tmp/stand-ins.py </dev/null >/tmp/stand-ins.log 2>&1 &
until [ -s /tmp/stand-ins ]; do kill -0 $! || { cat /tmp/stand-ins.log; exit 1; }; done
"""
DOCKER_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


class OpenContainers:
    """Containers with these options of `docker run`, whatever isolation is requested."""

    def __init__(
        self,
        *options: str,
        kind: type[GuestSandbox] = GuestSandbox,
        config: GuestConfig | None = None,
    ) -> None:
        self._options = options
        self._kind = kind
        self._config = config or GuestConfig()
        self._names: list[str] = []

    async def start(self, isolation: Isolation) -> GuestSandbox:
        name = f"escape-control-{secrets.token_hex(6)}"
        self._names.append(name)
        run = ("docker", "run", "--rm", "--interactive", f"--name={name}", *BOUNDS)
        agent = f"--volume={agent_program(platform.machine())}:{AGENT_PATH}:ro"
        capabilities = (f"--cap-add={capability}" for capability in sorted(our_capabilities()))
        guest = await spawn(
            name,
            (*run, agent, *capabilities, *self._options, DOCKER_IMAGE, AGENT_PATH),
            cwd=Path("/"),
            env=DOCKER_ENV,
            pass_fds=(),
            cgroup=None,
        )
        guest.write(config_message(self._config))
        channel = Channel(guest)
        await channel.connect(60)
        return self._kind(channel)

    async def aclose(self) -> None:
        """Remove what has not ended by itself."""
        remove = ("docker", "rm", "--force", *self._names)
        process = await asyncio.create_subprocess_exec(
            *remove, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        await process.wait()


@asynccontextmanager
async def opened(containers: OpenContainers) -> AsyncIterator[GuestSandbox]:
    """Start one container, and remove it after the block."""
    try:
        sandbox = await containers.start(Isolation())
        try:
            yield sandbox
        finally:
            await sandbox.close()
    finally:
        await containers.aclose()


async def add_fake_services(sandbox: Sandbox) -> None:
    """Start fakes of what no sandbox may reach in a container."""
    await write(sandbox, "/tmp/stand-ins.py", FAKE_SERVICES.read_bytes())
    await output(sandbox, BEGIN)


def our_capabilities() -> frozenset[str]:
    """Return the capabilities that an engine on this machine can grant."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    bounding = next(int(line.split()[1], 16) for line in lines if line.startswith("CapBnd"))
    return frozenset(name for bit, name in enumerate(CAPABILITIES) if bounding >> bit & 1)
