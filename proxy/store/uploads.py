"""Files that clients have uploaded."""

import uuid
from collections.abc import Callable, Collection
from functools import partial

from sqlalchemy import ColumnElement, Connection, RowMapping, delete, insert, select, update

from proxy.store.blobs import Blob, BlobStore
from proxy.store.database import Database, check_quota, oldest_rows, sweep_batch
from proxy.store.records import Page, PageRequest, StoredUpload, Upload
from proxy.store.tables import FILES

_NOT_DELETED = FILES.c.deleted_at.is_(None)


class UploadRepository:
    """Stores the uploads of all owners. Each owner sees only its own uploads."""

    def __init__(self, database: Database, blobs: BlobStore, now: Callable[[], float]) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now

    async def add(
        self,
        owner: str,
        blob: Blob,
        *,
        filename: str,
        purpose: str,
        mime_type: str,
        compute_expiry: Callable[[int], int],
        quota: int,
    ) -> StoredUpload:
        """Store an upload. Raises QuotaError.

        `compute_expiry` computes the expiry from the time of creation; `quota` is in bytes.
        """
        now = int(self._now())
        upload = StoredUpload(
            id=f"file-{uuid.uuid4().hex}",
            filename=filename,
            purpose=purpose,
            mime_type=mime_type,
            bytes=blob.bytes,
            sha256=blob.sha256,
            blob=blob.name,
            created_at=now,
            expires_at=compute_expiry(now),
        )
        row = {name: getattr(upload, name) for name in StoredUpload.__slots__}

        def transaction(connection: Connection) -> None:
            check_quota(connection, owner, blob.bytes, quota, now)
            connection.execute(insert(FILES), {"owner": owner, **row})

        async with self._blobs.remove_on_error(blob):
            await self._database.write(transaction)
        return upload

    async def get(self, owner: str, file_id: str) -> StoredUpload | None:
        """Return the owner's upload, or None if it does not exist or its blob is missing or has
        another size."""
        query = select(FILES).where(FILES.c.owner == owner, FILES.c.id == file_id, self._is_live())

        def convert(row: RowMapping) -> StoredUpload | None:
            return _upload(row) if self._blobs.is_intact(row["blob"], row["bytes"]) else None

        return await self._database.read_one(query, convert)

    async def find(self, owner: str, file_id: str) -> Upload | None:
        upload = await self.get(owner, file_id)
        if upload is None:
            return None
        read = partial(self._blobs.read, upload.blob)
        return Upload(upload.id, upload.filename, upload.bytes, upload.mime_type, read)

    async def page(
        self, owner: str, request: PageRequest, purpose: str | None
    ) -> Page[StoredUpload]:
        """Return a page of the owner's uploads. Raises BadRequestError."""
        visible = self._is_live()
        if purpose is not None:
            visible &= FILES.c.purpose == purpose
        return await self._database.read_page(
            FILES, request, _upload, scope=FILES.c.owner == owner, visible=visible
        )

    async def delete(self, owner: str, file_id: str) -> bool:
        """Delete the owner's upload. Return False if there is none."""
        change = (
            update(FILES)
            .where(FILES.c.owner == owner, FILES.c.id == file_id, self._is_live())
            .values(deleted_at=int(self._now()))
            .returning(FILES.c.blob)
        )
        blobs = await self._database.write(lambda c: c.execute(change).scalars().all())
        await self._blobs.remove(blobs)
        return bool(blobs)

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired uploads. See Repository."""
        expired = oldest_rows(FILES, (FILES.c.expires_at <= now) & _NOT_DELETED)
        return sweep_batch(
            connection,
            update(FILES).where(expired).values(deleted_at=now),
            delete(FILES).where(oldest_rows(FILES, FILES.c.deleted_at < forget_before)),
        )

    def blob_sizes(self, connection: Connection) -> dict[str, int]:
        rows = connection.execute(select(FILES.c.blob, FILES.c.bytes).where(_NOT_DELETED))
        return {row.blob: row.bytes for row in rows}

    def mark_missing(self, connection: Connection, blobs: Collection[str], now: int) -> None:
        for blob in blobs:
            missing = update(FILES).where(FILES.c.blob == blob, _NOT_DELETED)
            connection.execute(missing.values(deleted_at=now))

    def _is_live(self) -> ColumnElement[bool]:
        return _NOT_DELETED & (FILES.c.expires_at > self._now())


def _upload(row: RowMapping) -> StoredUpload:
    return StoredUpload(**{name: row[name] for name in StoredUpload.__slots__})
