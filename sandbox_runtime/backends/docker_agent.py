"""The native agent on a Docker engine: its program on a volume that sandboxes see read-only.

It travels over the engine's own connection, so a remote engine is served as well. The volume is
named after the program: another program has another volume, and nothing is ever overwritten.
"""

import asyncio
import hashlib
import io
import tarfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from sandbox_runtime.backends.docker_container import AGENT_DIR, AGENT_PATH, Image
from sandbox_runtime.backends.docker_engine import Engine

_NAME = "llm-sandbox-proxy-agent"


class AgentVolumes:
    """The volumes of one engine, as far as we know that they are there."""

    def __init__(self, engine: Engine, labels: Mapping[str, str]) -> None:
        self._engine = engine
        self._labels = labels
        self._filled: dict[Path, str] = {}
        self._filling = asyncio.Lock()

    async def name(self, program: Path, image: Image) -> str:
        """The volume that holds a program. Raises one of ENGINE_ERRORS."""
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
        helper = f"{_NAME}-{uuid.uuid4().hex[:12]}"
        mount = {"Type": "volume", "Source": volume, "Target": AGENT_DIR}
        config = {
            "Image": image.id,
            "Entrypoint": [AGENT_PATH],
            "Labels": dict(self._labels),
            "HostConfig": {"NetworkMode": "none", "Mounts": [mount]},
        }
        await self._engine.create(helper, config)  # never started: files can be put in all the same
        try:
            if not await self._engine.has_file(helper, AGENT_PATH):
                await self._engine.put(helper, AGENT_DIR, _tar(Path(AGENT_PATH).name, program))
        finally:
            await self._engine.remove(helper)
        return volume


def _tar(name: str, content: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), 0o755
        tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()
