"""A shell in memory: runs the tree of a script."""

import asyncio
import copy
import posixpath
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tests.fakes.memory_files import (
    Bytes,
    ByteWriter,
    Discard,
    FakeFile,
    Pipe,
    PipeReader,
    PipeWriter,
    Reader,
)
from tests.fakes.memory_machine import (
    STEP_S,
    Collected,
    ExitShell,
    FakeProcess,
    FakeShellState,
    Io,
    ReturnFromFunction,
)
from tests.fakes.shell_syntax import (
    ASSIGNMENT,
    PIECE,
    AndOr,
    Command,
    For,
    Function,
    Group,
    If,
    Loop,
    Pipeline,
    Redirect,
    Sequence,
    ShellSyntaxError,
    Simple,
    UnsupportedShellError,
    parse,
    words_of,
)

_PARAMETER = re.compile(
    r"(?P<length>#)?(?P<name>[A-Za-z_]\w*|[?$!#@*0-9])(?:\[(?P<index>@|\d+)\])?(?::-(?P<default>.*))?",
    re.DOTALL,
)
_IN_QUOTES = re.compile(
    r"\\(?P<escaped>[$\"\\\n])|(?P<expansion>\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|\$[A-Za-z_]\w*"
    r"|\$[?$!#@*0-9])|(?P<unsupported>`|\$\(\()",
    re.DOTALL,
)
_PATTERN = re.compile(r"[*?~]|\{.*,|\[.+\]")


Program = Callable[["Shell", list[str], Io], Awaitable[int]]


class Shell:
    """One shell process."""

    def __init__(
        self, process: FakeProcess, state: FakeShellState, programs: dict[str, Program]
    ) -> None:
        self.process = process
        self.machine = process.machine
        self.files = process.machine.files
        self.state = state
        self.programs = programs
        self.pid, self.arguments = process.pid, list[str]()
        self.errexit = False
        self._may_fail = False
        self.status = 0
        self._substituted = 0
        self._job = ""
        self._stderr: ByteWriter = Discard()

    def fork(self) -> "Shell":
        child = copy.copy(self)
        child.state = self.state.copy()
        return child

    def path(self, path: str) -> str:
        return posixpath.join(self.state.cwd, path)

    async def run_script(self, script: str, io: Io) -> int:
        """Run a script to its end; return its exit code."""
        self._stderr = io.stderr
        try:
            tree = parse(script)
        except ShellSyntaxError as error:
            await io.complain(f"bash: {error}")
            return 2
        return await self._run_apart(tree, io)

    async def _run_apart(self, tree: Sequence | Command, io: Io) -> int:
        try:
            return await self.run(tree, io)
        except ExitShell as exit_shell:
            return exit_shell.status
        except ReturnFromFunction as returned:
            return returned.status

    async def run(self, tree: Sequence | Command, io: Io) -> int:
        match tree:
            case Sequence():
                self.status = await self._sequence(tree, io)
            case Simple():
                self.status = await self._simple(tree, io)
            case Group():
                self.status = await self._group(tree, io)
            case Function():
                self.state.functions[tree.name] = tree.body
                self.status = 0
            case For():
                await self._for(tree, io)
            case Loop():
                await self._loop(tree, io)
            case If():
                await self._if(tree, io)
        return self.status

    async def _for(self, tree: For, io: Io) -> None:
        self.status = 0
        for word in await self._words(tree.words):
            self.state.variables[tree.name] = word
            await self.run(tree.body, io)

    async def _loop(self, tree: Loop, io: Io) -> None:
        while (await self._condition(tree.condition, io) == 0) != tree.until:
            await self.run(tree.body, io)
        self.status = 0

    async def _if(self, tree: If, io: Io) -> None:
        if await self._condition(tree.condition, io) == 0:
            await self.run(tree.then, io)
        elif tree.otherwise is not None:
            await self.run(tree.otherwise, io)
        else:
            self.status = 0

    async def _condition(self, tree: Sequence, io: Io) -> int:
        with self._failing_allowed(True):
            return await self.run(tree, io)

    @contextmanager
    def _failing_allowed(self, allowed: bool) -> Iterator[None]:
        """If `allowed`, `set -e` ignores failures in the block, as in a condition."""
        before = self._may_fail
        self._may_fail = before or allowed
        try:
            yield
        finally:
            self._may_fail = before

    async def _sequence(self, tree: Sequence, io: Io) -> int:
        for and_or, background in tree.items:
            if background:
                self._start_job(and_or, io)
                self.status = 0
            else:
                await self._and_or(and_or, io)
        return self.status

    def _start_job(self, tree: AndOr, io: Io) -> None:
        job = FakeProcess(self.machine)
        child = self.fork()
        child.process = job
        self.process.jobs.append(job)
        self._job = str(job.pid)
        body = Sequence(((tree, False),))
        job.start(child._run_apart(body, replace(io, stdin=Bytes(b""))))

    async def _and_or(self, tree: AndOr, io: Io) -> None:
        self.status = await self._pipeline(tree.first, io, last=not tree.rest)
        for number, (operator, pipeline) in enumerate(tree.rest, 1):
            if (self.status == 0) == (operator == "&&"):
                self.status = await self._pipeline(pipeline, io, last=number == len(tree.rest))

    async def _pipeline(self, tree: Pipeline, io: Io, *, last: bool) -> int:
        """Run one pipeline; `set -e` applies only to the `last` one of a list of && and ||."""
        with self._failing_allowed(tree.negated or not last):
            if len(tree.parts) == 1:
                status = await self.run(tree.parts[0], io)
            else:
                status = await self._pipe(tree.parts, io)
            if status != 0 and self.errexit and not self._may_fail:
                raise ExitShell(status)
        return int(status == 0) if tree.negated else status

    async def _pipe(self, parts: tuple[Command, ...], io: Io) -> int:
        async with asyncio.TaskGroup() as group:
            stdin = io.stdin
            for part in parts[:-1]:
                pipe = Pipe()
                part_io = replace(io, stdin=stdin, stdout=PipeWriter(pipe, self.process.stir))
                group.create_task(self.fork()._pipe_part(part, part_io, io))
                stdin = PipeReader(pipe, self.process.stir)
            last = self.fork()._pipe_part(parts[-1], replace(io, stdin=stdin), io)
            task = group.create_task(last)
        return task.result()

    async def _pipe_part(self, tree: Command, io: Io, outer: Io) -> int:
        try:
            return await self._run_apart(tree, io)
        finally:
            if io.stdin is not outer.stdin:
                io.stdin.close()
            if io.stdout is not outer.stdout:
                io.stdout.close()

    async def _group(self, tree: Group, io: Io) -> int:
        async def body(inner: Io) -> int:
            if tree.subshell:
                return await self.fork()._run_apart(tree.body, inner)
            return await self.run(tree.body, inner)

        return await self._redirected(tree.redirects, io, body)

    async def _redirected(
        self, redirects: tuple[Redirect, ...], io: Io, body: Callable[[Io], Awaitable[int]]
    ) -> int:
        opened: list[Reader | ByteWriter] = []
        try:
            for redirect in redirects:
                io = await self._redirect(redirect, io, opened)
            return await body(io)
        except BrokenPipeError:
            return 128 + 13
        except OSError as error:
            await io.complain(f"bash: {error.filename}: {error.strerror}")
            return 1
        finally:
            for end in opened:
                end.close()

    async def _redirect(self, redirect: Redirect, io: Io, opened: list[Reader | ByteWriter]) -> Io:
        if redirect.operator == "<<":
            literal = redirect.literal
            text = redirect.target if literal else await self._interpolated(redirect.target)
            return replace(io, stdin=Bytes(text.encode(errors="surrogateescape")))
        target = " ".join(await self.expand(redirect.target))
        if redirect.operator == ">&":
            return io.with_output(redirect.fd, io.stderr if target == "2" else io.stdout)
        path = self.path(target)
        if redirect.operator == "<":
            reader = await self.files.reader(path, self.process.stir)
            opened.append(reader)
            return replace(io, stdin=reader)
        append = redirect.operator == ">>"
        writer = await self.files.writer(path, self.process.stir, append=append)
        opened.append(writer)
        return io.with_output(redirect.fd, writer)

    async def _simple(self, tree: Simple, io: Io) -> int:
        await self.process.spend(STEP_S)
        self._substituted = 0
        words = await self._words(tree.words)
        before = self.state.copy() if words and tree.assignments else None
        for assignment in tree.assignments:
            await self._assign(assignment, exported=bool(words))

        async def body(inner: Io) -> int:
            return await self.call(words, inner) if words else self._substituted

        status = await self._redirected(tree.redirects, io, body)
        if before is not None:
            self.state.variables, self.state.exported = before.variables, before.exported
        return status

    async def _assign(self, assignment: str, *, exported: bool) -> None:
        found = ASSIGNMENT.fullmatch(assignment)
        assert found is not None
        name, value = found.groups()
        if value.startswith("("):
            self.state.variables[name] = await self._words(words_of(value[1:-1]))
        else:
            self.state.variables[name] = " ".join(await self.expand(value, split=False))
        if exported:
            self.state.exported.add(name)

    async def call(self, words: list[str], io: Io) -> int:
        name, arguments = words[0], words[1:]
        if function := self.state.functions.get(name):
            return await self._call_function(function, arguments, io)
        if program := self.programs.get(name):
            try:
                return await program(self, arguments, io)
            except BrokenPipeError:
                return 128 + 13
            except OSError as error:
                await io.complain(f"{name}: {error.filename}: {error.strerror}")
                return 1
        node = self.files.find(self.path(name)) if "/" in name else None
        if isinstance(node, FakeFile) and node.mode & 0o111:
            return await self.run_child(node.data.decode(), arguments, io)
        problem = "Permission denied" if node else "command not found"
        await io.complain(f"bash: {name}: {problem}")
        return 126 if node else 127

    async def _call_function(self, function: Command, arguments: list[str], io: Io) -> int:
        outer, self.arguments = self.arguments, arguments
        try:
            return await self.run(function, io)
        except ReturnFromFunction as returned:
            return returned.status
        finally:
            self.arguments = outer

    async def run_child(self, script: str, arguments: list[str], io: Io) -> int:
        """Run a script in a new shell, which gets the exported variables only."""
        exported = self.state.exported
        variables = {k: v for k, v in self.state.variables.items() if k in exported}
        child = Shell(
            self.process, FakeShellState(self.state.cwd, variables, {*exported}), self.programs
        )
        child.arguments = arguments
        child.pid = self.machine.new_pid()
        self.machine.living[child.pid] = None
        try:
            return await child.run_script(script, io)
        finally:
            del self.machine.living[child.pid]

    async def _words(self, words: tuple[str, ...]) -> list[str]:
        return [field for word in words for field in await self.expand(word)]

    async def expand(self, word: str, *, split: bool = True) -> list[str]:
        """Return the fields that a word expands to."""
        fields: list[str] = []
        current: str | None = None
        for piece in PIECE.finditer(word):
            parts, breaks = await self._piece(piece, split)
            for number, part in enumerate(parts):
                if number > 0 and current is not None:
                    fields.append(current)
                    current = None
                if part or not breaks:
                    current = (current or "") + part
        return fields if current is None else [*fields, current]

    async def _piece(self, piece: re.Match[str], split: bool) -> tuple[list[str], bool]:
        """Return the expansion of one piece of a word, and True if its empty parts are dropped."""
        if (literal := piece["literal"]) is not None:
            if literal not in ("[", "]") and _PATTERN.search(literal):
                raise UnsupportedShellError(f"pattern {literal!r}")
            return [literal], False
        if (expansion := piece["expansion"]) is not None:
            value = await self._value(expansion)
            return (re.split(r"[ \t\n]+", value), True) if split else ([value], False)
        if (quoted := piece["double"]) is not None:
            if quoted == "$@":
                return self.arguments, False
            if array := re.fullmatch(r"\$\{(\w+)\[@\]\}", quoted):
                return self._elements(array[1]), False
            return [await self._interpolated(quoted)], False
        escaped = piece["escaped"]
        return [piece["single"] if escaped is None else escaped.replace("\n", "")], False

    async def _interpolated(self, text: str) -> str:
        parts, at = [], 0
        for found in _IN_QUOTES.finditer(text):
            if found["unsupported"] or text.startswith("$((", found.start()):
                raise UnsupportedShellError(text)
            parts.append(text[at : found.start()])
            if found["expansion"]:
                parts.append(await self._value(found["expansion"]))
            else:
                parts.append(found["escaped"].replace("\n", ""))
            at = found.end()
        return "".join([*parts, text[at:]])

    async def _value(self, expansion: str) -> str:
        if expansion.startswith("$("):
            output = Collected()
            io = Io(Bytes(b""), output, self._stderr)
            self._substituted = await self.fork().run_script(expansion[2:-1], io)
            return output.data.decode(errors="surrogateescape").rstrip("\n")
        found = _PARAMETER.fullmatch(expansion[1:].removeprefix("{").removesuffix("}"))
        if found is None:
            raise UnsupportedShellError(expansion)
        elements = self._elements(found["name"])
        if found["index"] and found["index"] != "@":
            elements = elements[int(found["index"]) :][:1]
        elif not found["index"]:
            elements = elements[:1]
        if found["length"]:
            return str(len(elements) if found["index"] == "@" else len("".join(elements)))
        return " ".join(elements) or found["default"] or ""

    def _elements(self, name: str) -> list[str]:
        special = {"?": str(self.status), "$": str(self.pid), "!": self._job}
        special |= {"#": str(len(self.arguments)), "0": "bash"}
        special |= {str(n): argument for n, argument in enumerate(self.arguments, 1)}
        if name in ("@", "*"):
            return [" ".join(self.arguments)]
        value = special.get(name, self.state.variables.get(name, []))
        return [value] if isinstance(value, str) else value
