"""A tree of files in memory, with readers and writers."""

import asyncio
import errno
import posixpath
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

MAX_LINKS = 40


class Reader(Protocol):
    async def read(self, size: int) -> bytes:
        """Return at most `size` bytes; b"" at the end."""

    def close(self) -> None: ...


class ByteWriter(Protocol):
    async def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


@dataclass
class FakeFile:
    data: bytearray = field(default_factory=bytearray)
    mode: int = 0o644


class Directory:
    pass


@dataclass(frozen=True)
class Link:
    target: str


@dataclass(frozen=True)
class Device:
    name: Literal["null", "zero"]


class Pipe:
    """A pipe."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._rest = b""
        self._ended = False
        self._abandoned = False

    async def read(self, size: int) -> bytes:
        while not self._rest and not self._ended:
            self._rest = await self._pieces.get()
            self._ended = not self._rest
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece

    async def write(self, data: bytes) -> None:
        if self._abandoned:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        if data:
            self._pieces.put_nowait(data)
        await asyncio.sleep(0)

    def close_reader(self) -> None:
        self._abandoned = True

    def close_writer(self) -> None:
        self._pieces.put_nowait(b"")


Stir = Callable[[], None]
"""A callback for each action of a process; a process without actions is blocked."""


class PipeReader:
    def __init__(self, pipe: Pipe, stir: Stir) -> None:
        self._pipe = pipe
        self._stir = stir
        self.close = pipe.close_reader

    async def read(self, size: int) -> bytes:
        piece = await self._pipe.read(size)
        self._stir()
        return piece


class PipeWriter:
    def __init__(self, pipe: Pipe, stir: Stir) -> None:
        self._pipe = pipe
        self._stir = stir
        self.close = pipe.close_writer

    async def write(self, data: bytes) -> None:
        self._stir()
        await self._pipe.write(data)


Side = Literal["reader", "writer"]


class Fifo:
    """A named pipe: each reader waits for a writer and each writer for a reader."""

    def __init__(self) -> None:
        self._waiting: dict[Side, deque[asyncio.Future[Pipe]]] = {
            "reader": deque(),
            "writer": deque(),
        }

    async def open(self, side: Side) -> Pipe:
        others = self._waiting["writer" if side == "reader" else "reader"]
        while others:
            other = others.popleft()
            if not other.done():
                pipe = Pipe()
                other.set_result(pipe)
                return pipe
        arrival: asyncio.Future[Pipe] = asyncio.get_running_loop().create_future()
        self._waiting[side].append(arrival)
        return await arrival


class Bytes:
    """A reader of existing data."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    async def read(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        self._at += len(piece)
        return piece

    def close(self) -> None:
        pass


class DeviceReader:
    def __init__(self, device: Device) -> None:
        self._zero = device.name == "zero"

    async def read(self, size: int) -> bytes:
        return bytes(size) if self._zero else b""

    def close(self) -> None:
        pass


class Discard:
    async def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass


class FileWriter:
    def __init__(self, file: FakeFile) -> None:
        self._file = file

    async def write(self, data: bytes) -> None:
        self._file.data += data

    def close(self) -> None:
        pass


Node = FakeFile | Directory | Link | Fifo | Device


class Files:
    """All nodes by path. Paths in `nodes` contain no link, no dot and no trailing slash."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {"/": Directory()}

    def locate(self, path: str, *, follow: bool = True) -> str:
        """Return the path with links resolved; with `follow`, the last component too."""
        todo = path.split("/")[::-1]
        here = ""
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                here = here.rpartition("/")[0]
            elif part not in ("", "."):
                node = self.nodes.get(f"{here}/{part}")
                if isinstance(node, Link) and (follow or any(todo)):
                    links += 1
                    if links > MAX_LINKS:
                        raise OSError(errno.ELOOP, "Too many levels of symbolic links", path)
                    here = "" if node.target.startswith("/") else here
                    todo += node.target.split("/")[::-1]
                else:
                    here = f"{here}/{part}"
        return here or "/"

    def find(self, path: str, *, follow: bool = True) -> Node | None:
        return self.nodes.get(self.locate(path, follow=follow))

    def add(self, path: str, node: Node, *, follow: bool = True) -> None:
        """Add or replace a node. Raises OSError."""
        place = self.locate(path, follow=follow)
        parent = self.nodes.get(posixpath.dirname(place))
        if parent is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if not isinstance(parent, Directory):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
        self.nodes[place] = node

    def make_directories(self, path: str) -> None:
        """Create a directory and its parents. Raises OSError if another node has such a path."""
        place = self.locate(path)
        if place == "/":
            return
        self.make_directories(posixpath.dirname(place))
        if not isinstance(self.nodes.setdefault(place, Directory()), Directory):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)

    def below(self, path: str) -> list[str]:
        """Return the sorted relative paths of all nodes below a directory."""
        prefix = self.locate(path).rstrip("/") + "/"
        return sorted(
            place.removeprefix(prefix)
            for place in self.nodes
            if place.startswith(prefix) and place != prefix
        )

    def remove(self, path: str) -> None:
        place = self.locate(path, follow=False)
        for name in self.below(place) if isinstance(self.nodes[place], Directory) else ():
            del self.nodes[f"{place}/{name}"]
        del self.nodes[place]

    async def reader(self, path: str, stir: Stir) -> Reader:
        """Open a file for reading. Raises OSError."""
        node = self.find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if isinstance(node, FakeFile):
            return Bytes(bytes(node.data))
        if isinstance(node, Device):
            return DeviceReader(node)
        if isinstance(node, Fifo):
            return PipeReader(await node.open("reader"), stir)
        raise IsADirectoryError(errno.EISDIR, "Is a directory", path)

    async def writer(self, path: str, stir: Stir, *, append: bool) -> ByteWriter:
        """Open a file for writing; create it if it is missing. Raises OSError."""
        node = self.find(path)
        if node is None:
            node = FakeFile()
            self.add(path, node)
        if isinstance(node, FakeFile):
            if not append:
                node.data = bytearray()
            return FileWriter(node)
        if isinstance(node, Device):
            return Discard()
        if isinstance(node, Fifo):
            return PipeWriter(await node.open("writer"), stir)
        raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
