"""A file's bytes, whole, as an editor reads and writes them."""

from collections.abc import AsyncIterator

from sandbox_runtime.sandbox import Sandbox

MAX_FILE_BYTES = 10 << 20


async def read(sandbox: Sandbox, path: str) -> bytes:
    """Raises FileMissingError, NotARegularFileError and FileTooLargeError."""
    data = bytearray()

    async def sink(piece: bytes) -> None:
        data.extend(piece)

    await sandbox.get(path, sink, max_bytes=MAX_FILE_BYTES)
    return bytes(data)


async def write(sandbox: Sandbox, path: str, data: bytes, *, new: bool = False) -> None:
    """Raises SandboxFileError; of these, where `new`, FileThereError if anything is there."""

    async def whole() -> AsyncIterator[bytes]:
        yield data

    await sandbox.put(path, whole(), new=new)
