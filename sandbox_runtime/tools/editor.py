"""The str_replace_editor tool with its undo, and the helpers that both editors share.

Files are read and written through the sandbox's file operations, never through a shell, so any
path and any bytes are safe. An edit changes the bytes it names and no others.
"""

import asyncio
import difflib
import posixpath
import shlex
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from policies.observation import ObservationLimits, printable
from policies.workspace import WORKING_DIR
from sandbox_runtime.errors import (
    FileMissingError,
    FileSizeLimitError,
    NotARegularFileError,
    PathExistsError,
    SandboxFileError,
)
from sandbox_runtime.sandbox import Lease, OnOutput, Sandbox
from sandbox_runtime.tools.base import Observation, ToolInputError, ToolSchema, parse_arguments
from sandbox_runtime.tools.text_edits import (
    insert_after_line,
    lines_of,
    replace_once,
    view_directory,
    view_edit,
    view_file,
)

MAX_FILE_BYTES = 10 << 20
"""The largest file that an editor reads or writes."""
_MAX_VERSIONS_PER_PATH = 10
_MAX_HISTORY_BYTES = 8 << 20
_MAX_COMPARED_CHARS = 64
_MAX_COMPARED_NAMES = 200
_COMMANDS = ["view", "create", "str_replace", "insert", "undo_edit"]
_NEEDED_ARGUMENTS = {
    "create": ("file_text",),
    "str_replace": ("old_str",),
    "insert": ("insert_line", "new_str"),
}

SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "str_replace_editor",
        "description": (
            f"View and edit files. Relative paths start at {WORKING_DIR}.\n"
            "view: a directory two levels deep, or a file's numbered lines; view_range: first and "
            "last, -1 for the end.\n"
            "create: a new file of file_text, with its directories; never overwrites.\n"
            "str_replace: put new_str in place of old_str, which must occur exactly once; no line "
            "numbers.\n"
            "insert: put new_str in as lines after line insert_line, 0 for the start.\n"
            "undo_edit: take back the last edit of path."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": _COMMANDS},
                "path": {"type": "string"},
                "file_text": {"type": "string"},
                "old_str": {"type": "string"},
                "new_str": {"type": "string"},
                "insert_line": {"type": "integer"},
                "view_range": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["command", "path"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class _Version:
    """A file as it was before an edit."""

    path: str
    data: bytes | None
    """The bytes of the file; None if there was no file."""

    @property
    def size_bytes(self) -> int:
        return len(self.data or b"")


class _EditHistory:
    """The last versions of the edited files, oldest first; their number and bytes are bounded."""

    def __init__(self) -> None:
        self._versions: list[_Version] = []

    def remember(self, version: _Version) -> None:
        """Keep a version, and forget the oldest ones beyond the bounds.

        An undo must never skip an edit: a version that is too large to keep also removes the older
        versions of its path.
        """
        of_path = [known for known in self._versions if known.path == version.path]
        if version.size_bytes > _MAX_HISTORY_BYTES:
            self._versions = [known for known in self._versions if known.path != version.path]
            return
        self._versions.append(version)
        if len(of_path) == _MAX_VERSIONS_PER_PATH:
            self.forget(of_path[0])
        while sum(known.size_bytes for known in self._versions) > _MAX_HISTORY_BYTES:
            del self._versions[0]

    def last_version(self, path: str) -> _Version | None:
        """Return the version that the next undo of `path` restores, or None."""
        return next((known for known in reversed(self._versions) if known.path == path), None)

    def forget(self, version: _Version) -> None:
        """Drop a version."""
        self._versions = [known for known in self._versions if known is not version]


async def run_edit(edit: Coroutine[Any, Any, str], timeout_s: float) -> str:
    """Return the text of an edit or, if it fails or times out, a text that says why."""
    try:
        async with asyncio.timeout(timeout_s):
            return await edit
    except ToolInputError as error:
        return str(error)
    except TimeoutError:
        return f"Stopped: it took more than {timeout_s:g} s."
    except SandboxFileError as error:
        return f"Refused by the sandbox: {printable(str(error))}"


async def read_file(sandbox: Sandbox, path: str) -> bytes:
    """Return a file's bytes. Raises FileMissingError, NotARegularFileError, FileSizeLimitError."""
    data = bytearray()

    async def sink(piece: bytes) -> None:
        data.extend(piece)

    await sandbox.get(path, sink, max_bytes=MAX_FILE_BYTES)
    return bytes(data)


async def write_file(sandbox: Sandbox, path: str, data: bytes, *, new: bool = False) -> None:
    """Write a whole file. Raises SandboxFileError; PathExistsError if `new` and the path exists."""

    async def source() -> AsyncIterator[bytes]:
        yield data

    await sandbox.put(path, source(), new=new)


class StrReplaceEditor:
    """Views and edits files, and keeps their last versions for undo_edit."""

    name = "str_replace_editor"
    schema = SCHEMA

    def __init__(self, limits: ObservationLimits) -> None:
        self._limits = limits
        self._history = _EditHistory()

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        try:
            fields = _parse(arguments)
        except ToolInputError as error:
            return Observation(str(error))
        sandbox = await lease.sandbox()
        return Observation(await run_edit(self._dispatch(sandbox, fields, timeout_s), timeout_s))

    async def _dispatch(self, sandbox: Sandbox, fields: dict[str, Any], timeout_s: float) -> str:
        path = fields["path"]
        match fields["command"]:
            case "view":
                return await self._view(sandbox, path, fields.get("view_range"))
            case "create":
                return await self._create(sandbox, path, fields["file_text"].encode())
            case "str_replace":
                new = fields.get("new_str", "").encode()
                return await self._replace(sandbox, path, fields["old_str"].encode(), new)
            case "insert":
                text = fields["new_str"].encode()
                return await self._insert(sandbox, path, fields["insert_line"], text)
            case _:
                return await self._undo(sandbox, path, timeout_s)

    async def _view(self, sandbox: Sandbox, path: str, view_range: list[int] | None) -> str:
        try:
            data = await _read(sandbox, path)
        except NotARegularFileError:
            try:
                listing = await sandbox.list(path, max_depth=2)
            except NotARegularFileError as error:
                raise ToolInputError(_not_regular_message(path)) from error
            return view_directory(path, listing, self._limits)
        return view_file(path, data, view_range, self._limits)

    async def _create(self, sandbox: Sandbox, path: str, data: bytes) -> str:
        try:
            await self._write(sandbox, _Version(path, None), data)
        except PathExistsError as error:
            raise ToolInputError(
                f"Nothing was written: {printable(path)} exists, and create does not overwrite."
                " Use str_replace to edit it, or remove it with bash first."
            ) from error
        return f"Created {printable(path)} ({len(data)} bytes, {len(lines_of(data))} lines)."

    async def _replace(self, sandbox: Sandbox, path: str, old: bytes, new: bytes) -> str:
        before = await _read_to_edit(sandbox, path)
        edit = replace_once(before, old, new)
        await self._write(sandbox, _Version(path, before), edit.data)
        return f"Edited {printable(path)}. {view_edit(edit, self._limits)}"

    async def _insert(self, sandbox: Sandbox, path: str, line: int, text: bytes) -> str:
        before = await _read_to_edit(sandbox, path)
        edit = insert_after_line(before, line, text)
        await self._write(sandbox, _Version(path, before), edit.data)
        return f"Edited {printable(path)}. {view_edit(edit, self._limits)}"

    async def _undo(self, sandbox: Sandbox, path: str, timeout_s: float) -> str:
        version = self._history.last_version(path)
        if version is None:
            raise ToolInputError(
                f"Nothing was undone: no edit of {printable(path)} by this tool is remembered."
            )
        if version.data is None:
            await _remove(sandbox, path, timeout_s)
            done = f"{printable(path)}, which create had made, is removed."
        else:
            await write_file(sandbox, path, version.data)
            done = f"The last edit of {printable(path)} is undone."
        self._history.forget(version)
        return done

    async def _write(self, sandbox: Sandbox, before: _Version, data: bytes) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise ToolInputError(
                f"Nothing was written: {len(data)} bytes are more than this tool's"
                f" {MAX_FILE_BYTES}; use bash."
            )
        await write_file(sandbox, before.path, data, new=before.data is None)
        self._history.remember(before)


def _parse(arguments: object) -> dict[str, Any]:
    """Return the arguments with an absolute path. Raises ToolInputError if an argument that the
    command needs is missing, or if the path is invalid."""
    fields = parse_arguments(SCHEMA, arguments)
    command, path = fields["command"], fields["path"]
    missing = [name for name in _NEEDED_ARGUMENTS.get(command, ()) if name not in fields]
    if missing:
        raise ToolInputError(f"Nothing was done: {command} also needs {' and '.join(missing)}.")
    if not path or "\0" in path:
        raise ToolInputError("Nothing was done: path is empty or holds a NUL character.")
    return {**fields, "path": posixpath.normpath(posixpath.join(WORKING_DIR, path))}


async def _read(sandbox: Sandbox, path: str) -> bytes:
    """Return a file's bytes. Raises NotARegularFileError, and ToolInputError if the file is missing
    or too large."""
    try:
        return await read_file(sandbox, path)
    except FileMissingError as error:
        raise ToolInputError(await _missing_message(sandbox, path)) from error
    except FileSizeLimitError as error:
        raise ToolInputError(
            f"{printable(path)} is larger than this tool's {MAX_FILE_BYTES} bytes. Use bash, for"
            " instance grep -n, sed -n '1,50p' or head -c."
        ) from error


async def _read_to_edit(sandbox: Sandbox, path: str) -> bytes:
    try:
        return await _read(sandbox, path)
    except NotARegularFileError as error:
        try:
            await sandbox.list(path, max_entries=1, max_depth=1)
        except SandboxFileError:
            raise ToolInputError(_not_regular_message(path)) from error
        raise ToolInputError(f"Nothing was changed: {printable(path)} is a directory.") from error


async def _missing_message(sandbox: Sandbox, path: str) -> str:
    """Return the message that a path does not exist, with similar names in its directory."""
    parent, name = posixpath.split(path)
    try:
        listing = await sandbox.list(parent, max_depth=1)
    except SandboxFileError:
        return f"{printable(path)} does not exist, nor does the directory {printable(parent)}."
    names = [entry.path for entry in listing.entries if len(entry.path) <= _MAX_COMPARED_CHARS]
    near = difflib.get_close_matches(name[:_MAX_COMPARED_CHARS], names[:_MAX_COMPARED_NAMES], n=3)
    if not near:
        return f"{printable(path)} does not exist."
    found = ", ".join(printable(posixpath.join(parent, other)) for other in near)
    return f"{printable(path)} does not exist. There is {found}."


async def _remove(sandbox: Sandbox, path: str, timeout_s: float) -> None:
    result = await sandbox.exec(
        f"rm -- {shlex.quote(path)}", timeout_s=timeout_s, shell_state="none"
    )
    if result.exit_code != 0:
        raise ToolInputError(f"Nothing was undone: {printable(result.stderr.strip())}")


def _not_regular_message(path: str) -> str:
    return (
        f"{printable(path)} is a link or a special file, which this tool does not follow. If it is"
        f" a link, use its target's path: readlink -f {printable(shlex.quote(path))}"
    )
