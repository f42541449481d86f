"""Produced files on the proxy's side: kept whole or not at all, found only by a true link."""

import base64
import hashlib
import os
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from policies.artifacts import ArtifactLimits, Produced
from proxy.agent.task import Artifact
from proxy.files import FileStore, StoredFile
from sandbox_runtime.errors import FileTooLargeError, SandboxFileError, SandboxLostError
from tests.fakes.memory_sandbox import MemorySandbox
from tests.sandbox_runtime.transfer import pieces

PNG = base64.b64decode("iVBORw0KGgo=")
LIMITS = ArtifactLimits(inline_image_kib=1, keep_hours=1)


def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "files", limits=LIMITS)


def everything(tmp_path: Path) -> list[str]:
    """Every file of the store but its key."""
    names = (path for path in (tmp_path / "files").rglob("*") if path.is_file())
    return sorted(path.name for path in names if path.name != ".secret")


def signed(artifact: Artifact) -> tuple[str, str, str, str]:
    """Container, file, expiry and signature of a link."""
    parts = urlsplit(artifact.url)
    query = parse_qs(parts.query)
    _, _, _, container_id, _, file_id, _ = parts.path.split("/")
    return container_id, file_id, query["exp"][0], query["sig"][0]


async def saved(files: FileStore, path: str, data: bytes, run_id: str = "r1") -> Artifact:
    outbox = files.outbox(run_id, "https://host/")
    return await outbox.save(MemorySandbox({path: data}), Produced(path, len(data)))


async def test_a_saved_file_is_found_as_it_was(tmp_path: Path) -> None:
    files = store(tmp_path)
    data = os.urandom(3 << 20)
    artifact = await saved(files, "/testbed/output/sub/a.csv", data)
    url = files.outbox("r1", "https://host").url("/testbed/output/sub/a.csv")
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
    found = files.find("cntr_r1", artifact.file_id)
    assert found is not None
    assert (found.filename, found.mime_type) == ("a.csv", "text/csv")
    assert found.path.read_bytes() == data


async def test_a_link_holds_for_its_own_file_alone(tmp_path: Path) -> None:
    files = store(tmp_path)
    container_id, file_id, expires, signature = signed(
        await saved(files, "/testbed/output/a", b"a")
    )
    assert files.is_signed(container_id, file_id, expires, signature)
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
        assert not files.is_signed(*forged)


async def test_a_link_expires(tmp_path: Path) -> None:
    files = store(tmp_path)
    past = int(time.time()) - 1
    assert not files.is_signed("c", "f", str(past), files.sign("c", "f", past))
    _, _, expires, _ = signed(await saved(files, "/testbed/output/a", b"a"))
    assert 3590 < int(expires) - time.time() <= 3600


async def test_links_outlive_a_restart_and_differ_between_servers(tmp_path: Path) -> None:
    link = signed(await saved(store(tmp_path), "/testbed/output/a", b"a"))
    assert store(tmp_path).is_signed(*link)
    assert not FileStore(tmp_path / "other", limits=LIMITS).is_signed(*link)


def test_the_key_is_the_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir(mode=0o755)
    store(tmp_path)
    key = tmp_path / "files" / ".secret"
    assert (key.stat().st_mode & 0o077, len(key.read_bytes())) == (0, 32)


@pytest.mark.parametrize(
    "file_id",
    ["", ".", "..", "../x", "a/b", "/etc/passwd", ".secret", "a.json", "a\0", "ü", "a" * 300],
)
async def test_an_id_is_never_a_path(tmp_path: Path, file_id: str) -> None:
    files = store(tmp_path)
    await saved(files, "/testbed/output/a", b"a")
    assert files.find("cntr_r1", file_id) is None
    assert files.find(file_id, "cfile_1") is None


async def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    files = store(tmp_path)
    artifact = await saved(files, "/testbed/output/a", b"a")
    assert files.find("cntr_r1", "cfile_1") is None
    assert files.find("cntr_r2", artifact.file_id) is None


@pytest.mark.parametrize(
    "name", ["../../../escaped", "a\nb", "caf\udce9", "%2e%2e", "-rf", "x" * 255, "a b;c"]
)
async def test_the_name_inside_the_sandbox_is_no_path_outside(tmp_path: Path, name: str) -> None:
    files = store(tmp_path)
    path = f"/testbed/output/{name}"
    sandbox = MemorySandbox()

    await sandbox.put(path, pieces(b"x"))
    artifact = await files.outbox("r1", "https://host").save(sandbox, Produced(path, 1))
    assert everything(tmp_path) == [artifact.file_id, f"{artifact.file_id}.json"]
    assert artifact.url.isascii()
    assert files.find("cntr_r1", artifact.file_id) is not None


async def test_pictures_travel_inside_the_message_when_they_are_small(tmp_path: Path) -> None:
    files = store(tmp_path)
    small = await saved(files, "/testbed/output/a.png", PNG)
    large = await saved(files, "/testbed/output/b.png", PNG * 200)
    text = await saved(files, "/testbed/output/c.txt", b"text")
    assert small.data_url == "data:image/png;base64,iVBORw0KGgo="
    assert (large.data_url, text.data_url) == (None, None)


class Failing(MemorySandbox):
    """Gives half of a file and then fails."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    async def get(self, path: str, sink: object, *, max_bytes: int) -> int:
        assert callable(sink)
        await sink(b"x" * (2 << 20))
        raise self._error


@pytest.mark.parametrize(
    "error", [SandboxLostError("gone"), FileTooLargeError("grew"), KeyboardInterrupt()]
)
async def test_a_file_that_fails_half_way_leaves_nothing(
    tmp_path: Path, error: BaseException
) -> None:
    files = store(tmp_path)
    file = Produced("/testbed/output/a", 9 << 20)
    with pytest.raises(type(error)):
        await files.outbox("r1", "https://host").save(Failing(error), file)
    assert everything(tmp_path) == []


async def test_a_file_that_is_gone_or_grew_leaves_nothing(tmp_path: Path) -> None:
    files = store(tmp_path)
    outbox = files.outbox("r1", "https://host")
    sandbox = MemorySandbox({"/testbed/output/a": b"12345"})
    for file in (Produced("/testbed/output/b", 1), Produced("/testbed/output/a", 4)):
        with pytest.raises(SandboxFileError):
            await outbox.save(sandbox, file)
    assert everything(tmp_path) == []


async def test_the_same_path_of_two_runs_is_two_files(tmp_path: Path) -> None:
    files = store(tmp_path)
    first = await saved(files, "/testbed/output/a", b"1", "r1")
    second = await saved(files, "/testbed/output/a", b"2", "r2")
    assert first.file_id != second.file_id
    assert [read(files, first), read(files, second)] == [b"1", b"2"]


def read(files: FileStore, artifact: Artifact) -> bytes:
    found = files.find(artifact.container_id, artifact.file_id)
    assert isinstance(found, StoredFile)
    return found.path.read_bytes()


async def test_the_sweep_removes_what_has_expired_and_nothing_else(tmp_path: Path) -> None:
    files = store(tmp_path)
    old = await saved(files, "/testbed/output/a", b"old", "old")
    new = await saved(files, "/testbed/output/a", b"new", "new")
    (tmp_path / "files" / "not-ours").mkdir()
    expired = time.time() - 3601
    for folder in ("cntr_old", "not-ours"):
        os.utime(tmp_path / "files" / folder, (expired, expired))
    files.sweep()
    assert files.find("cntr_old", old.file_id) is None
    assert read(files, new) == b"new"
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [
        ".secret",
        "cntr_new",
        "not-ours",
    ]
