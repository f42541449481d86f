"""The str_replace_editor tool.

Files are read and written through the sandbox's file operations, never through a shell, so any
path and any bytes are safe. An edit changes the bytes it names and no others.
"""

import asyncio
import difflib
import posixpath
import shlex
from typing import Any

from policies.observation import ObservationLimits, printable
from policies.workspace import WORKING_DIR
from sandbox_runtime.errors import (
    FileMissingError,
    FileThereError,
    FileTooLargeError,
    NotARegularFileError,
    SandboxFileError,
)
from sandbox_runtime.sandbox import Lease, OnOutput, Sandbox
from sandbox_runtime.tools.arguments import checked
from sandbox_runtime.tools.base import Mistake, Observation, ToolSchema
from sandbox_runtime.tools.contents import MAX_FILE_BYTES, read, write
from sandbox_runtime.tools.edits import insert_after, lines_of, replace_once
from sandbox_runtime.tools.undo import History, Version
from sandbox_runtime.tools.views import view_directory, view_edit, view_file

_COMMANDS = ["view", "create", "str_replace", "insert", "undo_edit"]
_NEEDED = {
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


class StrReplaceEditor:
    """Views and edits files, and remembers what to undo."""

    name = "str_replace_editor"
    schema = SCHEMA

    def __init__(self, limits: ObservationLimits) -> None:
        self._limits = limits
        self._history = History()

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        try:
            given = _checked(arguments)
            sandbox = await lease.sandbox()
            async with asyncio.timeout(timeout_s):
                return Observation(await self._do(sandbox, given, timeout_s))
        except Mistake as mistake:
            return Observation(str(mistake))
        except TimeoutError:
            return Observation(f"Stopped: it took more than {timeout_s:g} s.")
        except SandboxFileError as error:
            return Observation(f"Refused by the sandbox: {printable(str(error))}")

    async def _do(self, sandbox: Sandbox, given: dict[str, Any], timeout_s: float) -> str:
        path = given["path"]
        match given["command"]:
            case "view":
                return await self._view(sandbox, path, given.get("view_range"))
            case "create":
                return await self._create(sandbox, path, given["file_text"].encode())
            case "str_replace":
                new = given.get("new_str", "").encode()
                return await self._replace(sandbox, path, given["old_str"].encode(), new)
            case "insert":
                text = given["new_str"].encode()
                return await self._insert(sandbox, path, given["insert_line"], text)
            case _:
                return await self._undo(sandbox, path, timeout_s)

    async def _view(self, sandbox: Sandbox, path: str, view_range: list[int] | None) -> str:
        try:
            data = await _read(sandbox, path)
        except NotARegularFileError:
            try:
                listing = await sandbox.list(path, max_depth=2)
            except NotARegularFileError as error:
                raise Mistake(_link_or_special(path)) from error
            return view_directory(path, listing, self._limits)
        return view_file(path, data, view_range, self._limits)

    async def _create(self, sandbox: Sandbox, path: str, data: bytes) -> str:
        try:
            await self._write(sandbox, Version(path, None), data)
        except FileThereError as error:
            raise Mistake(
                f"Nothing was written: {printable(path)} exists, and create does not overwrite."
                " Use str_replace to edit it, or remove it with bash first."
            ) from error
        return f"Created {printable(path)} ({len(data)} bytes, {len(lines_of(data))} lines)."

    async def _replace(self, sandbox: Sandbox, path: str, old: bytes, new: bytes) -> str:
        before = await _read_to_edit(sandbox, path)
        edit = replace_once(before, old, new)
        await self._write(sandbox, Version(path, before), edit.data)
        return f"Edited {printable(path)}. {view_edit(edit, self._limits)}"

    async def _insert(self, sandbox: Sandbox, path: str, line: int, text: bytes) -> str:
        before = await _read_to_edit(sandbox, path)
        edit = insert_after(before, line, text)
        await self._write(sandbox, Version(path, before), edit.data)
        return f"Edited {printable(path)}. {view_edit(edit, self._limits)}"

    async def _undo(self, sandbox: Sandbox, path: str, timeout_s: float) -> str:
        version = self._history.last(path)
        if version is None:
            raise Mistake(
                f"Nothing was undone: no edit of {printable(path)} by this tool is remembered."
            )
        if version.data is None:
            await _remove(sandbox, path, timeout_s)
            done = f"{printable(path)}, which create had made, is removed."
        else:
            await write(sandbox, path, version.data)
            done = f"The last edit of {printable(path)} is undone."
        self._history.forget(version)
        return done

    async def _write(self, sandbox: Sandbox, before: Version, data: bytes) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise Mistake(
                f"Nothing was written: {len(data)} bytes are more than this tool's"
                f" {MAX_FILE_BYTES}; use bash."
            )
        await write(sandbox, before.path, data, new=before.data is None)
        self._history.remember(before)


def _checked(arguments: object) -> dict[str, Any]:
    """The arguments with all that their command needs and an absolute path. Raises Mistake."""
    given = checked(SCHEMA, arguments)
    command, path = given["command"], given["path"]
    missing = [name for name in _NEEDED.get(command, ()) if name not in given]
    if missing:
        raise Mistake(f"Nothing was done: {command} also needs {' and '.join(missing)}.")
    if not path or "\0" in path:
        raise Mistake("Nothing was done: path is empty or holds a NUL character.")
    return {**given, "path": posixpath.normpath(posixpath.join(WORKING_DIR, path))}


async def _read(sandbox: Sandbox, path: str) -> bytes:
    """A file's bytes. Raises Mistake if it is missing or too large, NotARegularFileError."""
    try:
        return await read(sandbox, path)
    except FileMissingError as error:
        raise Mistake(await _missing(sandbox, path)) from error
    except FileTooLargeError as error:
        raise Mistake(
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
            raise Mistake(_link_or_special(path)) from error
        raise Mistake(f"Nothing was changed: {printable(path)} is a directory.") from error


MAX_COMPARED_CHARS = 64
MAX_COMPARED_NAMES = 200


async def _missing(sandbox: Sandbox, path: str) -> str:
    """That nothing has that path, and what may have been meant."""
    parent, name = posixpath.split(path)
    try:
        listing = await sandbox.list(parent, max_depth=1)
    except SandboxFileError:
        return f"{printable(path)} does not exist, nor does the directory {printable(parent)}."
    names = [entry.path for entry in listing.entries if len(entry.path) <= MAX_COMPARED_CHARS]
    near = difflib.get_close_matches(name[:MAX_COMPARED_CHARS], names[:MAX_COMPARED_NAMES], n=3)
    if not near:
        return f"{printable(path)} does not exist."
    found = ", ".join(printable(posixpath.join(parent, other)) for other in near)
    return f"{printable(path)} does not exist. There is {found}."


async def _remove(sandbox: Sandbox, path: str, timeout_s: float) -> None:
    result = await sandbox.exec(
        f"rm -- {shlex.quote(path)}", timeout_s=timeout_s, shell_state="none"
    )
    if result.exit_code != 0:
        raise Mistake(f"Nothing was undone: {printable(result.stderr.strip())}")


def _link_or_special(path: str) -> str:
    return (
        f"{printable(path)} is a link or a special file, which this tool does not follow. If it is"
        f" a link, use its target's path: readlink -f {printable(shlex.quote(path))}"
    )
