"""Finds the meta-capabilities that a shell command uses, by its program and its arguments."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from policies.capabilities.shell import ARITHMETIC, Command

Language = Literal["shell", "python"]


class Capability(StrEnum):
    """A meta-capability that a sandbox gives a model (section 4 of the paper LLM-in-Sandbox)."""

    EXTERNAL_RESOURCES = "external_resources"
    """Downloads of packages, web pages, data and repositories."""
    FILE_MANAGEMENT = "file_management"
    """Files are searched, read, written or moved."""
    COMPUTATION = "computation"
    """Numbers are computed, or a program that computes is run."""


@dataclass(frozen=True, slots=True)
class CodeFragment:
    """A piece of code in one language. It may come from inside another piece of code."""

    language: Language
    text: str


@dataclass(frozen=True, slots=True)
class CapabilityUse:
    """The capabilities that a piece of code uses by itself, and the nested code in it that is not
    analysed yet."""

    capabilities: frozenset[Capability] = frozenset()
    nested_code: tuple[CodeFragment, ...] = ()


NOTHING = CapabilityUse()
EXTERNAL = CapabilityUse(frozenset({Capability.EXTERNAL_RESOURCES}))
FILES = CapabilityUse(frozenset({Capability.FILE_MANAGEMENT}))
COMPUTATION = CapabilityUse(frozenset({Capability.COMPUTATION}))


def merge_uses(uses: list[CapabilityUse]) -> CapabilityUse:
    """Merge the results for several pieces of code: the union of their capabilities, and all their
    nested code."""
    if len(uses) == 1:
        return uses[0]
    capabilities = frozenset[Capability]().union(*(use.capabilities for use in uses))
    return CapabilityUse(capabilities, tuple(code for use in uses for code in use.nested_code))


def code_of_file(path: str, text: str) -> tuple[CodeFragment, ...]:
    """Return the text of a file as code if the file has the extension of a script, else an empty
    tuple."""
    if not text:
        return ()
    if path.endswith(".py"):
        return (CodeFragment("python", text),)
    return (CodeFragment("shell", text),) if path.endswith((".sh", ".bash")) else ()


# Programs by name


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


_FETCHING_PROGRAMS = word_set("""
    curl wget aria2c http https xh ftp sftp scp ssh telnet nc ncat netcat ping dig nslookup host
    whois traceroute yt-dlp youtube-dl gdown lynx w3m links npx pnpx uvx gh hf huggingface-cli
    aws gsutil gcloud kaggle s3cmd rclone
""")
_FILE_PROGRAMS = word_set("""
    ls dir find fd fdfind tree du stat file cp mv rm rmdir mkdir touch ln chmod chown tar zip unzip
    zipinfo gzip gunzip bzip2 bunzip2 xz unxz zstd 7z unrar rename split csplit truncate shred dd
    rsync patch diff cmp comm md5sum sha1sum sha256sum b2sum cksum strings xxd hexdump od readlink
    realpath mktemp locate install iconv dos2unix
    pdftotext pdfinfo pdftoppm pdfimages pdfgrep qpdf mutool pandoc libreoffice soffice antiword
    docx2txt catdoc odt2txt unrtf html2text tesseract exiftool convert magick identify mogrify
    ffmpeg ffprobe sox fluidsynth timidity lame sqlite3 in2csv csvcut csvgrep csvlook csvstat
    csvsql vi vim nano ed pdflatex xelatex latex dot
""")
_COMPUTING_PROGRAMS = word_set("""
    bc dc factor expr let octave maxima gp sage julia R Rscript matlab qalc units gnuplot
    gcc g++ cc c++ clang clang++ tcc gfortran rustc ghc javac java nasm ld make cmake ninja
    node deno bun ruby perl lua php ghci runghc ocaml swipl sbcl
    pytest unittest timeit jupyter papermill ipython z3 minizinc glpsol cbc scip lp_solve minisat
    obabel xtb psi4 mopac gmx blastn blastp blastx makeblastdb clustalo muscle mafft samtools
    bedtools
""")
_FETCHING_SUBCOMMANDS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        ("pip", "conda", "mamba", "micromamba", "uv", "pipx", "poetry", "pipenv", "pdm"),
        word_set("install download wheel create update upgrade add sync search"),
    ),
    **dict.fromkeys(
        ("apt", "apt-get", "aptitude", "dnf", "yum", "apk", "brew", "pacman", "zypper", "snap"),
        word_set(
            "install update upgrade dist-upgrade full-upgrade add source build-dep -S -Sy -Syu"
        ),
    ),
    **dict.fromkeys(("npm", "yarn", "pnpm"), word_set("install i ci add update upgrade view info")),
    **dict.fromkeys(("gem", "cargo", "go", "luarocks", "cpan"), word_set("install add get update")),
    "git": word_set("clone pull fetch push ls-remote submodule"),
    "docker": word_set("pull push"),
    "svn": word_set("checkout co update"),
}
_COMPUTING_SUBCOMMANDS = {
    **dict.fromkeys(("go", "cargo"), word_set("run build test bench")),
    **dict.fromkeys(("npm", "yarn", "pnpm", "bun"), word_set("run test start")),
}
_SUBCOMMAND_GROUPS = word_set("pip tool env global")
"""Words between a program and its subcommand, such as `pip` in `uv pip install`."""
_OPTIONS_WITH_VALUE = {
    "git": word_set("-C -c"),
    "curl": word_set("-o -H -d -X -A -u"),
    "wget": word_set("-O -o -P"),
}
_LOCAL_HOST = re.compile(r"(?:\w+://)?(?:localhost|127\.\d+\.\d+\.\d+|0\.0\.0\.0|\[::1?\])\b|\d+$")


@dataclass(frozen=True, slots=True)
class _Filter:
    """A program that reads the files in its arguments, or its standard input if there are none."""

    leading_operands: int = 0
    """Number of operands before the files, such as a pattern or a script."""
    options_with_value: frozenset[str] = frozenset()
    """Options whose value is the next argument."""
    script_options: frozenset[str] = frozenset()
    """Options whose value replaces the leading operand."""
    can_search_tree: bool = False
    """True if an option makes the program search directories."""


_RECURSIVE_OPTION = re.compile(r"-[a-zA-Z]*[rR][a-zA-Z]*|--recursive")
_GREP_OPTIONS_WITH_VALUE = word_set("-A -B -C -m -e -f -g -t -d --include --exclude")
_GREP = _Filter(1, _GREP_OPTIONS_WITH_VALUE, word_set("-e -f"), can_search_tree=True)
_TREE_SEARCHERS = frozenset({"rg", "ag", "ack"})
_FILTERS = {
    **dict.fromkeys(("grep", "egrep", "fgrep", "zgrep", *_TREE_SEARCHERS), _GREP),
    **dict.fromkeys(
        word_set(
            "cat tac nl less more wc uniq paste column fold fmt rev shuf base64 bat zcat xzcat"
        ),
        _Filter(),
    ),
    **dict.fromkeys(("head", "tail"), _Filter(0, word_set("-n -c --lines --bytes"))),
    "sort": _Filter(0, word_set("-k -t -S -T")),
    "join": _Filter(0, word_set("-t -1 -2 -o")),
    "cut": _Filter(0, word_set("-d -f -c -b --delimiter --fields")),
    "sed": _Filter(1, word_set("-e -f -l"), word_set("-e -f --expression")),
    **dict.fromkeys(
        ("awk", "gawk", "mawk", "nawk"), _Filter(1, word_set("-F -v -f"), frozenset({"-f"}))
    ),
    "jq": _Filter(1, word_set("--indent"), word_set("-f --from-file")),
    "yq": _Filter(1),
    "xmllint": _Filter(0, word_set("--xpath")),
    "json.tool": _Filter(),
    "tee": _Filter(),
    "look": _Filter(1),
}
_AWK_ARITHMETIC = re.compile(
    r"[-+*/%^]=|\+\+|[\w)\]] ?[*/^%] ?[\w(\[$]|\b(?:sqrt|exp|log|sin|cos|int)\("
)
_VERSIONED_NAME = re.compile(r"(?:python|pypy|ipython|pip|pytest)[\d.]*")
_SHELLS = word_set("bash sh zsh dash ksh ash")
_VERSION_AND_HELP_ARGUMENTS = word_set("--version -V --help -version version help -v")
_SYSTEM_DIRECTORIES = ("/usr/", "/bin/", "/sbin/", "/opt/", "/etc/", "/lib")
_RESERVED_WORDS = word_set("if then else elif fi while until do done ! { } time coproc")
_WRAPPERS: Mapping[str, frozenset[str]] = {
    "sudo": word_set("-u -g -U -h -p"),
    "doas": word_set("-u"),
    "env": word_set("-u -C -S --unset --chdir"),
    "timeout": word_set("-k -s --signal --kill-after"),
    "nice": word_set("-n"),
    "ionice": word_set("-c -n"),
    "xargs": word_set("-n -I -P -d -L -s -a -E"),
    "parallel": word_set("-j --jobs"),
    "watch": word_set("-n --interval"),
    "stdbuf": word_set("-i -o -e"),
    **dict.fromkeys(
        word_set("command exec builtin nohup setsid unbuffer nocache chronic"), word_set("")
    ),
}
"""Programs that run another program, each with its options that take a value."""
_WRAPPERS_THAT_ADD_ARGUMENTS = frozenset({"xargs", "parallel"})
_RUNNERS: Mapping[str, frozenset[str]] = dict.fromkeys(
    word_set("uv poetry pipenv pdm conda mamba micromamba"),
    word_set("-n -p --name --prefix --with"),
)
"""Programs that run another program by the subcommand `run`, each with its options that take a
value."""
_LINE_FILTER_LANGUAGES = frozenset({"perl", "ruby"})
_LINE_FILTER_OPTIONS = ("-n", "-p", "-i", "-0", "-an", "-lan", "-lne", "-lpe")


# Commands

_PYTHONS = frozenset({"python", "pypy", "ipython", ""})
_ASSIGNMENT = re.compile(r"\w+\+?=")


def analyse_command(command: Command) -> CapabilityUse:
    """Return the capabilities that a command uses."""
    uses = [_use_of_redirections(command)]
    words, gets_more_arguments = _skip_wrappers(command.words)
    if words:
        uses.append(
            _use_of_program(_Invocation(_plain_name(words[0]), words, command, gets_more_arguments))
        )
    return merge_uses(uses)


@dataclass(frozen=True, slots=True)
class _Invocation:
    """A program with its arguments, and the command that runs it."""

    name: str
    words: Sequence[str]
    command: Command
    gets_more_arguments: bool
    """True if a wrapper such as xargs adds arguments."""

    @property
    def args(self) -> Sequence[str]:
        return self.words[1:]

    def operands(self, options_with_value: frozenset[str] = frozenset()) -> list[str]:
        """Return the arguments that are neither options nor values of `options_with_value`."""
        found = []
        is_value = False
        for word in self.args:
            if is_value:
                is_value = False
            elif len(word) > 1 and word.startswith("-"):
                is_value = word in options_with_value
            else:
                found.append(word)
        return found


# Before the program


def _skip_wrappers(words: Sequence[str]) -> tuple[Sequence[str], bool]:
    """Return the words from the program's name on, without reserved words, assignments and wrappers
    such as sudo, and True if a wrapper adds arguments to them."""
    at, gets_more_arguments = 0, False
    while at < len(words):
        word, following = words[at].rpartition("/")[2], words[at + 1 : at + 2]
        if word in _RESERVED_WORDS or _ASSIGNMENT.match(words[at]):
            at += 1
        elif word == "command" and "-v" in following:
            break  # `command -v` only searches for a program
        elif word in _RUNNERS and "run" in following:
            at = _index_after_options(words, at + 2, _RUNNERS[word], 0)
        elif word in _WRAPPERS:
            gets_more_arguments = gets_more_arguments or word in _WRAPPERS_THAT_ADD_ARGUMENTS
            at = _index_after_options(words, at + 1, _WRAPPERS[word], word == "timeout")
        else:
            break
    return words[at:], gets_more_arguments


def _index_after_options(
    words: Sequence[str], index: int, options_with_value: frozenset[str], operand_count: int
) -> int:
    """Return the index of the first word after a wrapper's own options and operands."""
    while index < len(words) and words[index].startswith("-"):
        index += 2 if words[index] in options_with_value else 1
    return index + operand_count


def _plain_name(word: str) -> str:
    """Return a program's name without its directory and version."""
    name = word.rpartition("/")[2]
    versioned = _VERSIONED_NAME.fullmatch(name)
    return name.rstrip("0123456789.") if versioned else name


# The program


def _use_of_program(invocation: _Invocation) -> CapabilityUse:
    if invocation.args and all(word in _VERSION_AND_HELP_ARGUMENTS for word in invocation.args):
        return NOTHING
    if invocation.name in _PYTHONS:
        return _use_of_python_program(invocation)
    if invocation.name in _SHELLS:
        return _use_of_shell_program(invocation)
    if invocation.name == "eval":
        return CapabilityUse(nested_code=(CodeFragment("shell", " ".join(invocation.args)),))
    if invocation.name in _FILTERS:
        return _use_of_filter(invocation, _FILTERS[invocation.name])
    if (
        invocation.name in _LINE_FILTER_LANGUAGES
        and invocation.args
        and invocation.args[0].startswith(_LINE_FILTER_OPTIONS)
    ):
        return _use_of_filter(invocation, _Filter(1))
    return _use_of_listed_program(invocation)


def _use_of_listed_program(invocation: _Invocation) -> CapabilityUse:
    if invocation.name in _FETCHING_PROGRAMS:
        return _use_of_fetching_program(invocation)
    if use := _use_of_subcommand(invocation):
        return use
    if invocation.name in _FILE_PROGRAMS:
        return FILES
    if invocation.name in _COMPUTING_PROGRAMS or invocation.words[0] == ARITHMETIC:
        is_install = any("install.packages" in word for word in invocation.args)
        return merge_uses([COMPUTATION, EXTERNAL] if is_install else [COMPUTATION])
    if "/" in invocation.words[0] and not invocation.words[0].startswith(_SYSTEM_DIRECTORIES):
        return COMPUTATION  # a program that was written or built in the sandbox
    return NOTHING


def _use_of_subcommand(invocation: _Invocation) -> CapabilityUse | None:
    """Return the CapabilityUse of a program's subcommand, such as `install`, or None if the
    subcommand uses no capability."""
    fetching = _FETCHING_SUBCOMMANDS.get(invocation.name, frozenset())
    computing = _COMPUTING_SUBCOMMANDS.get(invocation.name, frozenset())
    if not fetching and not computing:
        return None
    operands = invocation.operands(_OPTIONS_WITH_VALUE.get(invocation.name, frozenset()))
    subcommand = next((word for word in operands if word not in _SUBCOMMAND_GROUPS), "")
    if subcommand in fetching or not fetching.isdisjoint(invocation.args[:1]):
        return EXTERNAL
    return COMPUTATION if subcommand in computing else None


def _use_of_fetching_program(invocation: _Invocation) -> CapabilityUse:
    hosts = invocation.operands(_OPTIONS_WITH_VALUE.get(invocation.name, frozenset()))
    is_remote = invocation.gets_more_arguments or any(not _LOCAL_HOST.match(host) for host in hosts)
    return EXTERNAL if is_remote else NOTHING


def _use_of_filter(invocation: _Invocation, program: _Filter) -> CapabilityUse:
    operands = invocation.operands(program.options_with_value)
    has_script = any(word in program.script_options for word in invocation.args)
    leading_operands = 0 if has_script else program.leading_operands
    has_files = invocation.gets_more_arguments or len(operands) > leading_operands
    if program.can_search_tree:
        has_files = has_files or any(map(_RECURSIVE_OPTION.fullmatch, invocation.args))
    if invocation.name in _TREE_SEARCHERS:
        has_files = has_files or not invocation.command.is_piped
    used = [FILES] if has_files else []
    if invocation.name.endswith("awk") and operands and _AWK_ARITHMETIC.search(operands[0]):
        used.append(COMPUTATION)
    return merge_uses(used)


# Code in the arguments or the input of an interpreter


def _use_of_python_program(invocation: _Invocation) -> CapabilityUse:
    args, at = invocation.args, 0
    while at < len(args) and args[at].startswith("-") and args[at] != "-":
        option = args[at]
        if option.startswith("-c") and len(option) > 2:
            return CapabilityUse(nested_code=(CodeFragment("python", option[2:]),))
        if not option.startswith("--") and option.endswith("c"):
            return CapabilityUse(
                nested_code=(CodeFragment("python", "".join(args[at + 1 : at + 2])),)
            )
        if not option.startswith("--") and option.endswith("m"):
            return _use_of_python_module(invocation, args[at + 1 :])
        at += 2 if option in ("-W", "-X") else 1
    if at < len(args) and args[at] not in ("-", "/dev/stdin"):
        return COMPUTATION  # a script that exists already
    return _use_of_stdin(invocation.command, "python")


def _use_of_python_module(invocation: _Invocation, words: Sequence[str]) -> CapabilityUse:
    name = _plain_name("".join(words[:1]))
    return (
        NOTHING
        if name in _PYTHONS
        else _use_of_program(replace(invocation, name=name, words=words))
    )


def _use_of_shell_program(invocation: _Invocation) -> CapabilityUse:
    for at, word in enumerate(invocation.args):
        if not word.startswith("-"):
            return (
                COMPUTATION if word != "/dev/stdin" else _use_of_stdin(invocation.command, "shell")
            )
        if word.endswith("c") and not word.startswith("--"):
            return CapabilityUse(
                nested_code=(CodeFragment("shell", "".join(invocation.args[at + 1 : at + 2])),)
            )
    return _use_of_stdin(invocation.command, "shell")


def _use_of_stdin(command: Command, language: Language) -> CapabilityUse:
    """Return the CapabilityUse of the code that an interpreter reads from its standard input."""
    if command.stdin:
        return CapabilityUse(nested_code=(CodeFragment(language, command.stdin),))
    return COMPUTATION if command.reads_file else NOTHING


# Redirections


def _use_of_redirections(command: Command) -> CapabilityUse:
    """Return the CapabilityUse of a command's redirections: FILE_MANAGEMENT if they read or write
    a file, and as nested code the code that they write into files."""
    paths = [path for path in command.written_files if not path.startswith("/dev/")]
    if command.words[:1] == ("tee",):
        paths += command.words[1:]
    text = command.stdin or command.stdout
    code = {found.language: found for path in paths for found in code_of_file(path, text)}
    use = FILES if paths or command.reads_file else NOTHING
    return CapabilityUse(use.capabilities, tuple(code.values()))
