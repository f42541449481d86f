"""Pack and unpack a directory of the fake sandbox as tar."""

import io
import tarfile

from sandbox_runtime.errors import SandboxFileError
from tests.fakes.memory_files import Directory, FakeFile, Fifo, Files, Link, Node

SHARED = "shared"
"""The directory that snapshots exclude, because real sandboxes mount it."""
END_BYTES = 2 * tarfile.BLOCKSIZE
"""Minimum number of zero bytes at the end of an archive."""


def pack(files: Files, directory: str) -> bytes:
    """Return the content of a directory as tar."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in files.below(directory):
            if name.partition("/")[0] != SHARED:
                node = files.nodes[f"{files.locate(directory)}/{name}"]
                member, data = _member(name, node)
                archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def _member(name: str, node: Node) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(f"./{name}")
    match node:
        case FakeFile():
            member.size, member.mode = len(node.data), node.mode
            return member, bytes(node.data)
        case Directory():
            member.type, member.mode = tarfile.DIRTYPE, 0o755
        case Link():
            member.type, member.linkname = tarfile.SYMTYPE, node.target
        case Fifo():
            member.type = tarfile.FIFOTYPE
        case _:
            raise SandboxFileError(f"{name} is a device")
    return member, b""


def unpack(files: Files, directory: str, packed: bytes) -> None:
    """Unpack an archive into a directory. Raises SandboxFileError if it is malformed."""
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
            nodes = [(_path(member), _node(archive, member)) for member in archive]
            end = packed[archive.offset :]
    except tarfile.TarError as error:
        raise SandboxFileError(f"unpacking the workspace failed: {error}") from error
    # tarfile treats any invalid member as the end.
    if len(end) < END_BYTES or any(end):
        raise SandboxFileError("unpacking the workspace failed: the archive is not whole")
    for path, node in nodes:
        _put(files, f"{directory}/{path}", node)


def _path(member: tarfile.TarInfo) -> str:
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise SandboxFileError(f"unpacking the workspace failed: {member.name!r} leads out of it")
    return member.name


def _node(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Node:
    if member.isdir():
        return Directory()
    if member.issym():
        return Link(member.linkname)
    if member.isfifo():
        return Fifo()
    content = archive.extractfile(member) if member.isreg() else None
    if content is None:
        raise SandboxFileError(f"unpacking the workspace failed: {member.name!r} is a device")
    return FakeFile(bytearray(content.read()), member.mode)


def _put(files: Files, path: str, node: Node) -> None:
    place = files.locate(path, follow=False)
    try:
        if isinstance(node, Directory):
            files.make_directories(place)
        elif isinstance(files.nodes.get(place), Directory):
            raise IsADirectoryError(f"{path} is a directory")
        else:
            files.make_directories(place.rpartition("/")[0] or "/")
            files.nodes[place] = node
    except OSError as error:
        raise SandboxFileError(f"unpacking the workspace failed: {path}: {error}") from error
