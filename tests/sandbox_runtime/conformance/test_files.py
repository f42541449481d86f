"""Files are put completely or not at all, and only regular files can be read."""

import shlex
from collections.abc import AsyncIterator

import anyio
import pytest

from sandbox_runtime.errors import (
    FileMissingError,
    FileSizeLimitError,
    FileTimeoutError,
    NotARegularFileError,
    PathExistsError,
    SandboxFileError,
)
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.transfer import output, pieces, read, write

AWKWARD_PATHS = [
    "/testbed/two words.txt",
    "/testbed/quotes ' \" ` $HOME \\ ; & | *.txt",
    "/testbed/new\nline.txt",
    "/testbed/Größe/数 🎉.txt",
    "/testbed/-rf",
]


class SourceError(Exception):
    pass


async def _failing_source() -> AsyncIterator[bytes]:
    yield b"x" * 100_000
    raise SourceError


@pytest.mark.parametrize(
    "data",
    [b"", b"small", b"no\r\nchange\t\n\n", bytes(range(256)) * 300, b"0123456789abcdef" * 327_680],
    ids=["empty", "small", "text", "binary", "5 MiB"],
)
async def test_file_content_survives_put_and_get(sandbox: Sandbox, data: bytes) -> None:
    await write(sandbox, "/testbed/file", data)
    assert await read(sandbox, "/testbed/file") == data


async def test_file_can_be_put_in_pieces_of_arbitrary_size(sandbox: Sandbox) -> None:
    source = pieces(b"a", b"", b"b" * 3_000_000, b"c")
    assert await sandbox.put("/testbed/file", source) == 3_000_002
    assert await read(sandbox, "/testbed/file") == b"a" + b"b" * 3_000_000 + b"c"


async def test_commands_read_uploaded_files_and_files_of_commands_can_be_downloaded(
    sandbox: Sandbox,
) -> None:
    await write(sandbox, "/testbed/documents/in.txt", b"from outside")
    await output(sandbox, "cat documents/in.txt > output/out.txt; echo '!' >> output/out.txt")
    assert await read(sandbox, "/testbed/output/out.txt") == b"from outside!\n"


@pytest.mark.parametrize("path", AWKWARD_PATHS)
async def test_special_characters_of_a_path_are_literal(sandbox: Sandbox, path: str) -> None:
    await write(sandbox, path, b"content")
    assert await read(sandbox, path) == b"content"
    assert await output(sandbox, f"cat -- {shlex.quote(path)}") == "content"


async def test_put_creates_the_parent_directories(sandbox: Sandbox) -> None:
    await write(sandbox, "/testbed/new/and deeper/file", b"x")
    assert await output(sandbox, "cat 'new/and deeper/file'; ls") == "xdocuments\nnew\noutput\n"


async def test_put_replaces_the_whole_file(sandbox: Sandbox) -> None:
    await write(sandbox, "/testbed/file", b"a long first version")
    await write(sandbox, "/testbed/file", b"short")
    assert await read(sandbox, "/testbed/file") == b"short"


async def test_put_that_replaces_a_file_leaves_no_temporary_file(sandbox: Sandbox) -> None:
    for content in (b"first", b"second", b"third"):
        await write(sandbox, "/testbed/made/file", content)
    assert await output(sandbox, "cat made/file; ls -A made") == "thirdfile\n"


async def test_put_at_a_symbolic_link_replaces_the_link(sandbox: Sandbox) -> None:
    await write(sandbox, "/testbed/target", b"target")
    await output(sandbox, "ln -s target link")
    await write(sandbox, "/testbed/link", b"new")
    assert await output(sandbox, "cat link target; ls -A") == (
        "newtargetdocuments\nlink\noutput\ntarget\n"
    )


async def test_put_keeps_the_mode_of_an_existing_file_and_makes_no_new_file_executable(
    sandbox: Sandbox,
) -> None:
    await output(sandbox, "printf 'echo old' > script; chmod 755 script")
    await write(sandbox, "/testbed/script", b"echo new")
    await write(sandbox, "/testbed/plain", b"echo plain")
    assert await output(sandbox, "./script; [ -x plain ] || echo not executable") == (
        "new\nnot executable\n"
    )


async def test_put_at_the_path_of_a_directory_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFileError):
        await sandbox.put("/testbed/output", pieces(b"x"))
    assert await output(sandbox, "[ -d output ] && ls -A") == "documents\noutput\n"


async def test_put_with_new_true_refuses_an_existing_path(sandbox: Sandbox) -> None:
    await output(sandbox, "printf old > file; ln -s nowhere link; mkdir directory")
    for name in ("file", "link", "directory"):
        with pytest.raises(PathExistsError):
            await sandbox.put(f"/testbed/{name}", pieces(b"x"), new=True)
    await sandbox.put("/testbed/fresh/file", pieces(b"x"), new=True)
    assert await output(sandbox, "cat file fresh/file") == "oldx"


async def test_put_at_a_path_below_a_file_is_refused(sandbox: Sandbox) -> None:
    await write(sandbox, "/testbed/file", b"x")
    with pytest.raises(SandboxFileError):
        await sandbox.put("/testbed/file/below", pieces(b"y"))
    assert await read(sandbox, "/testbed/file") == b"x"


async def test_upload_whose_source_fails_leaves_only_the_old_file(
    sandbox: Sandbox,
) -> None:
    await write(sandbox, "/testbed/file", b"old")
    with pytest.raises(SourceError):
        await sandbox.put("/testbed/file", _failing_source())
    with pytest.raises(SourceError):
        await sandbox.put("/testbed/other", _failing_source())
    assert await read(sandbox, "/testbed/file") == b"old"
    assert await output(sandbox, "ls -A") == "documents\nfile\noutput\n"


async def test_cancelled_put_leaves_only_the_old_file(
    sandbox: Sandbox,
) -> None:
    await write(sandbox, "/testbed/file", b"old")
    with anyio.CancelScope() as scope:

        async def cancelling_source() -> AsyncIterator[bytes]:
            yield b"x" * 100_000
            scope.cancel()
            await anyio.Event().wait()

        await sandbox.put("/testbed/file", cancelling_source())
    assert await output(sandbox, "ls -A; cat file") == "documents\nfile\noutput\nold"


async def test_timed_out_put_leaves_only_the_old_file(
    sandbox: Sandbox,
) -> None:
    async def endless_source() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        await anyio.Event().wait()

    await write(sandbox, "/testbed/file", b"old")
    with anyio.fail_after(20), pytest.raises(FileTimeoutError):
        await sandbox.put("/testbed/file", endless_source(), timeout_s=0.2)
    assert await output(sandbox, "ls -A; cat file") == "documents\nfile\noutput\nold"


async def test_timed_out_get_leaves_the_sandbox_usable(sandbox: Sandbox) -> None:
    async def endless_sink(piece: bytes) -> None:
        await anyio.Event().wait()

    await write(sandbox, "/testbed/file", b"x" * 1_000_000)
    with anyio.fail_after(20), pytest.raises(FileTimeoutError):
        await sandbox.get("/testbed/file", endless_sink, max_bytes=1 << 20, timeout_s=0.2)
    with pytest.raises(FileTimeoutError):
        await read(sandbox, "/testbed/file", timeout_s=0)
    assert len(await read(sandbox, "/testbed/file")) == 1_000_000


async def test_get_of_a_missing_file_is_refused(sandbox: Sandbox) -> None:
    for path in ("/testbed/missing", "/no/such/directory/file"):
        with pytest.raises(FileMissingError):
            await read(sandbox, path)


@pytest.mark.parametrize(
    "making",
    [
        "mkdir it",
        "echo secret > target; ln -s target it",
        "ln -s nowhere it",
        "ln -s documents it",
        "mkfifo it",
        "ln -s /dev/zero it",
    ],
)
async def test_get_of_a_non_regular_file_is_refused_at_once(sandbox: Sandbox, making: str) -> None:
    await output(sandbox, making)
    with anyio.fail_after(20), pytest.raises(NotARegularFileError):
        await read(sandbox, "/testbed/it")


async def test_get_of_a_device_is_refused(sandbox: Sandbox) -> None:
    with anyio.fail_after(20), pytest.raises(NotARegularFileError):
        await read(sandbox, "/dev/zero")


async def test_get_refuses_only_files_larger_than_max_bytes(
    sandbox: Sandbox,
) -> None:
    await write(sandbox, "/testbed/file", b"x" * 100_000)
    with pytest.raises(FileSizeLimitError):
        await read(sandbox, "/testbed/file", max_bytes=99_999)
    assert len(await read(sandbox, "/testbed/file", max_bytes=100_000)) == 100_000
    await write(sandbox, "/testbed/empty", b"")
    assert await read(sandbox, "/testbed/empty", max_bytes=0) == b""


async def test_exception_of_a_download_sink_propagates_and_the_sandbox_stays_usable(
    sandbox: Sandbox,
) -> None:
    class SinkError(Exception):
        pass

    async def sink(piece: bytes) -> None:
        raise SinkError

    await write(sandbox, "/testbed/file", b"x" * 1_000_000)
    with pytest.raises(SinkError):
        await sandbox.get("/testbed/file", sink, max_bytes=1 << 20)
    assert len(await read(sandbox, "/testbed/file")) == 1_000_000
