"""Finds answers that a run wrote without a source: no command read a file or computed anything.

The prompts of the reference implementation forbid such answers. The flag is reported beside the
reward and does not change its value. In case of doubt, a command counts as reading or computing.
"""

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, pairwise, takewhile
from typing import NamedTuple

MAX_COMMANDS_CHARS = 500_000
"""Maximum number of characters in all commands of a run. A run with more is not checked, and not
flagged."""
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(?P<quote>['\"]?)(?P<tag>\w+)(?P=quote)")
_PYTHON_PROGRAM = re.compile(r"python[\d.]*")
_OPERATOR_CHARS = ";|&<>"
_OUTPUT_OPERATORS = frozenset((">", ">>", ">|", ">&", "&>", "&>>"))
_OUTPUT_NUMBER = re.compile(r"(?<!\S)\d(?=>)")
"""The number of the stream that an operator redirects, as in `2>&1`."""
_WRITING_PROGRAMS = frozenset(("echo", "printf", "cat", "tee"))
_NEUTRAL_PROGRAMS = frozenset(
    ("cd", "chmod", "clear", "date", "ls", "mkdir", "pwd", "sleep", "touch", "true")
)
"""Programs that neither show nor change the content of a file."""
_ANSWER_FILE = "answer.txt"
_ALLOWED_CALLS = frozenset(
    ("open", "print", "write", "write_text", "close", "Path", "str", "join", "makedirs")
)
_ALLOWED_MODULES = frozenset(("os", "pathlib", "sys"))
_ALLOWED_NODES = (
    *(ast.Module, ast.Expr, ast.Assign, ast.With, ast.withitem, ast.Import, ast.ImportFrom),
    *(ast.alias, ast.Call, ast.Attribute, ast.Name, ast.Constant, ast.keyword, ast.Load, ast.Store),
    *(ast.JoinedStr, ast.FormattedValue, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp, ast.USub),
)


def is_hardcoded(commands: Sequence[str]) -> bool:
    """Return True if commands wrote a constant, and none of them read a file or computed.

    A command is a shell command or a Python program. The result is False for no commands, as in a
    run without a sandbox.
    """
    if sum(map(len, commands)) > MAX_COMMANDS_CHARS:
        return False
    kinds = [_command_kind(command) for command in commands]
    return "constant" in kinds and "source" not in kinds


def _command_kind(command: str) -> str:
    """Return `source` for a command that reads or computes, `constant` for one that writes a
    constant, and `neutral` for any other."""
    heredocs, rest = _split_heredocs(command)
    if not heredocs and _is_program(command):
        return _program_kind(command)
    commands = list(_shell_commands(rest))
    if sum(words.count("<<") for words in commands) != len(heredocs):  # some are in quotes
        return "source"
    remaining = iter(heredocs)
    kinds = [
        _simple_command_kind(words, list(islice(remaining, words.count("<<"))))
        for words in commands
    ]
    return next((kind for kind in ("source", "constant") if kind in kinds), "neutral")


class _Heredoc(NamedTuple):
    """A here-document of a shell command."""

    body: str
    is_quoted: bool
    """True if the shell expands nothing in the body."""


def _split_heredocs(command: str) -> tuple[list[_Heredoc], str]:
    """Return the here-documents of a command, and its other lines. In the other lines, ` << `
    stands in place of each operator and its delimiter."""
    heredocs, rest = [], []
    lines = iter(command.split("\n"))
    for line in lines:
        for found in _HEREDOC.finditer(line):
            body = takewhile(partial(_is_body_line, found["tag"]), lines)
            heredocs.append(_Heredoc("\n".join(body), bool(found["quote"])))
        rest.append(_HEREDOC.sub(" << ", line))
    return heredocs, "\n".join(rest)


def _is_body_line(tag: str, line: str) -> bool:
    return line.strip() != tag


def _shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the words and the redirection operators of each simple command, or only the word `?` if
    the text cannot be parsed."""
    text = _OUTPUT_NUMBER.sub("", text).replace("\n", " ; ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATOR_CHARS)
    lexer.whitespace_split = True
    lexer.commenters = ""  # shlex would also end at a `#` within a word
    try:
        words = list(lexer)
    except ValueError:
        yield ["?"]
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if word and set(word) <= set(";|&"):
            if command:
                yield command
            command = []
        else:
            command.append(word)


def _simple_command_kind(words: Sequence[str], heredocs: Sequence[_Heredoc]) -> str:
    if heredocs and any(word.startswith("#") for word in words):
        return "source"  # the operator may be in a comment
    if words[0] in _NEUTRAL_PROGRAMS or words[0].startswith("#"):
        return "neutral"
    expanded = [*words, *(each.body for each in heredocs if not each.is_quoted)]
    if any("$" in text or "`" in text for text in expanded):
        return "source"
    operands = [word for word in _without_output_redirections(words) if word != "<<"]
    if not operands or any(map(_is_operator, operands)):
        return "source"
    program, *arguments = operands
    if _PYTHON_PROGRAM.fullmatch(program):
        return _python_kind(arguments, heredocs)
    if program == "cat":
        if not all(each == "-" or each.endswith(_ANSWER_FILE) for each in arguments):
            return "source"
        return "constant" if heredocs else "neutral"
    return "constant" if program in _WRITING_PROGRAMS else "source"


def _python_kind(arguments: Sequence[str], heredocs: Sequence[_Heredoc]) -> str:
    """Return the kind of the Python program that is an argument or a here-document."""
    if len(arguments) > 1 and arguments[0] == "-c":
        return _program_kind(arguments[1])
    if heredocs and set(arguments) <= {"-"}:
        return _program_kind(heredocs[-1].body)
    return "source"


def _without_output_redirections(words: Sequence[str]) -> list[str]:
    """Return the words of a command without the redirections of its output."""
    return [
        word for before, word in pairwise(["", *words]) if not _OUTPUT_OPERATORS & {before, word}
    ]


def _is_operator(word: str) -> bool:
    return bool(word) and set(word) <= set(_OPERATOR_CHARS)


def _is_program(text: str) -> bool:
    """Return True if a text is a Python program, such as a file that the editor wrote, and not a
    shell command."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(node, ast.Expr) or _is_call(node) for node in tree.body)


def _is_call(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Call)


def _program_kind(text: str) -> str:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "source"
    nodes = list(ast.walk(tree))
    if not all(isinstance(node, _ALLOWED_NODES) and _is_constant(node) for node in nodes):
        return "source"
    return "constant" if any(isinstance(node, ast.Call) for node in nodes) else "neutral"


def _is_constant(node: ast.AST) -> bool:
    """Return True if a node neither reads a file nor computes."""
    match node:
        case ast.Import(names=names):
            return all(name.name in _ALLOWED_MODULES for name in names)
        case ast.ImportFrom(module=module):
            return module in _ALLOWED_MODULES
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name in _ALLOWED_CALLS and (name != "open" or _is_opened_to_write(node))
        case ast.Call():
            return False
    return True


def _is_opened_to_write(call: ast.Call) -> bool:
    modes = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and str(mode.value)[:1] in "wax" for mode in modes)
