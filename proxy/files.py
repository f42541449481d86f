"""Produced files on the proxy's side: kept for a while, found again by links that need no key."""

import asyncio
import base64
import hashlib
import hmac
import json
import mimetypes
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from policies.artifacts import ArtifactLimits, Produced
from proxy.agent.task import Artifact
from sandbox_runtime.sandbox import Sandbox

WRITE_BYTES = 1 << 20
MAX_ID_CHARS = 100
MAX_EXPIRY_DIGITS = 12


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that can be served."""

    path: Path
    filename: str
    mime_type: str


class FileStore:
    """A directory of produced files, one folder a run."""

    def __init__(self, directory: Path, *, limits: ArtifactLimits) -> None:
        self._directory = directory
        self._limits = limits
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._secret = _secret(directory / ".secret")

    def outbox(self, container_id: str, base_url: str) -> "RunFiles":
        """Where a run's files go; `base_url` is how clients reach this server."""
        expires = int(time.time() + self._limits.keep_hours * 3600)
        return RunFiles(self, container_id, base_url.rstrip("/"), expires, self._limits)

    def folder(self, container_id: str) -> Path:
        """A run's folder."""
        return self._directory / container_id

    def sign(self, container_id: str, file_id: str, expires: int) -> str:
        """The proof that a link was made here."""
        text = f"{container_id}/{file_id}/{expires}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    def is_signed(self, container_id: str, file_id: str, expires: str, signature: str) -> bool:
        """Whether a link was made here and still holds."""
        if not (expires.isascii() and expires.isdigit() and len(expires) <= MAX_EXPIRY_DIGITS):
            return False
        if int(expires) < time.time():
            return False
        expected = self.sign(container_id, file_id, int(expires))
        return hmac.compare_digest(expected.encode(), signature.encode())

    def find(self, container_id: str, file_id: str) -> StoredFile | None:
        """A stored file, or None."""
        if not (_is_id(container_id) and _is_id(file_id)):
            return None
        try:
            facts = json.loads((self.folder(container_id) / f"{file_id}.json").read_text("utf-8"))
        except FileNotFoundError:
            return None
        return StoredFile(
            self.folder(container_id) / file_id, facts["filename"], facts["mime_type"]
        )

    def sweep(self) -> None:
        """Remove what has expired."""
        oldest = time.time() - self._limits.keep_hours * 3600
        for folder in self._directory.glob("cntr_*"):
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)


class RunFiles:
    """One run's produced files."""

    def __init__(
        self,
        store: FileStore,
        container_id: str,
        base_url: str,
        expires: int,
        limits: ArtifactLimits,
    ) -> None:
        self._store = store
        self._container_id = container_id
        self._base_url = base_url
        self._expires = expires
        self._limits = limits

    @property
    def container_id(self) -> str:
        return self._container_id

    def url(self, path: str) -> str:
        file_id = self._file_id(path)
        signature = self._store.sign(self._container_id, file_id, self._expires)
        return (
            f"{self._base_url}/v1/containers/{self._container_id}/files/{file_id}/content"
            f"?exp={self._expires}&sig={signature}"
        )

    async def save(self, sandbox: Sandbox, file: Produced) -> Artifact:
        folder = self._store.folder(self._container_id)
        folder.mkdir(mode=0o700, exist_ok=True)
        file_id = self._file_id(file.path)
        # Our own name in a folder of our own: nothing the sandbox chose reaches the host's paths.
        part = folder / f".{file_id}.part"
        try:
            with part.open("xb") as target:
                writer = _Writer(target)
                await sandbox.get(file.path, writer.take, max_bytes=file.bytes)
                await writer.flush()
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        part.rename(folder / file_id)
        name = os.fsencode(file.path.rpartition("/")[2]).decode(errors="replace")
        mime_type = _mime_type(name)
        artifact = Artifact(
            file_id=file_id,
            container_id=self._container_id,
            path=file.path,
            bytes=writer.bytes,
            mime_type=mime_type,
            sha256=writer.digest.hexdigest(),
            url=self.url(file.path),
            data_url=self._data_url(folder / file_id, mime_type, writer.bytes),
        )
        # Written last: a file with facts is a whole file.
        facts = {"filename": name, "mime_type": mime_type, "sha256": artifact.sha256}
        (folder / f"{file_id}.json").write_text(json.dumps(facts), encoding="utf-8")
        return artifact

    def _file_id(self, path: str) -> str:
        digest = hashlib.sha256(f"{self._container_id}{path}".encode(errors="surrogateescape"))
        return f"cfile_{digest.hexdigest()[:24]}"

    def _data_url(self, path: Path, mime_type: str, size: int) -> str | None:
        if not mime_type.startswith("image/") or size > self._limits.inline_image_kib << 10:
            return None
        return f"data:{mime_type};base64,{base64.b64encode(path.read_bytes()).decode()}"


class _Writer:
    """Gathers small pieces into writes worth a thread."""

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self._buffer = bytearray()
        self.digest = hashlib.sha256()
        self.bytes = 0

    async def take(self, piece: bytes) -> None:
        """Keep a piece."""
        self._buffer += piece
        self.bytes += len(piece)
        if len(self._buffer) >= WRITE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what is kept."""
        data, self._buffer = bytes(self._buffer), bytearray()
        self.digest.update(data)
        await asyncio.to_thread(self._target.write, data)


def _mime_type(name: str) -> str:
    kind, encoding = mimetypes.guess_type(name)
    if encoding:  # what is inside cannot be shown as it is
        return "application/gzip" if encoding == "gzip" else "application/octet-stream"
    return kind or "application/octet-stream"


def _is_id(text: str) -> bool:
    return len(text) <= MAX_ID_CHARS and text.isascii() and text.replace("_", "").isalnum()


def _secret(path: Path) -> bytes:
    """The key that links are signed with; kept, so that links outlive a restart."""
    try:
        path.touch(mode=0o600, exist_ok=False)
        path.write_bytes(secrets.token_bytes(32))
    except FileExistsError:
        pass
    return path.read_bytes()
