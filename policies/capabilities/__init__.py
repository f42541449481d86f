"""Which of the paper's three meta-capabilities a tool call uses.

A call is judged by what the model wrote, as in the paper, not by what came of it. Code counts where
it is written: run at once, given to an interpreter, or put into a file whose name says that it is
code; to run a program that was written before is a computation. What is only mentioned (in a
comment, a text that is printed, a path) does not count.
"""

from collections.abc import Callable, Mapping

from policies.capabilities.programs import (
    Capability,
    CapabilityUse,
    CodeFragment,
    code_of_file,
    merge_uses,
    use_of_command,
)
from policies.capabilities.python import use_of_python
from policies.capabilities.shell import parse_commands

__all__ = ["Capability", "capabilities_of"]

MAX_CHARS = 4096
"""So much of a call is read."""
_MAX_DEPTH = 4
"""How deep code in code is read: a shell's command in Python in a shell."""
_EDITS = frozenset({"view", "create", "str_replace", "insert", "undo_edit"})


def capabilities_of(tool: str, arguments: object) -> frozenset[Capability]:
    """Return what a call of one of our tools uses; nothing for other tools and malformed calls."""
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
        return frozenset()  # input that is typed into a program is no code
    return _read_code((CodeFragment("shell", command[:MAX_CHARS]),))


def _capabilities_of_edit(arguments: Mapping[str, object]) -> frozenset[Capability]:
    path = arguments.get("path")
    if arguments.get("command") not in _EDITS or not isinstance(path, str):
        return frozenset()
    texts = (arguments.get("file_text"), arguments.get("new_str"))
    written = "\n".join(text[:MAX_CHARS] for text in texts if isinstance(text, str))
    return _read_code(code_of_file(path, written[:MAX_CHARS])) | {Capability.FILE_MANAGEMENT}


def _read_code(code: tuple[CodeFragment, ...]) -> frozenset[Capability]:
    found = frozenset[Capability]()
    depth = 0
    while code and depth < _MAX_DEPTH:
        depth += 1
        use = merge_uses([_READERS[each.language](each.text) for each in code])
        found |= use.capabilities
        code = use.nested_code
    return found


def _use_of_shell(text: str) -> CapabilityUse:
    return merge_uses([use_of_command(command) for command in dict.fromkeys(parse_commands(text))])


_READERS: Mapping[str, Callable[[str], CapabilityUse]] = {
    "shell": _use_of_shell,
    "python": use_of_python,
}
