"""Stored files of runs: complete or absent, and found only with their id, owner or signed link."""

import base64
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from policies.artifacts import ArtifactLimits, ProducedFile
from proxy.agent.result import Artifact
from proxy.files import FileStore, StoredFile
from proxy.store.store import Store
from sandbox_runtime.errors import FileSizeLimitError, SandboxFileError, SandboxLostError
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_sandbox import MemorySandbox
from tests.sandbox_runtime.transfer import PLENTY_S, pieces
from tests.stores import open_store, stored_blobs

PNG = base64.b64decode("iVBORw0KGgo=")
LIMITS = ArtifactLimits(inline_image_kib=1, retention_hours=1)
OWNER = "somebody"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def files(tmp_path: Path, clock: ManualClock) -> Iterator[FileStore]:
    with open_files(tmp_path, clock) as found:
        yield found


@contextmanager
def open_files(directory: Path, clock: ManualClock) -> Iterator[FileStore]:
    """Open a FileStore whose clock is `clock`."""
    began = time.time()
    store = open_store(directory, now=lambda: began + clock.time())
    try:
        yield FileStore(store, limits=LIMITS)
    finally:
        store.close()


def contents(tmp_path: Path) -> list[bytes]:
    """Return the contents of all stored blobs, sorted."""
    return sorted(stored_blobs(tmp_path).values())


def signed(artifact: Artifact) -> tuple[str, str, str, str]:
    """Return the container, the file, the expiry and the signature of a link."""
    parts = urlsplit(artifact.url)
    query = parse_qs(parts.query)
    _, _, _, container_id, _, file_id, _ = parts.path.split("/")
    return container_id, file_id, query["exp"][0], query["sig"][0]


async def save_file(
    files: FileStore, path: str, data: bytes, container_id: str = "cntr_r1"
) -> Artifact:
    artifact_store = files.artifact_store(container_id, "https://host/", OWNER)
    return await artifact_store.save(
        MemorySandbox({path: data}), ProducedFile(path, len(data)), PLENTY_S
    )


async def test_saved_file_is_found_unchanged(files: FileStore) -> None:
    data = os.urandom(3 << 20)
    artifact = await save_file(files, "/testbed/output/sub/a.csv", data)
    url = files.artifact_store("cntr_r1", "https://host", OWNER).artifact_url(
        "/testbed/output/sub/a.csv"
    )
    assert artifact == Artifact(
        file_id=artifact.file_id,
        container_id="cntr_r1",
        path="/testbed/output/sub/a.csv",
        bytes=len(data),
        mime_type="text/csv",
        sha256=hashlib.sha256(data).hexdigest(),
        url=artifact.url,
        data_url=None,
    )
    assert signed(artifact)[:2] == ("cntr_r1", artifact.file_id)
    assert url.split("?")[0] == artifact.url.split("?")[0]
    found = await files.find("cntr_r1", artifact.file_id)
    assert found is not None
    assert (found.filename, found.mime_type) == ("a.csv", "text/csv")
    assert found.path.read_bytes() == data


async def test_link_is_valid_for_its_own_file_only(files: FileStore) -> None:
    container_id, file_id, expires, signature = signed(
        await save_file(files, "/testbed/output/a", b"a")
    )
    assert files.is_valid_link(container_id, file_id, expires, signature)
    later = str(int(expires) + 1)
    other = f"{'0' if signature[0] != '0' else '1'}{signature[1:]}"
    for forged in (
        ("cntr_r2", file_id, expires, signature),
        (container_id, "cfile_2", expires, signature),
        (container_id, file_id, later, signature),
        (container_id, file_id, expires, other),
        (container_id, file_id, expires, signature[:-1]),
        (container_id, file_id, expires, ""),
        (container_id, file_id, expires, "ü"),
        (container_id, file_id, "", signature),
        (container_id, file_id, "soon", signature),
        (container_id, file_id, f"-{expires}", signature),
        (container_id, file_id, "٣", signature),
        (container_id, file_id, "9" * 5000, signature),
    ):
        assert not files.is_valid_link(*forged)


async def test_link_is_invalid_after_its_expiry(files: FileStore, clock: ManualClock) -> None:
    link = signed(await save_file(files, "/testbed/output/a", b"a"))
    clock.advance(3599)
    assert files.is_valid_link(*link)
    clock.advance(2)
    assert not files.is_valid_link(*link)


async def test_links_stay_valid_after_a_restart_and_are_invalid_on_another_server(
    tmp_path: Path, clock: ManualClock
) -> None:
    with open_files(tmp_path / "one", clock) as before:
        link = signed(await save_file(before, "/testbed/output/a", b"a"))
    with (
        open_files(tmp_path / "one", clock) as after,
        open_files(tmp_path / "other", clock) as other,
    ):
        assert after.is_valid_link(*link)
        found = await after.find(*link[:2])
        assert found is not None
        assert found.path.read_bytes() == b"a"
        assert not other.is_valid_link(*link)


def test_stored_files_are_readable_by_the_server_user_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with closing(Store(tmp_path)):
        modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()}
    assert len((tmp_path / "link-key").read_bytes()) == 32
    assert set(modes.values()) == {0}
    assert {"blobs", "link-key", "store.sqlite3"} <= set(modes)


@pytest.mark.parametrize(
    "file_id",
    ["", ".", "..", "../x", "a/b", "/etc/passwd", ".secret", "a.json", "a\0", "ü", "a" * 300],
)
async def test_file_id_is_not_used_as_a_path(files: FileStore, file_id: str) -> None:
    await save_file(files, "/testbed/output/a", b"a")
    assert await files.find("cntr_r1", file_id) is None
    assert await files.find(file_id, "cfile_1") is None


async def test_unknown_file_is_not_found(files: FileStore) -> None:
    artifact = await save_file(files, "/testbed/output/a", b"a")
    assert await files.find("cntr_r1", "cfile_1") is None
    assert await files.find("cntr_r2", artifact.file_id) is None


@pytest.mark.parametrize(
    "name", ["../../../escaped", "a\nb", "caf\udce9", "%2e%2e", "-rf", "x" * 255, "a b;c"]
)
async def test_file_name_in_the_sandbox_is_not_used_as_a_path_on_the_host(
    files: FileStore, tmp_path: Path, name: str
) -> None:
    path = f"/testbed/output/{name}"
    sandbox = MemorySandbox()

    await sandbox.put(path, pieces(b"x"))
    artifact = await files.artifact_store("cntr_r1", "https://host", OWNER).save(
        sandbox, ProducedFile(path, 1), PLENTY_S
    )
    assert [name.isalnum() for name in stored_blobs(tmp_path)] == [True]
    assert artifact.url.isascii()
    assert await files.find("cntr_r1", artifact.file_id) is not None


async def test_small_images_have_a_data_url(files: FileStore) -> None:
    small = await save_file(files, "/testbed/output/a.png", PNG)
    large = await save_file(files, "/testbed/output/b.png", PNG * 200)
    text = await save_file(files, "/testbed/output/c.txt", b"text")
    assert small.data_url == "data:image/png;base64,iVBORw0KGgo="
    assert (large.data_url, text.data_url) == (None, None)


class Failing(MemorySandbox):
    """A sandbox that sends half of a file and then fails."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    async def get(self, path: str, sink: object, *, max_bytes: int, timeout_s: float) -> int:
        assert callable(sink)
        await sink(b"x" * (2 << 20))
        raise self._error


@pytest.mark.parametrize(
    "error", [SandboxLostError("gone"), FileSizeLimitError("grew"), KeyboardInterrupt()]
)
async def test_file_that_arrives_incompletely_is_not_stored(
    files: FileStore, tmp_path: Path, error: BaseException
) -> None:
    file = ProducedFile("/testbed/output/a", 9 << 20)
    with pytest.raises(type(error)):
        await files.artifact_store("cntr_r1", "https://host", OWNER).save(
            Failing(error), file, PLENTY_S
        )
    assert contents(tmp_path) == []


async def test_missing_or_grown_file_is_not_stored(files: FileStore, tmp_path: Path) -> None:
    artifact_store = files.artifact_store("cntr_r1", "https://host", OWNER)
    sandbox = MemorySandbox({"/testbed/output/a": b"12345"})
    for file in (ProducedFile("/testbed/output/b", 1), ProducedFile("/testbed/output/a", 4)):
        with pytest.raises(SandboxFileError):
            await artifact_store.save(sandbox, file, PLENTY_S)
    assert contents(tmp_path) == []


async def test_files_with_the_same_path_in_two_containers_are_two_files(files: FileStore) -> None:
    first = await save_file(files, "/testbed/output/a", b"1", "r1")
    second = await save_file(files, "/testbed/output/a", b"2", "r2")
    assert first.file_id != second.file_id
    assert [await read(files, first), await read(files, second)] == [b"1", b"2"]


async def read(files: FileStore, artifact: Artifact) -> bytes:
    found = await files.find(artifact.container_id, artifact.file_id)
    assert isinstance(found, StoredFile)
    return found.path.read_bytes()


async def test_sweep_removes_expired_files_only(
    files: FileStore, clock: ManualClock, tmp_path: Path
) -> None:
    old = await save_file(files, "/testbed/output/a", b"old", "old")
    clock.advance(1800)
    new = await save_file(files, "/testbed/output/a", b"new", "new")
    clock.advance(1801)
    assert await files.find("cntr_old", old.file_id) is None
    assert contents(tmp_path) == [b"new", b"old"]
    clock.advance(1798)  # the blob has had no row for long enough to be swept
    await files.store.sweep()
    assert await read(files, new) == b"new"
    assert contents(tmp_path) == [b"new"]


async def test_file_is_found_by_its_owner_only(files: FileStore) -> None:
    artifact = await save_file(files, "/testbed/output/a", b"a")
    assert await files.find("cntr_r1", artifact.file_id, OWNER) is not None
    assert await files.find("cntr_r1", artifact.file_id, "somebody else") is None


async def test_file_that_is_saved_again_replaces_the_earlier_file(
    files: FileStore, tmp_path: Path
) -> None:
    first = await save_file(files, "/testbed/output/a", b"1")
    second = await save_file(files, "/testbed/output/a", b"2")
    assert first.file_id == second.file_id
    assert contents(tmp_path) == [b"2"]
