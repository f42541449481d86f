"""What a command is for: by the program it runs, and by what that is given."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.capabilities import program_names as names
from policies.capabilities.kinds import (
    COMPUTATION,
    EXTERNAL,
    FILES,
    NOTHING,
    Code,
    Language,
    Use,
    code_in,
    together,
)
from policies.capabilities.shell import SUM, Command

_PYTHONS = frozenset({"python", "pypy", "ipython", ""})
_ASSIGNMENT = re.compile(r"\w+\+?=")


def use_of(command: Command) -> Use:
    """What a command uses."""
    found = [_redirections(command)]
    words, gets_words = _program(command.words)
    if words:
        found.append(_use(_Invocation(_plain_name(words[0]), words, command, gets_words)))
    return together(found)


@dataclass(frozen=True, slots=True)
class _Invocation:
    """A program and what it is given."""

    name: str
    words: Sequence[str]
    command: Command
    gets_words: bool
    """Whether something before it (xargs) gives it more."""

    @property
    def args(self) -> Sequence[str]:
        return self.words[1:]

    def operands(self, valued: frozenset[str] = frozenset()) -> list[str]:
        """Its arguments without options and their values."""
        found = []
        is_value = False
        for word in self.args:
            if is_value:
                is_value = False
            elif len(word) > 1 and word.startswith("-"):
                is_value = word in valued
            else:
                found.append(word)
        return found


# Before the program


def _program(words: Sequence[str]) -> tuple[Sequence[str], bool]:
    """The words from the program on, and whether what stands before it gives it more of them."""
    at, gets_words = 0, False
    while at < len(words):
        word, following = words[at].rpartition("/")[2], words[at + 1 : at + 2]
        if word in names.RESERVED or _ASSIGNMENT.match(words[at]):
            at += 1
        elif word == "command" and "-v" in following:
            break  # it only looks for one
        elif word in names.RUNNERS and "run" in following:
            at = _past(words, at + 2, names.RUNNERS[word], 0)
        elif word in names.WRAPPERS:
            gets_words = gets_words or word in names.GIVE_WORDS
            at = _past(words, at + 1, names.WRAPPERS[word], word == "timeout")
        else:
            break
    return words[at:], gets_words


def _past(words: Sequence[str], at: int, valued: frozenset[str], operands: int) -> int:
    """The place after a wrapper's own options and operands."""
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in valued else 1
    return at + operands


def _plain_name(word: str) -> str:
    """A program's name without its place and the version in it."""
    name = word.rpartition("/")[2]
    versioned = names.VERSIONED.fullmatch(name)
    return name.rstrip("0123456789.") if versioned else name


# The program


def _use(run: _Invocation) -> Use:
    if run.args and all(word in names.PROBES for word in run.args):
        return NOTHING
    if run.name in _PYTHONS:
        return _python(run)
    if run.name in names.SHELLS:
        return _shell(run)
    if run.name == "eval":
        return Use(code=(Code("shell", " ".join(run.args)),))
    if run.name in names.FILTERS:
        return _filter(run, names.FILTERS[run.name])
    if run.name in names.SCRIPTED and run.args and run.args[0].startswith(names.LINE_BY_LINE):
        return _filter(run, names.Filter(1))
    return _by_name(run)


def _by_name(run: _Invocation) -> Use:
    if run.name in names.FETCHERS:
        return _fetcher(run)
    if part := _part(run):
        return part
    if run.name in names.FILE_PROGRAMS:
        return FILES
    if run.name in names.COMPUTERS or run.words[0] == SUM:
        is_install = any("install.packages" in word for word in run.args)
        return together([COMPUTATION, EXTERNAL] if is_install else [COMPUTATION])
    if "/" in run.words[0] and not run.words[0].startswith(names.OF_THE_SYSTEM):
        return COMPUTATION  # a program that was written or built here
    return NOTHING


def _part(run: _Invocation) -> Use | None:
    """What is used by the part of a program that is meant, such as `install`."""
    fetching = names.FETCHING_PARTS.get(run.name, frozenset())
    computing = names.COMPUTING_PARTS.get(run.name, frozenset())
    if not fetching and not computing:
        return None
    operands = run.operands(names.VALUED.get(run.name, frozenset()))
    meant = next((word for word in operands if word not in names.GROUPS), "")
    if meant in fetching or not fetching.isdisjoint(run.args[:1]):
        return EXTERNAL
    return COMPUTATION if meant in computing else None


def _fetcher(run: _Invocation) -> Use:
    places = run.operands(names.VALUED.get(run.name, frozenset()))
    is_far = run.gets_words or any(not names.LOCAL.match(place) for place in places)
    return EXTERNAL if is_far else NOTHING


def _filter(run: _Invocation, known: names.Filter) -> Use:
    operands = run.operands(known.valued)
    has_script = any(word in known.script for word in run.args)
    leading = 0 if has_script else known.leading
    has_files = run.gets_words or len(operands) > leading
    if known.searches_tree:
        has_files = has_files or any(map(names.RECURSIVE.fullmatch, run.args))
    if run.name in names.TREE_SEARCHERS:
        has_files = has_files or not run.command.is_fed
    used = [FILES] if has_files else []
    if run.name.endswith("awk") and operands and names.AWK_SUM.search(operands[0]):
        used.append(COMPUTATION)
    return together(used)


# Code that it is given


def _python(run: _Invocation) -> Use:
    args, at = run.args, 0
    while at < len(args) and args[at].startswith("-") and args[at] != "-":
        option = args[at]
        if option.startswith("-c") and len(option) > 2:
            return Use(code=(Code("python", option[2:]),))
        if not option.startswith("--") and option.endswith("c"):
            return Use(code=(Code("python", "".join(args[at + 1 : at + 2])),))
        if not option.startswith("--") and option.endswith("m"):
            return _module(run, args[at + 1 :])
        at += 2 if option in ("-W", "-X") else 1
    if at < len(args) and args[at] not in ("-", "/dev/stdin"):
        return COMPUTATION  # a script that was written before
    return _from_input(run.command, "python")


def _module(run: _Invocation, words: Sequence[str]) -> Use:
    name = _plain_name("".join(words[:1]))
    return NOTHING if name in _PYTHONS else _use(replace(run, name=name, words=words))


def _shell(run: _Invocation) -> Use:
    for at, word in enumerate(run.args):
        if not word.startswith("-"):
            return COMPUTATION if word != "/dev/stdin" else _from_input(run.command, "shell")
        if word.endswith("c") and not word.startswith("--"):
            return Use(code=(Code("shell", "".join(run.args[at + 1 : at + 2])),))
    return _from_input(run.command, "shell")


def _from_input(command: Command, language: Language) -> Use:
    """What an interpreter reads that is given no script."""
    if command.given:
        return Use(code=(Code(language, command.given),))
    return COMPUTATION if command.reads else NOTHING


# Files beside it


def _redirections(command: Command) -> Use:
    """The files it reads and writes, and the code that it writes into them."""
    written = [path for path in command.writes if not path.startswith("/dev/")]
    if command.words[:1] == ("tee",):
        written += command.words[1:]
    text = command.given or command.said
    code = {each.language: each for path in written for each in code_in(path, text)}
    used = FILES if written or command.reads else NOTHING
    return Use(used.capabilities, tuple(code.values()))
