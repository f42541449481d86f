"""Which of the paper's three meta-capabilities a tool call uses.

A call is judged by what the model wrote, as in the paper, not by what came of it. Code counts where
it is written: run at once, given to an interpreter, or put into a file whose name says that it is
code; to run a program that was written before is a computation. What is only mentioned (in a
comment, a text that is printed, a path) does not count.
"""

from collections.abc import Callable, Mapping

from policies.capabilities.programs import Capability, Code, Use, code_in, together, use_of
from policies.capabilities.python import use_of_python
from policies.capabilities.shell import commands_in

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
        return _of_command(arguments)
    if tool == "str_replace_editor":
        return _of_edit(arguments)
    return frozenset()


def _of_command(arguments: Mapping[str, object]) -> frozenset[Capability]:
    command = arguments.get("command")
    if not isinstance(command, str) or arguments.get("job_id") is not None:
        return frozenset()  # input that is typed into a program is no code
    return _of_code((Code("shell", command[:MAX_CHARS]),))


def _of_edit(arguments: Mapping[str, object]) -> frozenset[Capability]:
    path = arguments.get("path")
    if arguments.get("command") not in _EDITS or not isinstance(path, str):
        return frozenset()
    texts = (arguments.get("file_text"), arguments.get("new_str"))
    written = "\n".join(text[:MAX_CHARS] for text in texts if isinstance(text, str))
    return _of_code(code_in(path, written[:MAX_CHARS])) | {Capability.FILE_MANAGEMENT}


def _of_code(code: tuple[Code, ...]) -> frozenset[Capability]:
    found = frozenset[Capability]()
    depth = 0
    while code and depth < _MAX_DEPTH:
        depth += 1
        use = together([_READERS[each.language](each.text) for each in code])
        found |= use.capabilities
        code = use.code
    return found


def _of_shell(text: str) -> Use:
    return together([use_of(command) for command in dict.fromkeys(commands_in(text))])


_READERS: Mapping[str, Callable[[str], Use]] = {"shell": _of_shell, "python": use_of_python}
