"""The str_replace_editor tool of the reference agent.

Its texts and edits are those of the reference agent, except that a path is quoted for the shell.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies import reference_style
from policies.reference_style import tool_observation
from policies.workspace import WORKING_DIR
from sandbox_runtime.sandbox import ExecResult, Lease, OnOutput, Sandbox
from sandbox_runtime.tools.base import (
    Observation,
    ToolInputError,
    ToolSchema,
    parse_known_arguments,
)
from sandbox_runtime.tools.editor import MAX_FILE_BYTES, read_file, run_edit, write_file

_COMMANDS = ["view", "create", "str_replace", "insert"]
_MAX_LISTED_NAMES = 100
SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "str_replace_editor",
        "description": (
            "View, create and edit files. What it writes stays.\n"
            "view: a Python or reStructuredText file with line numbers, or the directories and such"
            " files two levels deep; hidden ones are left out.\n"
            "create: a file with file_text, in the place of the one that is there.\n"
            "str_replace: new_str for old_str, which must occur exactly once, to the space.\n"
            "insert: new_str after line insert_line.\n"
            "Of a long result only the first part is shown."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "command": {
                    "description": "What to do: view, create, str_replace or insert.",
                    "enum": _COMMANDS,
                    "type": "string",
                },
                "path": {
                    "description": f"A file or directory, absolute, such as {WORKING_DIR}/main.py.",
                    "type": "string",
                },
                "file_text": {"description": "create: the file's text.", "type": "string"},
                "old_str": {"description": "str_replace: the text to replace.", "type": "string"},
                "new_str": {
                    "description": "str_replace: the text in its place, none to delete. insert: the"
                    " text to put in.",
                    "type": "string",
                },
                "insert_line": {
                    "description": "insert: the line after which it goes; 0 for the start.",
                    "type": "integer",
                },
                "view_range": {
                    "description": "view: the first and the last line, such as [5, 9]; -1 as the"
                    " last for the end.",
                    "type": "array",
                    "items": {"type": "integer"},
                },
            },
            "required": ["command", "path"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class _ResolvedPath:
    """A path that was resolved in the sandbox."""

    kind: str
    """The kind of the entry at the path: dir, file or none."""
    path: str
    """The absolute path without links, `.` and `..`."""


class ReferenceEditor:
    """Views and edits files as the reference agent does."""

    name = "str_replace_editor"

    def __init__(self, schema: ToolSchema = SCHEMA) -> None:
        self.schema = schema

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        if not isinstance(arguments, Mapping):
            return Observation(tool_observation(self.name, ""))
        try:
            edit = _EditorCall(lease, _parse(arguments), timeout_s)
        except ToolInputError as error:
            text = str(error)
        else:
            text = await run_edit(edit.run(), timeout_s)
        return Observation(tool_observation(self.name, text))


class _EditorCall:
    """One call of the editor."""

    def __init__(self, lease: Lease, arguments: Mapping[str, Any], timeout_s: float) -> None:
        self._lease = lease
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._path: str = arguments.get("path", "")
        # find, mkdir and realpath would take a leading dash for an option.
        self._quoted_path = shlex.quote(f"./{self._path}" if self._path[:1] == "-" else self._path)

    async def run(self) -> str:
        command = self._arguments.get("command", "")
        if not command or not self._path:
            return reference_style.NEEDS_COMMAND_AND_PATH
        if command not in _COMMANDS:
            return f"Unknown command: {command}"
        sandbox = await self._lease.sandbox()
        match command:
            case "view":
                return await self._view(sandbox)
            case "create":
                return await self._create(sandbox)
            case _:
                return await self._edit(sandbox, command)

    async def _view(self, sandbox: Sandbox) -> str:
        target = await self._resolve(sandbox)
        if target.kind == "none":
            return reference_style.not_found_observation(self._path)
        if target.kind == "dir":
            found = await self._shell(
                sandbox,
                f"find {self._quoted_path} -maxdepth 2 -not -path '*/.*'"
                f" \\( -type d -o -name '*.py' -o -name '*.rst' \\) | head -{_MAX_LISTED_NAMES}",
            )
            return reference_style.directory_observation(self._path, found.stdout + found.stderr)
        if not self._path.endswith((".py", ".rst")):
            return reference_style.not_viewable_observation(self._path)
        content = await _read_content(sandbox, target)
        return _replace_surrogates(
            reference_style.file_observation(self._path, content, self._arguments.get("view_range"))
        )

    async def _create(self, sandbox: Sandbox) -> str:
        creation = await self._shell(sandbox, f'mkdir -p "$(dirname {self._quoted_path})"')
        target = await self._resolve(sandbox)
        refusal = creation.stdout + creation.stderr if creation.exit_code else ""
        if target.kind == "dir":
            refusal = f"bash: line 1: {self._path}: Is a directory\n"
        if refusal:
            return f"Error creating file: {refusal}"
        return await _write(
            sandbox,
            target,
            reference_style.file_creation_result(self._path, self._arguments.get("file_text", "")),
        )

    async def _edit(self, sandbox: Sandbox, command: str) -> str:
        target = await self._resolve(sandbox)
        content = await _read_content(sandbox, target) if target.kind == "file" else None
        new = self._arguments.get("new_str", "")
        if command == "insert":
            line = self._arguments.get("insert_line", 0)
            edited = reference_style.insert_text(self._path, content, line, new)
        else:
            edited = reference_style.replace_text(
                self._path, content, self._arguments.get("old_str", ""), new
            )
        return edited if isinstance(edited, str) else await _write(sandbox, target, edited)

    async def _resolve(self, sandbox: Sandbox) -> _ResolvedPath:
        """Resolve the path, because the sandbox's own file operations follow no link."""
        found = await self._shell(
            sandbox,
            f'p={self._quoted_path}; if test -d "$p"; then echo dir;'
            ' elif test -f "$p"; then echo file; else echo none; fi; realpath -m "$p"',
        )
        kind, _, path = found.stdout.partition("\n")
        return _ResolvedPath(kind, path.removesuffix("\n"))

    async def _shell(self, sandbox: Sandbox, script: str) -> ExecResult:
        return await sandbox.exec(
            script, timeout_s=self._timeout_s, cwd=WORKING_DIR, shell_state="none"
        )


def _parse(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in the types of the schema. Raises ToolInputError."""
    text = arguments.get("file_text")
    fields = dict(arguments) if text is None else {**arguments, "file_text": str(text)}
    fitted = parse_known_arguments(SCHEMA, fields)
    if "\0" in fitted.get("path", ""):
        raise ToolInputError("Nothing was done: path holds a NUL character.")
    return fitted


async def _read_content(sandbox: Sandbox, target: _ResolvedPath) -> str:
    """Return a file's text. Bytes that are not UTF-8 are surrogate escapes."""
    data = await read_file(sandbox, target.path)
    return data.decode(errors="surrogateescape")


async def _write(
    sandbox: Sandbox, target: _ResolvedPath, edited: reference_style.EditResult
) -> str:
    data = edited.text.encode(errors="surrogateescape")
    if len(data) > MAX_FILE_BYTES:
        raise ToolInputError(
            f"Nothing was written: it is more than {MAX_FILE_BYTES} bytes; use bash."
        )
    await write_file(sandbox, target.path, data)
    return _replace_surrogates(edited.observation)


def _replace_surrogates(text: str) -> str:
    return text.encode(errors="surrogateescape").decode(errors="replace")
