"""Produced files on the proxy's side: kept for a while, found again by links that need no key."""

import asyncio
import base64
import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from policies.artifacts import ArtifactLimits, Produced, links_in, naming_files, without_links
from policies.file_names import type_of
from policies.workspace import INPUT_DIR, OUTPUT_DIR
from proxy.agent.model import Message
from proxy.agent.result import Artifact
from proxy.agent.task import InputFile
from proxy.signatures import Signer
from proxy.store.records import ContainerWish, Maker, Upload
from proxy.store.store import Store
from sandbox_runtime.sandbox import Sandbox

MAX_LINKED_FILES = 1000
"""So many files of one request's links are looked up."""
WHOLE = "zip"
"""What the link to all files of a container is signed for, in the place of a file's id."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that can be served."""

    path: Path
    filename: str
    mime_type: str


class FileStore:
    """What runs produce, and the links that lead there."""

    def __init__(self, store: Store, *, limits: ArtifactLimits) -> None:
        self.store = store
        self.limits = limits
        self._signer = Signer(store.directory / "link-key", store.now)

    def outbox(
        self,
        container_id: str,
        base_url: str,
        owner: str,
        limits: ArtifactLimits | None = None,
    ) -> "RunFiles":
        """Where a run's files go; `base_url` is how clients reach this server, `limits` are the
        run's, where it has its own."""
        return RunFiles(self, container_id, base_url, owner, limits or self.limits)

    async def remember(self, container_id: str, owner: str) -> None:
        """Have a container, which nothing need lie in yet."""
        wish = ContainerWish(name=container_id, minutes=self.container_minutes)
        await self.store.containers.create(owner, wish, container_id)
        await self.store.containers.use(owner, container_id)

    async def put_in(self, container_id: str, owner: str) -> list[InputFile]:
        """What the client has put into a container, for the sandbox of a run that works in it."""
        return await self._files(container_id, owner, INPUT_DIR, "user")

    async def handed_back(self, container_id: str, owner: str) -> list[InputFile]:
        """What runs have handed back: all that is left where no workspace is kept."""
        return await self._files(container_id, owner, OUTPUT_DIR, "assistant")

    async def _files(
        self, container_id: str, owner: str, under: str, source: Maker
    ) -> list[InputFile]:
        files = await self.store.container_files.all(container_id, owner, under)
        return [
            InputFile(file.path, file.sha256, partial(self.store.blobs.read, file.blob))
            for file in files or ()
            if file.source == source
        ]

    def link_expiry(self, limits: ArtifactLimits | None = None) -> int:
        """How long a link lives that is made now."""
        return int(self.store.now() + (limits or self.limits).keep_hours * 3600)

    @property
    def container_minutes(self) -> int:
        """How long a container lives without being used."""
        return math.ceil(self.limits.keep_hours * 60)

    def url(self, base_url: str, container_id: str, file_id: str, expires: int) -> str:
        """Where a file can be fetched without a key; for WHOLE, all of a container's."""
        signature = self._signer.sign(container_id, file_id, expires)
        place = "content" if file_id == WHOLE else f"{file_id}/content"
        return (
            f"{base_url.rstrip('/')}/v1/containers/{container_id}/files/{place}"
            f"?exp={expires}&sig={signature}"
        )

    def is_signed(self, container_id: str, file_id: str, expires: str, signature: str) -> bool:
        """Whether a link was made here and still holds."""
        return self._signer.is_signed(container_id, file_id, expires, signature)

    async def unlinked(self, messages: Sequence[Message], owner: str) -> Sequence[Message]:
        """Return messages with the paths of the owner's files in the place of links to them, and
        parts that are such a file naming it by its id (see NamedFiles); a link to any other file
        only loses what opens it."""
        links = list(islice(dict.fromkeys(links_in(list(messages))), MAX_LINKED_FILES))
        paths = {}
        for container, file_id in links:
            file = await self.store.container_files.get(container, file_id, owner)
            if file is not None:
                paths[container, file_id] = file.path
        named = [naming_files(message, paths) for message in messages] if paths else messages
        changed: Sequence[Message] = without_links(list(named), paths.get)
        return changed

    async def find(
        self, container_id: str, file_id: str, owner: str | None = None
    ) -> StoredFile | None:
        """A container's file, or None; the owner's alone, unless a link has opened the way."""
        file = await self.store.container_files.get(container_id, file_id, owner)
        if file is None:
            return None
        return StoredFile(self.store.blobs.path(file.blob), file.filename, file.mime_type)


class NamedFiles:
    """Finds the files that requests name: uploads by their ids, those of containers by
    `container/file`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def find(self, owner: str, file_id: str) -> Upload | None:
        """See Uploads."""
        container_id, slash, name = file_id.partition("/")
        if not slash:
            return await self._store.uploads.find(owner, file_id)
        file = await self._store.container_files.get(container_id, name, owner)
        if file is None:
            return None
        path = self._store.blobs.path(file.blob)
        return Upload(file_id, file.filename, file.bytes, file.mime_type, path)


class RunFiles:
    """One run's produced files."""

    def __init__(
        self,
        files: FileStore,
        container_id: str,
        base_url: str,
        owner: str,
        limits: ArtifactLimits,
    ) -> None:
        self._files = files
        self._container_id = container_id
        self._base_url = base_url
        self._owner = owner
        self._limits = limits
        self._expires = files.link_expiry(limits)
        self._is_open = False

    @property
    def container_id(self) -> str:
        return self._container_id

    def url(self, path: str) -> str:
        file_id = self._file_id(path)
        return self._files.url(self._base_url, self.container_id, file_id, self._expires)

    async def has(self, path: str) -> bool:
        files = self._files.store.container_files
        return await files.get(self.container_id, self._file_id(path), self._owner) is not None

    async def save(self, sandbox: Sandbox, file: Produced, timeout_s: float) -> Artifact:
        store = self._files.store
        async with store.blobs.new() as writer:
            take = writer.take
            await sandbox.get(file.path, take, max_bytes=file.bytes, timeout_s=timeout_s)
            blob = await writer.keep()
        path = os.fsencode(file.path).decode(errors="replace")
        mime_type = type_of(path)
        await self._open()
        await store.container_files.produce(
            self._owner,
            self.container_id,
            blob,
            file_id=self._file_id(file.path),
            path=path,
            mime_type=mime_type,
        )
        return Artifact(
            file_id=self._file_id(file.path),
            container_id=self.container_id,
            path=file.path,
            bytes=blob.bytes,
            mime_type=mime_type,
            sha256=blob.sha256,
            url=self.url(file.path),
            data_url=await self._data_url(store.blobs.path(blob.name), mime_type, blob.bytes),
        )

    async def _open(self) -> None:
        """Make the container, once there is something to put in."""
        if not self._is_open:
            wish = ContainerWish(name=self._container_id, minutes=self._files.container_minutes)
            await self._files.store.containers.create(self._owner, wish, self.container_id)
            self._is_open = True

    def _file_id(self, path: str) -> str:
        digest = hashlib.sha256(f"{self.container_id}{path}".encode(errors="surrogateescape"))
        return f"cfile_{digest.hexdigest()[:24]}"

    async def _data_url(self, path: Path, mime_type: str, size: int) -> str | None:
        inline_bytes = self._limits.inline_image_kib << 10
        if not mime_type.startswith("image/") or size > inline_bytes:
            return None
        content = await asyncio.to_thread(path.read_bytes)
        return f"data:{mime_type};base64,{base64.b64encode(content).decode()}"
