"""The fake shell's programs for files, with the options that tests use."""

import errno
import re

from tests.fakes.memory_files import Device, Directory, FakeFile, Fifo, Link, Node
from tests.fakes.memory_machine import Io
from tests.fakes.memory_shell import Program, Shell
from tests.fakes.shell_syntax import UnsupportedShellError


def refuse(name: str, arguments: list[str]) -> UnsupportedShellError:
    return UnsupportedShellError(f"{name} {' '.join(arguments)}")


def options(name: str, arguments: list[str], known: str) -> tuple[set[str], list[str]]:
    """Return the one-letter options and the other arguments."""
    given: set[str] = set()
    while arguments and re.fullmatch("-[A-Za-z]+", arguments[0]):
        given |= set(arguments[0][1:])
        arguments = arguments[1:]
    if not given <= set(known):
        raise refuse(name, arguments)
    return given, arguments[1:] if arguments[:1] == ["--"] else arguments


async def _mkdir(shell: Shell, arguments: list[str], io: Io) -> int:
    given, names = options("mkdir", arguments, "p")
    for name in names:
        path = shell.path(name)
        if "p" in given:
            shell.files.make_directories(path)
        elif shell.files.find(path, follow=False):
            raise FileExistsError(errno.EEXIST, "File exists", name)
        else:
            shell.files.add(path, Directory())
    return 0


async def _rm(shell: Shell, arguments: list[str], io: Io) -> int:
    given, names = options("rm", arguments, "rf")
    for name in names:
        node = shell.files.find(shell.path(name), follow=False)
        if node is None and "f" not in given:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        if isinstance(node, Directory) and "r" not in given:
            raise IsADirectoryError(errno.EISDIR, "Is a directory", name)
        if node is not None:
            shell.files.remove(shell.path(name))
    return 0


async def _touch(shell: Shell, arguments: list[str], io: Io) -> int:
    for name in arguments:
        if shell.files.find(shell.path(name)) is None:
            shell.files.add(shell.path(name), FakeFile())
    return 0


async def _ls(shell: Shell, arguments: list[str], io: Io) -> int:
    given, names = options("ls", arguments, "A1")
    for name in names or ["."]:
        path = shell.path(name)
        node = shell.files.find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        found = [entry for entry in shell.files.below(path) if "/" not in entry]
        if not isinstance(node, Directory):
            found = [name]
        shown = [entry for entry in found if "A" in given or not entry.startswith(".")]
        await io.say("".join(f"{entry}\n" for entry in shown))
    return 0


async def _ln(shell: Shell, arguments: list[str], io: Io) -> int:
    given, names = options("ln", arguments, "s")
    if "s" not in given or len(names) != 2:
        raise refuse("ln", arguments)
    return _make(shell, names[1], Link(names[0]))


async def _mkfifo(shell: Shell, arguments: list[str], io: Io) -> int:
    return max(_make(shell, name, Fifo()) for name in arguments)


def _make(shell: Shell, name: str, node: Node) -> int:
    if shell.files.find(shell.path(name), follow=False):
        raise FileExistsError(errno.EEXIST, "File exists", name)
    shell.files.add(shell.path(name), node, follow=False)
    return 0


async def _chmod(shell: Shell, arguments: list[str], io: Io) -> int:
    for name in arguments[1:]:
        node = shell.files.find(shell.path(name))
        if not isinstance(node, FakeFile):
            raise refuse("chmod", arguments)
        node.mode = node.mode | 0o111 if arguments[0] == "+x" else int(arguments[0], 8)
    return 0


async def _test(shell: Shell, arguments: list[str], io: Io) -> int:
    if arguments[-1:] == ["]"]:
        arguments = arguments[:-1]
    if arguments[:1] == ["!"]:
        return int(await _test(shell, arguments[1:], io) == 0)
    if len(arguments) == 2:
        return int(not _is(shell, *arguments))
    if len(arguments) != 3:
        raise refuse("test", arguments)
    left, operator, right = arguments
    if operator in ("=", "!="):
        return int((left == right) != (operator == "="))
    order = (int(left) > int(right)) - (int(left) < int(right))
    holds = {"-eq": order == 0, "-ne": order != 0, "-lt": order < 0, "-gt": order > 0}
    return int(not {**holds, "-le": order <= 0, "-ge": order >= 0}[operator])


def _is(shell: Shell, operator: str, operand: str) -> bool:
    if operator in ("-n", "-z"):
        return bool(operand) == (operator == "-n")
    node = shell.files.find(shell.path(operand), follow=operator != "-L")
    kinds = {"-d": Directory, "-p": Fifo, "-L": Link, "-c": Device}
    if operator in kinds:
        return isinstance(node, kinds[operator])
    if operator in ("-f", "-s", "-x"):
        wanted = {"-f": True, "-s": isinstance(node, FakeFile) and bool(node.data)}
        executable = isinstance(node, FakeFile) and bool(node.mode & 0o111)
        return isinstance(node, FakeFile) and wanted.get(operator, executable)
    if operator != "-e":
        raise refuse("test", [operator, operand])
    return node is not None


FILE_PROGRAMS: dict[str, Program] = {
    "mkdir": _mkdir,
    "rm": _rm,
    "touch": _touch,
    "ls": _ls,
    "ln": _ln,
    "mkfifo": _mkfifo,
    "chmod": _chmod,
    "test": _test,
    "[": _test,
}
