"""Classifies tool calls by the three meta-capabilities of the paper LLM-in-Sandbox.

As in the paper, a call is classified by its arguments, not by its result. Code that a call contains
counts whether the call runs the code, pipes it to an interpreter, or writes it to a file with the
extension of a script. Running an existing script counts as computation. A program or library
does not count if only a comment, a printed text or a path mentions it.
"""

from collections.abc import Callable, Mapping

from policies.capabilities.programs import (
    Capability,
    CapabilityUse,
    CodeFragment,
    analyse_command,
    code_of_file,
    merge_uses,
)
from policies.capabilities.python import analyse_python
from policies.capabilities.shell import parse_commands

__all__ = ["Capability", "capabilities_of"]

MAX_CHARS = 4096
"""Maximum length of the part of a call that is analysed."""
_MAX_DEPTH = 4
"""Maximum depth of nested code, such as a shell command in Python in a shell command."""
_EDIT_COMMANDS = frozenset({"view", "create", "str_replace", "insert", "undo_edit"})


def capabilities_of(tool: str, arguments: object) -> frozenset[Capability]:
    """Return the capabilities that a call of a sandbox tool uses; none for other tools and for
    malformed calls."""
    if not isinstance(arguments, Mapping):
        return frozenset()
    if tool == "execute_bash":
        return _capabilities_of_command(arguments)
    if tool == "str_replace_editor":
        return _capabilities_of_edit(arguments)
    return frozenset()


def _capabilities_of_command(arguments: Mapping[str, object]) -> frozenset[Capability]:
    command = arguments.get("command")
    if not isinstance(command, str) or arguments.get("job_id") is not None:
        return frozenset()  # input for a running job is not code
    return _capabilities_of_code((CodeFragment("shell", command[:MAX_CHARS]),))


def _capabilities_of_edit(arguments: Mapping[str, object]) -> frozenset[Capability]:
    path = arguments.get("path")
    if arguments.get("command") not in _EDIT_COMMANDS or not isinstance(path, str):
        return frozenset()
    texts = (arguments.get("file_text"), arguments.get("new_str"))
    written = "\n".join(text[:MAX_CHARS] for text in texts if isinstance(text, str))
    return _capabilities_of_code(code_of_file(path, written[:MAX_CHARS])) | {
        Capability.FILE_MANAGEMENT
    }


def _capabilities_of_code(code: tuple[CodeFragment, ...]) -> frozenset[Capability]:
    found = frozenset[Capability]()
    depth = 0
    while code and depth < _MAX_DEPTH:
        depth += 1
        use = merge_uses([_USE_OF_LANGUAGE[fragment.language](fragment.text) for fragment in code])
        found |= use.capabilities
        code = use.nested_code
    return found


def _analyse_shell(text: str) -> CapabilityUse:
    return merge_uses([analyse_command(command) for command in dict.fromkeys(parse_commands(text))])


_USE_OF_LANGUAGE: Mapping[str, Callable[[str], CapabilityUse]] = {
    "shell": _analyse_shell,
    "python": analyse_python,
}
