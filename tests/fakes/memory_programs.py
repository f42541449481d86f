"""The builtins and programs of the fake shell, with the options that tests use."""

import errno
import posixpath
import re

from tests.fakes.memory_file_programs import FILE_PROGRAMS, options, refuse
from tests.fakes.memory_files import Directory, FakeFile
from tests.fakes.memory_machine import ExitShell, Io, ReturnFromFunction
from tests.fakes.memory_shell import Program, Shell

_CHUNK = 1 << 18
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_CHARACTERS = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b", "\\": "\\", '"': '"', "'": "'"}
_SIGNALS = {"-9": 9, "-KILL": 9, "-TERM": 15, "-15": 15, "-INT": 2, "-2": 2}


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
        raise refuse("exec", arguments)
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
        raise refuse("set", arguments)
    shell.errexit = arguments == ["-e"]
    return 0


async def _trap(shell: Shell, arguments: list[str], io: Io) -> int:
    if arguments[:1] != [""]:
        raise refuse("trap", arguments)
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
            raise refuse("kill", arguments)
        raise ExitShell(128 + signal)
    if process is shell.process:
        await process.die(signal)
    process.end(signal)
    return 0


async def _sh(shell: Shell, arguments: list[str], io: Io) -> int:
    if arguments[:1] == ["-c"]:
        return await shell.run_child(arguments[1], arguments[3:], io)
    if not arguments or arguments[0].startswith("-"):
        raise refuse("sh", arguments)
    node = shell.files.find(shell.path(arguments[0]))
    if not isinstance(node, FakeFile):
        await io.complain(f"sh: {arguments[0]}: cannot open")
        return 127
    return await shell.run_child(node.data.decode(), arguments[1:], io)


async def _cat(shell: Shell, arguments: list[str], io: Io) -> int:
    _, names = options("cat", arguments, "")
    for name in names or ["-"]:
        reader = io.stdin
        if name != "-":
            reader = await shell.files.reader(shell.path(name), shell.process.stir)
        while piece := await reader.read(_CHUNK):
            await io.stdout.write(piece)
        if reader is not io.stdin:
            reader.close()
    return 0


async def _read(shell: Shell, arguments: list[str], io: Io) -> int:
    given, names = options("read", arguments, "r")
    line, end = b"", b""
    while not end and (byte := await io.stdin.read(1)):
        line, end = (line, byte) if byte == b"\n" else (line + byte, end)
    if b"\\" in line and "r" not in given:
        raise refuse("read", [*arguments, repr(line)])
    rest = line.decode(errors="surrogateescape").strip(" \t")
    for name in names[:-1]:
        field, rest = [*re.split(r"[ \t]+", rest, maxsplit=1), ""][:2]
        shell.state.variables[name] = field
    shell.state.variables[names[-1] if names else "REPLY"] = rest
    return 0 if end else 1


async def _read_all(shell: Shell, names: list[str], io: Io) -> bytes:
    pieces = []
    readers = [await shell.files.reader(shell.path(name), shell.process.stir) for name in names]
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
        raise refuse("head", arguments)
    reader = io.stdin
    if names:
        reader = await shell.files.reader(shell.path(names[0]), shell.process.stir)
    while count > 0 and (piece := await reader.read(min(count, _CHUNK))):
        count -= len(piece)
        await io.stdout.write(piece)
    return 0


async def _tail(shell: Shell, arguments: list[str], io: Io) -> int:
    if arguments[0] != "-n":
        raise refuse("tail", arguments)
    data = await _read_all(shell, arguments[2:], io)
    await io.stdout.write(b"".join(data.splitlines(keepends=True)[-int(arguments[1]) :]))
    return 0


async def _wc(shell: Shell, arguments: list[str], io: Io) -> int:
    if len(arguments) != 1 or arguments[0] not in ("-c", "-l"):
        raise refuse("wc", arguments)
    count = 0
    while piece := await io.stdin.read(_CHUNK):
        count += len(piece) if arguments[0] == "-c" else piece.count(b"\n")
    await io.say(f"{count}\n")
    return 0


async def _tr(shell: Shell, arguments: list[str], io: Io) -> int:
    sets = [_ESCAPE.sub(_unescape, argument).encode() for argument in arguments]
    if len(sets) != 2 or len(sets[0]) != len(sets[1]):
        raise refuse("tr", arguments)
    table = bytes.maketrans(sets[0], sets[1])
    while piece := await io.stdin.read(_CHUNK):
        await io.stdout.write(piece.translate(table))
    return 0


async def _seq(shell: Shell, arguments: list[str], io: Io) -> int:
    first, last = (1, int(arguments[0])) if len(arguments) == 1 else map(int, arguments)
    for start in range(first, last + 1, 10_000):
        await io.say("".join(f"{n}\n" for n in range(start, min(start + 10_000, last + 1))))
    return 0


PROGRAMS: dict[str, Program] = {
    **FILE_PROGRAMS,
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
    "read": _read,
    "cat": _cat,
    "head": _head,
    "tail": _tail,
    "wc": _wc,
    "tr": _tr,
    "seq": _seq,
}
