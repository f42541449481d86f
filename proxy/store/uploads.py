"""Files that clients have uploaded."""

import uuid
from collections.abc import Callable, Collection

from sqlalchemy import ColumnElement, Connection, RowMapping, delete, insert, select, update

from proxy.store.blobs import Blob, BlobStore
from proxy.store.database import Database, fetch_page, oldest_rows, require_quota, sweep_batch
from proxy.store.records import Page, PageRequest, StoredUpload, Upload
from proxy.store.tables import FILES


class UploadRepository:
    """The uploads of all owners; each owner sees its own only."""

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
        expires_at: Callable[[int], int],
        quota: int,
    ) -> StoredUpload:
        """Keep an upload. `expires_at` computes its expiry from its creation. Raises QuotaError."""
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
            expires_at=expires_at(now),
        )

        def work(connection: Connection) -> None:
            require_quota(connection, owner, blob.bytes, quota, now)
            connection.execute(insert(FILES), {"owner": owner, **_values(upload)})

        async with self._blobs.removed_on_error(blob):
            await self._database.write(work)
        return upload

    async def get(self, owner: str, file_id: str) -> StoredUpload | None:
        """Return the owner's upload, or None."""
        query = select(FILES).where(self._mine(owner), FILES.c.id == file_id, self._live())

        def work(connection: Connection) -> StoredUpload | None:
            row = connection.execute(query).mappings().one_or_none()
            if row is None or not self._blobs.is_intact(row["blob"], row["bytes"]):
                return None
            return _upload(row)

        return await self._database.read(work)

    async def find(self, owner: str, file_id: str) -> Upload | None:
        """See Uploads."""
        upload = await self.get(owner, file_id)
        if upload is None:
            return None
        path = self._blobs.path(upload.blob)
        return Upload(upload.id, upload.filename, upload.bytes, upload.mime_type, path)

    async def page(self, owner: str, asked: PageRequest, purpose: str | None) -> Page[StoredUpload]:
        """Return a page of the owner's uploads. Raises BadRequestError."""
        wanted = self._live()
        if purpose is not None:
            wanted &= FILES.c.purpose == purpose

        def work(connection: Connection) -> Page[StoredUpload]:
            rows, more = fetch_page(connection, FILES, asked, mine=self._mine(owner), wanted=wanted)
            return Page(tuple(map(_upload, rows)), more)

        return await self._database.read(work)

    async def delete(self, owner: str, file_id: str) -> bool:
        """Delete the owner's upload; return True if there was one."""
        change = (
            update(FILES)
            .where(self._mine(owner), FILES.c.id == file_id, self._live())
            .values(deleted_at=int(self._now()))
            .returning(FILES.c.blob)
        )
        blobs = await self._database.write(lambda c: c.execute(change).scalars().all())
        await self._blobs.remove(blobs)
        return bool(blobs)

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired uploads, and the rows of those deleted long ago. See Shelf."""
        past = oldest_rows(FILES, (FILES.c.expires_at <= now) & _KEPT)
        long_ago = oldest_rows(FILES, FILES.c.deleted_at < forget_before)
        return sweep_batch(
            connection,
            update(FILES).where(FILES.c.seq.in_(past)).values(_gone(now)),
            delete(FILES).where(FILES.c.seq.in_(long_ago)),
        )

    def blobs(self, connection: Connection) -> dict[str, int]:
        """Return the blobs in use and their sizes."""
        rows = connection.execute(select(FILES.c.blob, FILES.c.bytes).where(_KEPT))
        return {row.blob: row.bytes for row in rows}

    def mark_missing(self, connection: Connection, blobs: Collection[str], now: int) -> None:
        """Mark the uploads of missing blobs as deleted."""
        for blob in blobs:
            connection.execute(update(FILES).where(FILES.c.blob == blob, _KEPT).values(_gone(now)))

    def _mine(self, owner: str) -> ColumnElement[bool]:
        return FILES.c.owner == owner

    def _live(self) -> ColumnElement[bool]:
        return _KEPT & (FILES.c.expires_at > self._now())


_KEPT = FILES.c.deleted_at.is_(None)


def _gone(now: int) -> dict[str, int]:
    return {"deleted_at": now}


def _values(upload: StoredUpload) -> dict[str, str | int]:
    return {name: getattr(upload, name) for name in StoredUpload.__slots__}


def _upload(row: RowMapping) -> StoredUpload:
    return StoredUpload(**{name: row[name] for name in StoredUpload.__slots__})
