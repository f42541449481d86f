"""Finds the meta-capabilities that a shell command uses, by its program and its arguments."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from policies.capabilities.shell import SUM, Command

Language = Literal["shell", "python"]


class Capability(StrEnum):
    """A meta-capability that a sandbox gives a model (the paper's section 4)."""

    EXTERNAL_RESOURCES = "external_resources"
    """Downloads of packages, web pages, data and repositories."""
    FILE_MANAGEMENT = "file_management"
    """Files are searched, read, written or moved."""
    COMPUTATION = "computation"
    """Numbers are computed, or a program is run that computes."""


@dataclass(frozen=True, slots=True)
class CodeFragment:
    """A piece of code, often inside another piece."""

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
    """Return the combined use of several pieces of code."""
    if len(uses) == 1:
        return uses[0]
    capabilities = frozenset[Capability]().union(*(use.capabilities for use in uses))
    return CapabilityUse(capabilities, tuple(code for use in uses for code in use.nested_code))


def code_of_file(path: str, text: str) -> tuple[CodeFragment, ...]:
    """Return the text of a file as code if the file has the extension of a script."""
    if not text:
        return ()
    if path.endswith(".py"):
        return (CodeFragment("python", text),)
    return (CodeFragment("shell", text),) if path.endswith((".sh", ".bash")) else ()


# Programs by name


def name_set(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


_FETCHERS = name_set("""
    curl wget aria2c http https xh ftp sftp scp ssh telnet nc ncat netcat ping dig nslookup host
    whois traceroute yt-dlp youtube-dl gdown lynx w3m links npx pnpx uvx gh hf huggingface-cli
    aws gsutil gcloud kaggle s3cmd rclone
""")
_FILE_PROGRAMS = name_set("""
    ls dir find fd fdfind tree du stat file cp mv rm rmdir mkdir touch ln chmod chown tar zip unzip
    zipinfo gzip gunzip bzip2 bunzip2 xz unxz zstd 7z unrar rename split csplit truncate shred dd
    rsync patch diff cmp comm md5sum sha1sum sha256sum b2sum cksum strings xxd hexdump od readlink
    realpath mktemp locate install iconv dos2unix
    pdftotext pdfinfo pdftoppm pdfimages pdfgrep qpdf mutool pandoc libreoffice soffice antiword
    docx2txt catdoc odt2txt unrtf html2text tesseract exiftool convert magick identify mogrify
    ffmpeg ffprobe sox fluidsynth timidity lame sqlite3 in2csv csvcut csvgrep csvlook csvstat
    csvsql vi vim nano ed pdflatex xelatex latex dot
""")
_COMPUTERS = name_set("""
    bc dc factor expr let octave maxima gp sage julia R Rscript matlab qalc units gnuplot
    gcc g++ cc c++ clang clang++ tcc gfortran rustc ghc javac java nasm ld make cmake ninja
    node deno bun ruby perl lua php ghci runghc ocaml swipl sbcl
    pytest unittest timeit jupyter papermill ipython z3 minizinc glpsol cbc scip lp_solve minisat
    obabel xtb psi4 mopac gmx blastn blastp blastx makeblastdb clustalo muscle mafft samtools
    bedtools
""")
_FETCHING_PARTS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        ("pip", "conda", "mamba", "micromamba", "uv", "pipx", "poetry", "pipenv", "pdm"),
        name_set("install download wheel create update upgrade add sync search"),
    ),
    **dict.fromkeys(
        ("apt", "apt-get", "aptitude", "dnf", "yum", "apk", "brew", "pacman", "zypper", "snap"),
        name_set(
            "install update upgrade dist-upgrade full-upgrade add source build-dep -S -Sy -Syu"
        ),
    ),
    **dict.fromkeys(("npm", "yarn", "pnpm"), name_set("install i ci add update upgrade view info")),
    **dict.fromkeys(("gem", "cargo", "go", "luarocks", "cpan"), name_set("install add get update")),
    "git": name_set("clone pull fetch push ls-remote submodule"),
    "docker": name_set("pull push"),
    "svn": name_set("checkout co update"),
}
_COMPUTING_PARTS = {
    **dict.fromkeys(("go", "cargo"), name_set("run build test bench")),
    **dict.fromkeys(("npm", "yarn", "pnpm", "bun"), name_set("run test start")),
}
_GROUPS = name_set("pip tool env global")
"""Words between a program and its subcommand, such as `pip` in `uv pip install`."""
_VALUED = {
    "git": name_set("-C -c"),
    "curl": name_set("-o -H -d -X -A -u"),
    "wget": name_set("-O -o -P"),
}
_LOCAL = re.compile(r"(?:\w+://)?(?:localhost|127\.\d+\.\d+\.\d+|0\.0\.0\.0|\[::1?\])\b|\d+$")


@dataclass(frozen=True, slots=True)
class _Filter:
    """A program that reads the files in its arguments, or its standard input if there are none."""

    leading: int = 0
    """Number of operands before the files, such as a pattern or a script."""
    valued: frozenset[str] = frozenset()
    """Options that are followed by a value."""
    script: frozenset[str] = frozenset()
    """Options whose value replaces the leading operand."""
    searches_tree: bool = False
    """True if an option makes the program search directories."""


_RECURSIVE = re.compile(r"-[a-zA-Z]*[rR][a-zA-Z]*|--recursive")
_OF_GREP = name_set("-A -B -C -m -e -f -g -t -d --include --exclude")
_GREP = _Filter(1, _OF_GREP, name_set("-e -f"), searches_tree=True)
_TREE_SEARCHERS = frozenset({"rg", "ag", "ack"})
_FILTERS = {
    **dict.fromkeys(("grep", "egrep", "fgrep", "zgrep", *_TREE_SEARCHERS), _GREP),
    **dict.fromkeys(
        name_set(
            "cat tac nl less more wc uniq paste column fold fmt rev shuf base64 bat zcat xzcat"
        ),
        _Filter(),
    ),
    **dict.fromkeys(("head", "tail"), _Filter(0, name_set("-n -c --lines --bytes"))),
    "sort": _Filter(0, name_set("-k -t -S -T")),
    "join": _Filter(0, name_set("-t -1 -2 -o")),
    "cut": _Filter(0, name_set("-d -f -c -b --delimiter --fields")),
    "sed": _Filter(1, name_set("-e -f -l"), name_set("-e -f --expression")),
    **dict.fromkeys(
        ("awk", "gawk", "mawk", "nawk"), _Filter(1, name_set("-F -v -f"), frozenset({"-f"}))
    ),
    "jq": _Filter(1, name_set("--indent"), name_set("-f --from-file")),
    "yq": _Filter(1),
    "xmllint": _Filter(0, name_set("--xpath")),
    "json.tool": _Filter(),
    "tee": _Filter(),
    "look": _Filter(1),
}
_AWK_SUM = re.compile(r"[-+*/%^]=|\+\+|[\w)\]] ?[*/^%] ?[\w(\[$]|\b(?:sqrt|exp|log|sin|cos|int)\(")
_VERSIONED = re.compile(r"(?:python|pypy|ipython|pip|pytest)[\d.]*")
_SHELLS = name_set("bash sh zsh dash ksh ash")
_PROBES = name_set("--version -V --help -version version help -v")
_OF_THE_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/opt/", "/etc/", "/lib")
_RESERVED = name_set("if then else elif fi while until do done ! { } time coproc")
_WRAPPERS: Mapping[str, frozenset[str]] = {
    "sudo": name_set("-u -g -U -h -p"),
    "doas": name_set("-u"),
    "env": name_set("-u -C -S --unset --chdir"),
    "timeout": name_set("-k -s --signal --kill-after"),
    "nice": name_set("-n"),
    "ionice": name_set("-c -n"),
    "xargs": name_set("-n -I -P -d -L -s -a -E"),
    "parallel": name_set("-j --jobs"),
    "watch": name_set("-n --interval"),
    "stdbuf": name_set("-i -o -e"),
    **dict.fromkeys(
        name_set("command exec builtin nohup setsid unbuffer nocache chronic"), name_set("")
    ),
}
"""Programs that run another program, with their options that are followed by a value."""
_GIVE_WORDS = frozenset({"xargs", "parallel"})
_RUNNERS: Mapping[str, frozenset[str]] = dict.fromkeys(
    name_set("uv poetry pipenv pdm conda mamba micromamba"),
    name_set("-n -p --name --prefix --with"),
)
"""Programs that run another program by the subcommand `run`, with their options that are followed
by a value."""
_SCRIPTED = frozenset({"perl", "ruby"})
_LINE_BY_LINE = ("-n", "-p", "-i", "-0", "-an", "-lan", "-lne", "-lpe")


# Commands

_PYTHONS = frozenset({"python", "pypy", "ipython", ""})
_ASSIGNMENT = re.compile(r"\w+\+?=")


def use_of_command(command: Command) -> CapabilityUse:
    """Return the capabilities that a command uses."""
    uses = [_redirections(command)]
    words, gets_words = _program(command.words)
    if words:
        uses.append(_use(_Invocation(_plain_name(words[0]), words, command, gets_words)))
    return merge_uses(uses)


@dataclass(frozen=True, slots=True)
class _Invocation:
    """A program with its arguments, and the command that runs it."""

    name: str
    words: Sequence[str]
    command: Command
    gets_words: bool
    """True if a wrapper such as xargs adds arguments."""

    @property
    def args(self) -> Sequence[str]:
        return self.words[1:]

    def operands(self, valued: frozenset[str] = frozenset()) -> list[str]:
        """Return the arguments without options and their values."""
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
    """Return the words from the program's name on, and True if a wrapper adds arguments to them."""
    at, gets_words = 0, False
    while at < len(words):
        word, following = words[at].rpartition("/")[2], words[at + 1 : at + 2]
        if word in _RESERVED or _ASSIGNMENT.match(words[at]):
            at += 1
        elif word == "command" and "-v" in following:
            break  # `command -v` only searches for a program
        elif word in _RUNNERS and "run" in following:
            at = _past(words, at + 2, _RUNNERS[word], 0)
        elif word in _WRAPPERS:
            gets_words = gets_words or word in _GIVE_WORDS
            at = _past(words, at + 1, _WRAPPERS[word], word == "timeout")
        else:
            break
    return words[at:], gets_words


def _past(words: Sequence[str], at: int, valued: frozenset[str], operands: int) -> int:
    """Return the index of the first word after a wrapper's own options and operands."""
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in valued else 1
    return at + operands


def _plain_name(word: str) -> str:
    """Return a program's name without its directory and version."""
    name = word.rpartition("/")[2]
    versioned = _VERSIONED.fullmatch(name)
    return name.rstrip("0123456789.") if versioned else name


# The program


def _use(run: _Invocation) -> CapabilityUse:
    if run.args and all(word in _PROBES for word in run.args):
        return NOTHING
    if run.name in _PYTHONS:
        return _python(run)
    if run.name in _SHELLS:
        return _shell(run)
    if run.name == "eval":
        return CapabilityUse(nested_code=(CodeFragment("shell", " ".join(run.args)),))
    if run.name in _FILTERS:
        return _filter(run, _FILTERS[run.name])
    if run.name in _SCRIPTED and run.args and run.args[0].startswith(_LINE_BY_LINE):
        return _filter(run, _Filter(1))
    return _by_name(run)


def _by_name(run: _Invocation) -> CapabilityUse:
    if run.name in _FETCHERS:
        return _fetcher(run)
    if part := _part(run):
        return part
    if run.name in _FILE_PROGRAMS:
        return FILES
    if run.name in _COMPUTERS or run.words[0] == SUM:
        is_install = any("install.packages" in word for word in run.args)
        return merge_uses([COMPUTATION, EXTERNAL] if is_install else [COMPUTATION])
    if "/" in run.words[0] and not run.words[0].startswith(_OF_THE_SYSTEM):
        return COMPUTATION  # a program that was written or built in the sandbox
    return NOTHING


def _part(run: _Invocation) -> CapabilityUse | None:
    """Return the use of a program's subcommand, such as `install`; None if it uses nothing."""
    fetching = _FETCHING_PARTS.get(run.name, frozenset())
    computing = _COMPUTING_PARTS.get(run.name, frozenset())
    if not fetching and not computing:
        return None
    operands = run.operands(_VALUED.get(run.name, frozenset()))
    subcommand = next((word for word in operands if word not in _GROUPS), "")
    if subcommand in fetching or not fetching.isdisjoint(run.args[:1]):
        return EXTERNAL
    return COMPUTATION if subcommand in computing else None


def _fetcher(run: _Invocation) -> CapabilityUse:
    hosts = run.operands(_VALUED.get(run.name, frozenset()))
    is_remote = run.gets_words or any(not _LOCAL.match(host) for host in hosts)
    return EXTERNAL if is_remote else NOTHING


def _filter(run: _Invocation, program: _Filter) -> CapabilityUse:
    operands = run.operands(program.valued)
    has_script = any(word in program.script for word in run.args)
    leading = 0 if has_script else program.leading
    has_files = run.gets_words or len(operands) > leading
    if program.searches_tree:
        has_files = has_files or any(map(_RECURSIVE.fullmatch, run.args))
    if run.name in _TREE_SEARCHERS:
        has_files = has_files or not run.command.is_piped
    used = [FILES] if has_files else []
    if run.name.endswith("awk") and operands and _AWK_SUM.search(operands[0]):
        used.append(COMPUTATION)
    return merge_uses(used)


# Code in the arguments or the input of an interpreter


def _python(run: _Invocation) -> CapabilityUse:
    args, at = run.args, 0
    while at < len(args) and args[at].startswith("-") and args[at] != "-":
        option = args[at]
        if option.startswith("-c") and len(option) > 2:
            return CapabilityUse(nested_code=(CodeFragment("python", option[2:]),))
        if not option.startswith("--") and option.endswith("c"):
            return CapabilityUse(
                nested_code=(CodeFragment("python", "".join(args[at + 1 : at + 2])),)
            )
        if not option.startswith("--") and option.endswith("m"):
            return _module(run, args[at + 1 :])
        at += 2 if option in ("-W", "-X") else 1
    if at < len(args) and args[at] not in ("-", "/dev/stdin"):
        return COMPUTATION  # a script that exists already
    return _from_input(run.command, "python")


def _module(run: _Invocation, words: Sequence[str]) -> CapabilityUse:
    name = _plain_name("".join(words[:1]))
    return NOTHING if name in _PYTHONS else _use(replace(run, name=name, words=words))


def _shell(run: _Invocation) -> CapabilityUse:
    for at, word in enumerate(run.args):
        if not word.startswith("-"):
            return COMPUTATION if word != "/dev/stdin" else _from_input(run.command, "shell")
        if word.endswith("c") and not word.startswith("--"):
            return CapabilityUse(
                nested_code=(CodeFragment("shell", "".join(run.args[at + 1 : at + 2])),)
            )
    return _from_input(run.command, "shell")


def _from_input(command: Command, language: Language) -> CapabilityUse:
    """Return the use of the code that an interpreter reads from its standard input."""
    if command.stdin:
        return CapabilityUse(nested_code=(CodeFragment(language, command.stdin),))
    return COMPUTATION if command.reads_file else NOTHING


# Redirections


def _redirections(command: Command) -> CapabilityUse:
    """Return the use of the files that a command reads and writes, with the code that it writes."""
    paths = [path for path in command.written_files if not path.startswith("/dev/")]
    if command.words[:1] == ("tee",):
        paths += command.words[1:]
    text = command.stdin or command.stdout
    code = {found.language: found for path in paths for found in code_of_file(path, text)}
    use = FILES if paths or command.reads_file else NOTHING
    return CapabilityUse(use.capabilities, tuple(code.values()))
