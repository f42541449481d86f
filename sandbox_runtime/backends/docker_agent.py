"""The agent on a Docker engine: its program on a volume that sandboxes see read-only.

It travels over the engine's own connection, so a remote engine is served as well. The volume is
named after the program: another program has another volume. What a volume of that name holds is
compared with the program before the first sandbox of this process uses it, and replaced if it is
anything else: half written by a proxy that died, or put there by somebody.
"""

import asyncio
import contextlib
import hashlib
import io
import math
import tarfile
from collections.abc import Mapping
from pathlib import Path

from sandbox_runtime.backends.docker_container import (
    AGENT_DIR,
    AGENT_PATH,
    Image,
    agent_mount,
)
from sandbox_runtime.backends.docker_engine import (
    ConflictError,
    DockerEngine,
    EngineError,
    MissingError,
)

_NAME = "llm-sandbox-proxy-agent"
_AGENT, _MODE = Path(AGENT_PATH).name, 0o755
PATIENCE_S, RETRY_S = 30.0, 0.1
"""How long another proxy may hold the lock of a volume, and the pause between two attempts."""
MAX_TURNS = 10
"""How many other proxies may hold the lock before this one gives up, each for `PATIENCE_S`."""


class AgentVolumes:
    """The volumes of one engine that hold an agent's program, as this process has found them."""

    def __init__(
        self, engine: DockerEngine, labels: Mapping[str, str], patience_s: float = PATIENCE_S
    ) -> None:
        self._engine = engine
        self._patience_s = patience_s
        self._labels = labels
        self._filled: dict[Path, str] = {}
        self._filling = asyncio.Lock()

    async def name(self, program: Path, image: Image) -> str:
        """Return the volume that holds a program. Raises EngineError."""
        async with self._filling:
            if program not in self._filled:
                content = await asyncio.to_thread(program.read_bytes)
                self._filled[program] = await self._fill(content, image)
            return self._filled[program]

    def forget(self) -> None:
        """Look again at the next start: somebody may have removed one."""
        self._filled.clear()

    async def _fill(self, program: bytes, image: Image) -> str:
        volume = f"{_NAME}-{hashlib.sha256(program).hexdigest()[:12]}"
        await self._engine.make_volume(volume)
        helper = await self._helper(volume, image)
        try:
            if not await self._is_right(helper, program):
                await self._engine.put(helper, AGENT_DIR, _tar(program))
                if not await self._is_right(helper, program):
                    raise EngineError(f"volume {volume} does not take the agent: remove it")
        finally:
            await self._engine.remove(helper)
        return volume

    async def _helper(self, volume: str, image: Image) -> str:
        """Make a container that has the volume; it is never started: files can be put in all the
        same. Its name is a lock: no other proxy reads or writes the volume while it is there."""
        name = f"{volume}-filling"
        mount = agent_mount(volume, is_read_only=False)
        config = {
            "Image": image.id,
            "Entrypoint": [AGENT_PATH],
            "Labels": dict(self._labels),
            "HostConfig": {"NetworkMode": "none", "Mounts": [mount]},
        }
        holder, held_s = "", 0.0
        for _ in range(math.ceil(MAX_TURNS * self._patience_s / RETRY_S)):
            with contextlib.suppress(ConflictError):  # another proxy holds it
                return await self._engine.create(name, config)
            found = await self._id(name)
            if found != holder:
                holder, held_s = found, 0.0
            elif found and held_s >= self._patience_s:  # its proxy died
                await self._engine.remove(found)
            await asyncio.sleep(RETRY_S)
            held_s += RETRY_S
        raise EngineError(f"other proxies have held {name} for too long")

    async def _id(self, name: str) -> str:
        """Return the id of the container with a name; "" if there is none."""
        try:
            return str((await self._engine.container(name))["Id"])
        except MissingError:
            return ""

    async def _is_right(self, container: str, program: bytes) -> bool:
        """Whether the volume in a container holds the program, and nothing in its place."""
        enough = len(program) + 2 * tarfile.RECORDSIZE
        found = await self._engine.get(container, AGENT_PATH, enough)
        return _member(found) == (_AGENT, tarfile.REGTYPE, _MODE, 0, program)


def _tar(content: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo(_AGENT)
        member.size, member.mode = len(content), _MODE
        tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def _member(archive: bytes) -> tuple[str, bytes, int, int, bytes] | None:
    """The file that a tar begins with: its name, type, mode, owner and content."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            member = tar.next()
            file = tar.extractfile(member) if member and member.isreg() else None
            if member is None or file is None:
                return None
            return member.name, member.type, member.mode & 0o7777, member.uid, file.read()
    except (tarfile.TarError, EOFError):
        return None
