"""The builtins and programs a fake shell has, with the options our tests use."""

import errno
import posixpath
import re

from tests.fakes.memory_files import Device, Directory, Fifo, File, Link, Node
from tests.fakes.memory_machine import ExitShell, Io, ReturnFromFunction
from tests.fakes.memory_shell import Program, Shell
from tests.fakes.shell_syntax import UnsupportedShellError

_CHUNK = 1 << 18
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_CHARACTERS = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b", "\\": "\\", '"': '"', "'": "'"}
_SIGNALS = {"-9": 9, "-KILL": 9, "-TERM": 15, "-15": 15, "-INT": 2, "-2": 2}


def _refuse(name: str, arguments: list[str]) -> UnsupportedShellError:
    return UnsupportedShellError(f"{name} {' '.join(arguments)}")


def _options(name: str, arguments: list[str], known: str) -> tuple[set[str], list[str]]:
    """One-letter options, and the rest."""
    given: set[str] = set()
    while arguments and re.fullmatch("-[A-Za-z]+", arguments[0]):
        given |= set(arguments[0][1:])
        arguments = arguments[1:]
    if not given <= set(known):
        raise _refuse(name, arguments)
    return given, arguments[1:] if arguments[:1] == ["--"] else arguments


def _unescape(found: re.Match[str]) -> str:
    if octal_or_hex := found[1] or found[2]:
        byte = int(octal_or_hex, 8 if found[1] else 16)
        return bytes([byte]).decode(errors="surrogateescape")
    return _CHARACTERS.get(found[3], found[0])


async def _true(shell: Shell, arguments: list[str], io: Io) -> int:
    return 0


async def _false(shell: Shell, arguments: list[str], io: Io) -> int:
    return 1


async def _echo(shell: Shell, arguments: list[str], io: Io) -> int:
    end = ""
    if arguments[:1] == ["-n"]:
        arguments = arguments[1:]
    else:
        end = "\n"
    await io.say(" ".join(arguments) + end)
    return 0


async def _printf(shell: Shell, arguments: list[str], io: Io) -> int:
    pattern, values = arguments[0], arguments[1:]
    pieces = re.split(r"(%[sd%])", pattern)
    while True:
        for piece in pieces:
            if piece in ("%s", "%d"):
                await io.say(values.pop(0) if values else "")
            else:
                await io.say("%" if piece == "%%" else _ESCAPE.sub(_unescape, piece))
        if not values or len(pieces) == 1:
            return 0


async def _exit(shell: Shell, arguments: list[str], io: Io) -> int:
    raise ExitShell(int(arguments[0]) & 255 if arguments else shell.status)


async def _return(shell: Shell, arguments: list[str], io: Io) -> int:
    raise ReturnFromFunction(int(arguments[0]) if arguments else shell.status)


async def _exec(shell: Shell, arguments: list[str], io: Io) -> int:
    if not arguments:
        raise _refuse("exec", arguments)
    raise ExitShell(await shell.call(arguments, io))


async def _cd(shell: Shell, arguments: list[str], io: Io) -> int:
    path = shell.path(arguments[0] if arguments else "/root")
    node = shell.files.find(path)
    if not isinstance(node, Directory):
        code, words = (errno.ENOTDIR, "Not a directory") if node else (errno.ENOENT, "No such file")
        raise OSError(code, words, path)
    shell.state.cwd = posixpath.normpath(path)
    return 0


async def _pwd(shell: Shell, arguments: list[str], io: Io) -> int:
    await io.say(shell.state.cwd + "\n")
    return 0


async def _export(shell: Shell, arguments: list[str], io: Io) -> int:
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals:
            shell.state.variables[name] = value
        shell.state.exported.add(name)
    return 0


async def _unset(shell: Shell, arguments: list[str], io: Io) -> int:
    for name in arguments:
        shell.state.variables.pop(name, None)
        shell.state.functions.pop(name, None)
        shell.state.exported.discard(name)
    return 0


async def _set(shell: Shell, arguments: list[str], io: Io) -> int:
    if arguments not in (["-e"], ["+e"]):
        raise _refuse("set", arguments)
    shell.errexit = arguments == ["-e"]
    return 0


async def _trap(shell: Shell, arguments: list[str], io: Io) -> int:
    if arguments[:1] != [""]:
        raise _refuse("trap", arguments)
    return 0  # the one signal there is cannot be ignored


async def _sleep(shell: Shell, arguments: list[str], io: Io) -> int:
    await shell.process.spend(float(arguments[0]))
    return 0


async def _kill(shell: Shell, arguments: list[str], io: Io) -> int:
    pid = int(arguments[-1])
    if pid not in shell.machine.living:
        await io.complain(f"bash: kill: ({pid}) - No such process")
        return 1
    if arguments[0] == "-0":
        return 0
    signal = 15 if len(arguments) == 1 else _SIGNALS[arguments[0]]
    process = shell.machine.living[pid]
    if process is None:
        if pid != shell.pid:
            raise _refuse("kill", arguments)
        raise ExitShell(128 + signal)
    if process is shell.process:
        await process.die(signal)
    process.end()
    return 0


async def _sh(shell: Shell, arguments: list[str], io: Io) -> int:
    if arguments[:1] == ["-c"]:
        return await shell.run_child(arguments[1], arguments[3:], io)
    if not arguments or arguments[0].startswith("-"):
        raise _refuse("sh", arguments)
    node = shell.files.find(shell.path(arguments[0]))
    if not isinstance(node, File):
        await io.complain(f"sh: {arguments[0]}: cannot open")
        return 127
    return await shell.run_child(node.data.decode(), arguments[1:], io)


async def _cat(shell: Shell, arguments: list[str], io: Io) -> int:
    _, names = _options("cat", arguments, "")
    for name in names or ["-"]:
        reader = io.stdin
        if name != "-":
            reader = await shell.files.reader(shell.path(name), shell.process.wait)
        while piece := await reader.read(_CHUNK):
            await io.stdout.write(piece)
        if reader is not io.stdin:
            reader.close()
    return 0


async def _read_all(shell: Shell, names: list[str], io: Io) -> bytes:
    pieces = []
    readers = [await shell.files.reader(shell.path(name), shell.process.wait) for name in names]
    for reader in readers or [io.stdin]:
        while piece := await reader.read(_CHUNK):
            pieces.append(piece)
    return b"".join(pieces)


async def _head(shell: Shell, arguments: list[str], io: Io) -> int:
    option, count, names = arguments[0], int(arguments[1]), arguments[2:]
    if option == "-n":
        lines = (await _read_all(shell, names, io)).split(b"\n")
        await io.stdout.write(b"\n".join(lines[:count] + ([b""] if len(lines) > count else [])))
        return 0
    if option != "-c" or len(names) > 1:
        raise _refuse("head", arguments)
    reader = io.stdin
    if names:
        reader = await shell.files.reader(shell.path(names[0]), shell.process.wait)
    while count > 0 and (piece := await reader.read(min(count, _CHUNK))):
        count -= len(piece)
        await io.stdout.write(piece)
    return 0


async def _tail(shell: Shell, arguments: list[str], io: Io) -> int:
    if arguments[0] != "-n":
        raise _refuse("tail", arguments)
    data = await _read_all(shell, arguments[2:], io)
    await io.stdout.write(b"".join(data.splitlines(keepends=True)[-int(arguments[1]) :]))
    return 0


async def _wc(shell: Shell, arguments: list[str], io: Io) -> int:
    if len(arguments) != 1 or arguments[0] not in ("-c", "-l"):
        raise _refuse("wc", arguments)
    count = 0
    while piece := await io.stdin.read(_CHUNK):
        count += len(piece) if arguments[0] == "-c" else piece.count(b"\n")
    await io.say(f"{count}\n")
    return 0


async def _tr(shell: Shell, arguments: list[str], io: Io) -> int:
    sets = [_ESCAPE.sub(_unescape, argument).encode() for argument in arguments]
    if len(sets) != 2 or len(sets[0]) != len(sets[1]):
        raise _refuse("tr", arguments)
    table = bytes.maketrans(sets[0], sets[1])
    while piece := await io.stdin.read(_CHUNK):
        await io.stdout.write(piece.translate(table))
    return 0


async def _seq(shell: Shell, arguments: list[str], io: Io) -> int:
    first, last = (1, int(arguments[0])) if len(arguments) == 1 else map(int, arguments)
    for start in range(first, last + 1, 10_000):
        await io.say("".join(f"{n}\n" for n in range(start, min(start + 10_000, last + 1))))
    return 0


async def _mkdir(shell: Shell, arguments: list[str], io: Io) -> int:
    options, names = _options("mkdir", arguments, "p")
    for name in names:
        path = shell.path(name)
        if "p" in options:
            shell.files.make_directories(path)
        elif shell.files.find(path, follow=False):
            raise FileExistsError(errno.EEXIST, "File exists", name)
        else:
            shell.files.add(path, Directory())
    return 0


async def _rm(shell: Shell, arguments: list[str], io: Io) -> int:
    options, names = _options("rm", arguments, "rf")
    for name in names:
        node = shell.files.find(shell.path(name), follow=False)
        if node is None and "f" not in options:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        if isinstance(node, Directory) and "r" not in options:
            raise IsADirectoryError(errno.EISDIR, "Is a directory", name)
        if node is not None:
            shell.files.remove(shell.path(name))
    return 0


async def _touch(shell: Shell, arguments: list[str], io: Io) -> int:
    for name in arguments:
        if shell.files.find(shell.path(name)) is None:
            shell.files.add(shell.path(name), File())
    return 0


async def _ls(shell: Shell, arguments: list[str], io: Io) -> int:
    options, names = _options("ls", arguments, "A1")
    for name in names or ["."]:
        path = shell.path(name)
        node = shell.files.find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        found = [entry for entry in shell.files.below(path) if "/" not in entry]
        if not isinstance(node, Directory):
            found = [name]
        shown = [entry for entry in found if "A" in options or not entry.startswith(".")]
        await io.say("".join(f"{entry}\n" for entry in shown))
    return 0


async def _ln(shell: Shell, arguments: list[str], io: Io) -> int:
    options, names = _options("ln", arguments, "s")
    if "s" not in options or len(names) != 2:
        raise _refuse("ln", arguments)
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
        if not isinstance(node, File):
            raise _refuse("chmod", arguments)
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
        raise _refuse("test", arguments)
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
        wanted = {"-f": True, "-s": isinstance(node, File) and bool(node.data)}
        executable = isinstance(node, File) and bool(node.mode & 0o111)
        return isinstance(node, File) and wanted.get(operator, executable)
    if operator != "-e":
        raise _refuse("test", [operator, operand])
    return node is not None


PROGRAMS: dict[str, Program] = {
    ":": _true,
    "true": _true,
    "false": _false,
    "echo": _echo,
    "printf": _printf,
    "exit": _exit,
    "return": _return,
    "exec": _exec,
    "cd": _cd,
    "pwd": _pwd,
    "export": _export,
    "unset": _unset,
    "set": _set,
    "trap": _trap,
    "sleep": _sleep,
    "kill": _kill,
    "sh": _sh,
    "bash": _sh,
    "cat": _cat,
    "head": _head,
    "tail": _tail,
    "wc": _wc,
    "tr": _tr,
    "seq": _seq,
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
