"""The guest agent's program on a Docker engine: a volume that sandboxes mount read-only.

The program is uploaded over the engine's API, so remote engines work too. The name of the volume
contains a hash of the program. Before a process uses a volume for the first time, it compares the
content with the program, and replaces content that differs: a proxy may have died while writing the
content, or someone may have changed it.
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
    ImageMetadata,
    agent_mount,
)
from sandbox_runtime.backends.docker_engine import (
    DockerEngine,
    EngineConflictError,
    EngineError,
    EngineJson,
    EngineNotFoundError,
)

_VOLUME_PREFIX = "llm-sandbox-proxy-agent"
_AGENT_FILE, _AGENT_MODE = Path(AGENT_PATH).name, 0o755
LOCK_TIMEOUT_S, LOCK_RETRY_S = 30.0, 0.1
"""Time after which a proxy that still holds the lock of a volume counts as dead and loses the
lock, and the pause between attempts to take the lock."""
MAX_LOCK_HOLDERS = 10
"""Number of other proxies that may hold the lock in turn, each for LOCK_TIMEOUT_S, before this one
fails."""


class AgentVolumes:
    """The volumes of one engine that hold guest agents' programs. Remembers which volumes this
    process has verified."""

    def __init__(
        self,
        engine: DockerEngine,
        labels: Mapping[str, str],
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        self._engine = engine
        self._lock_timeout_s = lock_timeout_s
        self._labels = labels
        self._filled_volumes: dict[Path, str] = {}
        self._fill_lock = asyncio.Lock()

    async def volume_for(self, program: Path, image: ImageMetadata) -> str:
        """Return the name of a volume that holds the program. Before its first use by this process,
        create the volume or correct its content. Raises EngineError."""
        async with self._fill_lock:
            if program not in self._filled_volumes:
                content = await asyncio.to_thread(program.read_bytes)
                self._filled_volumes[program] = await self._fill_volume(content, image)
            return self._filled_volumes[program]

    def invalidate(self) -> None:
        """Forget which volumes are verified, so that the next start verifies them again: a volume
        may have been removed."""
        self._filled_volumes.clear()

    async def _fill_volume(self, program: bytes, image: ImageMetadata) -> str:
        volume = f"{_VOLUME_PREFIX}-{hashlib.sha256(program).hexdigest()[:12]}"
        await self._engine.make_volume(volume)
        helper = await self._create_helper(volume, image)
        try:
            if not await self._has_program(helper, program):
                await self._engine.put_archive(helper, AGENT_DIR, _tar_archive(program))
                if not await self._has_program(helper, program):
                    raise EngineError(
                        f"the agent cannot be written to volume {volume}: remove the volume"
                    )
        finally:
            await self._engine.remove(helper)
        return volume

    async def _create_helper(self, volume: str, image: ImageMetadata) -> str:
        """Create a container that mounts the volume. The container is never started: it serves to
        copy files to the volume and from it. Its name is a lock: while the container exists, no
        other proxy reads or writes the volume."""
        name = f"{volume}-filling"
        mount = agent_mount(volume, is_read_only=False)
        config = {
            "Image": image.id,
            "Entrypoint": [AGENT_PATH],
            "Labels": dict(self._labels),
            "HostConfig": {"NetworkMode": "none", "Mounts": [mount]},
        }
        holder, held_s = "", 0.0
        for _ in range(math.ceil(MAX_LOCK_HOLDERS * self._lock_timeout_s / LOCK_RETRY_S)):
            with contextlib.suppress(EngineConflictError):  # another proxy holds it
                return await self._engine.create(name, config)
            found = await self._container_id(name)
            if found != holder:
                holder, held_s = found, 0.0
            elif found and held_s >= self._lock_timeout_s:  # the proxy that holds it has died
                await self._engine.remove(found)
            await asyncio.sleep(LOCK_RETRY_S)
            held_s += LOCK_RETRY_S
        raise EngineError(f"other proxies have held {name} for too long")

    async def _container_id(self, name: str) -> str:
        """Return the id of the container with a name, or "" if there is none."""
        try:
            return str((await self._engine.container(name))["Id"])
        except EngineNotFoundError:
            return ""

    async def _has_program(self, container: str, program: bytes) -> bool:
        """Return True if the volume in a container holds exactly this program."""
        enough = len(program) + 2 * tarfile.RECORDSIZE
        found = await self._engine.get_archive(container, AGENT_PATH, enough)
        owners = {0, _root_uid(self._engine.info)}
        return _first_member(found) in [
            (_AGENT_FILE, tarfile.REGTYPE, _AGENT_MODE, uid, program) for uid in owners
        ]


def _root_uid(info: EngineJson) -> int:
    """Return the host uid of root in containers. The archives that engine 20.10 returns contain
    host uids. With userns-remap this uid is not 0, and the engine's data directory is named
    `<uid>.<gid>`."""
    if not any(
        str(option).startswith("name=userns") for option in info.get("SecurityOptions") or ()
    ):
        return 0
    uid, _, _ = Path(str(info.get("DockerRootDir", ""))).name.partition(".")
    return int(uid) if uid.isdecimal() else 0


def _tar_archive(content: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo(_AGENT_FILE)
        member.size, member.mode = len(content), _AGENT_MODE
        tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def _first_member(archive: bytes) -> tuple[str, bytes, int, int, bytes] | None:
    """Return the name, type, mode, owner and content of the first file in a tar archive."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            member = tar.next()
            file = tar.extractfile(member) if member and member.isreg() else None
            if member is None or file is None:
                return None
            return member.name, member.type, member.mode & 0o7777, member.uid, file.read()
    except (tarfile.TarError, EOFError):
        return None
