"""The files that runs produce. They are stored for a while, and downloaded by signed links.

`FileStore` finds stored files, `RunArtifactStore` saves the files of one run, `FileLookup` finds
the files that a request names by id, and `LinkSigner` signs the links.
"""

import base64
import hashlib
import hmac
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from policies.artifacts import (
    ArtifactLimits,
    FileRef,
    ProducedFile,
    linked_files,
    replace_links_with_file_ids,
    replace_signed_links,
)
from policies.file_names import guess_mime_type
from policies.workspace import INPUT_DIR, OUTPUT_DIR
from proxy import stepwise
from proxy.agent.model import Message
from proxy.agent.result import Artifact
from proxy.agent.task import InputFile
from proxy.store.blobs import Blob
from proxy.store.records import FileSource, NewContainer, Upload
from proxy.store.store import Store
from sandbox_runtime.sandbox import Sandbox

MAX_LINKED_FILES = 1000
"""Maximum number of links in one request that are looked up."""
ARCHIVE_FILE_ID = "zip"
"""The file id of a link to all files of a container."""
_MAX_EXPIRY_DIGITS = 12


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that can be downloaded."""

    path: Path
    filename: str
    mime_type: str
    sha256: str
    created_at: int


class FileStore:
    """The stored files of all containers, and the links to them."""

    def __init__(self, store: Store, *, limits: ArtifactLimits) -> None:
        self.store = store
        self.limits = limits
        self._signer = LinkSigner(store.link_key, store.now)

    def artifact_store(
        self,
        container_id: str,
        base_url: str,
        owner: str,
        limits: ArtifactLimits | None = None,
    ) -> "RunArtifactStore":
        """Return the artifact store of one run. `base_url` is the URL of this server as its client
        sees it. `limits` replace the server's limits."""
        return RunArtifactStore(self, container_id, base_url, owner, limits or self.limits)

    async def ensure_container(self, container_id: str, owner: str) -> None:
        """Create the container if it does not exist. Extend its expiry."""
        new_container = NewContainer(name=container_id, minutes=self.container_minutes)
        await self.store.containers.create(owner, new_container, container_id)
        await self.store.containers.touch(owner, container_id)

    async def client_files(self, container_id: str, owner: str) -> list[InputFile]:
        """Return the files that the client has uploaded into a container."""
        return await self._input_files(container_id, owner, INPUT_DIR, "user")

    async def produced_files(self, container_id: str, owner: str) -> list[InputFile]:
        """Return the files that runs have produced in a container."""
        return await self._input_files(container_id, owner, OUTPUT_DIR, "assistant")

    async def _input_files(
        self, container_id: str, owner: str, directory: str, source: FileSource
    ) -> list[InputFile]:
        files = await self.store.container_files.all(container_id, owner, directory)
        return [
            InputFile(file.path, file.sha256, partial(self.store.blobs.read, file.blob))
            for file in files or ()
            if file.source == source
        ]

    def link_expiry(self, limits: ArtifactLimits | None = None) -> int:
        """Return the expiry of a new link, as Unix time."""
        return int(self.store.now() + (limits or self.limits).retention_hours * 3600)

    @property
    def container_minutes(self) -> int:
        """Minutes after which an unused container expires."""
        return math.ceil(self.limits.retention_hours * 60)

    def url(self, base_url: str, container_id: str, file_id: str, expires_at: int) -> str:
        """Return the signed link to a file, or to all files of the container for
        ARCHIVE_FILE_ID."""
        signature = self._signer.sign(container_id, file_id, expires_at)
        path = "content" if file_id == ARCHIVE_FILE_ID else f"{file_id}/content"
        return (
            f"{base_url.rstrip('/')}/v1/containers/{container_id}/files/{path}"
            f"?exp={expires_at}&sig={signature}"
        )

    def is_valid_link(
        self, container_id: str, file_id: str, expires_at: str, signature: str
    ) -> bool:
        """Return True if this server signed the link and it has not expired."""
        return self._signer.is_valid_link(container_id, file_id, expires_at, signature)

    async def replace_links(self, messages: Sequence[Message], owner: str) -> Sequence[Message]:
        """Return the messages with paths in place of links to the owner's files. A content part
        whose URL is such a link gets the file's id instead, which FileLookup finds. Other links
        lose their signature."""
        links = await stepwise.call_in_thread_if_large(_first_linked_files, list(messages))
        paths = {}
        for container, file_id in links:
            file = await self.store.container_files.get(container, file_id, owner)
            if file is not None:
                paths[container, file_id] = file.path
        named = (
            [replace_links_with_file_ids(message, paths) for message in messages]
            if paths
            else messages
        )
        strip = partial(replace_signed_links, find_path=paths.get)
        changed: Sequence[Message] = await stepwise.call_in_thread_if_large(strip, list(named))
        return changed

    async def find(
        self, container_id: str, file_id: str, owner: str | None = None
    ) -> StoredFile | None:
        """Return a file of a container, or None. `owner` is None if a signed link grants access."""
        file = await self.store.container_files.get(container_id, file_id, owner)
        if file is None:
            return None
        path = await self.store.blobs.local_path(file.blob)
        return StoredFile(path, file.filename, file.mime_type, file.sha256, file.created_at)


def _first_linked_files(messages: Sequence[Message]) -> list[FileRef]:
    return list(islice(dict.fromkeys(linked_files(messages)), MAX_LINKED_FILES))


class FileLookup:
    """Finds the files that requests name: an upload by its id, and a file of a container by
    `container_id/file_id`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def find(self, owner: str, file_id: str) -> Upload | None:
        container_id, slash, name = file_id.partition("/")
        if not slash:
            return await self._store.uploads.find(owner, file_id)
        file = await self._store.container_files.get(container_id, name, owner)
        if file is None:
            return None
        read = partial(self._store.blobs.read, file.blob)
        return Upload(file_id, file.filename, file.bytes, file.mime_type, read)


class RunArtifactStore:
    """The files of one run, which are saved in the run's container. Implements ArtifactStore."""

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
        self._expires_at = files.link_expiry(limits)
        self._has_container = False

    @property
    def container_id(self) -> str:
        return self._container_id

    def artifact_url(self, path: str) -> str:
        file_id = self._file_id(path)
        return self._files.url(self._base_url, self.container_id, file_id, self._expires_at)

    async def has(self, path: str) -> bool:
        files = self._files.store.container_files
        return await files.get(self.container_id, self._file_id(path), self._owner) is not None

    async def save(self, sandbox: Sandbox, file: ProducedFile, timeout_s: float) -> Artifact:
        store = self._files.store
        async with store.blobs.open_writer() as writer:
            write = writer.write
            await sandbox.get(file.path, write, max_bytes=file.bytes, timeout_s=timeout_s)
            blob = await writer.commit()
        path = os.fsencode(file.path).decode(errors="replace")
        mime_type = guess_mime_type(path)
        await self._create_container()
        await store.container_files.add_artifact(
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
            url=self.artifact_url(file.path),
            data_url=await self._data_url(blob, mime_type),
        )

    async def _create_container(self) -> None:
        """Create the container, unless an earlier call has created it."""
        if not self._has_container:
            new_container = NewContainer(
                name=self._container_id, minutes=self._files.container_minutes
            )
            await self._files.store.containers.create(self._owner, new_container, self.container_id)
            self._has_container = True

    def _file_id(self, path: str) -> str:
        digest = hashlib.sha256(f"{self.container_id}{path}".encode(errors="surrogateescape"))
        return f"cfile_{digest.hexdigest()[:24]}"

    async def _data_url(self, blob: Blob, mime_type: str) -> str | None:
        inline_bytes = self._limits.inline_image_kib << 10
        if not mime_type.startswith("image/") or blob.bytes > inline_bytes:
            return None
        content = b"".join([piece async for piece in self._files.store.blobs.read(blob.name)])
        return f"data:{mime_type};base64,{base64.b64encode(content).decode()}"


class LinkSigner:
    """Signs links and verifies their signatures. The store keeps the key, so that links stay valid
    after a restart."""

    def __init__(self, key: bytes, now: Callable[[], float]) -> None:
        self._key = key
        self._now = now

    def sign(self, container_id: str, file_id: str, expires_at: int) -> str:
        """Return the signature of a link that expires at a Unix time."""
        text = f"{container_id}/{file_id}/{expires_at}".encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()

    def is_valid_link(
        self, container_id: str, file_id: str, expires_at: str, signature: str
    ) -> bool:
        """Return True if the signature is valid and the link has not expired."""
        if not (
            expires_at.isascii() and expires_at.isdigit() and len(expires_at) <= _MAX_EXPIRY_DIGITS
        ):
            return False
        if int(expires_at) < self._now():
            return False
        expected = self.sign(container_id, file_id, int(expires_at))
        return hmac.compare_digest(expected.encode(), signature.encode())
