"""What programs are for, by their names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FETCHERS = _names("""
    curl wget aria2c http https xh ftp sftp scp ssh telnet nc ncat netcat ping dig nslookup host
    whois traceroute yt-dlp youtube-dl gdown lynx w3m links npx pnpx uvx gh hf huggingface-cli
    aws gsutil gcloud kaggle s3cmd rclone
""")
FILE_PROGRAMS = _names("""
    ls dir find fd fdfind tree du stat file cp mv rm rmdir mkdir touch ln chmod chown tar zip unzip
    zipinfo gzip gunzip bzip2 bunzip2 xz unxz zstd 7z unrar rename split csplit truncate shred dd
    rsync patch diff cmp comm md5sum sha1sum sha256sum b2sum cksum strings xxd hexdump od readlink
    realpath mktemp locate install iconv dos2unix
    pdftotext pdfinfo pdftoppm pdfimages pdfgrep qpdf mutool pandoc libreoffice soffice antiword
    docx2txt catdoc odt2txt unrtf html2text tesseract exiftool convert magick identify mogrify
    ffmpeg ffprobe sox fluidsynth timidity lame sqlite3 in2csv csvcut csvgrep csvlook csvstat
    csvsql vi vim nano ed pdflatex xelatex latex dot
""")
COMPUTERS = _names("""
    bc dc factor expr let octave maxima gp sage julia R Rscript matlab qalc units gnuplot
    gcc g++ cc c++ clang clang++ tcc gfortran rustc ghc javac java nasm ld make cmake ninja
    node deno bun ruby perl lua php ghci runghc ocaml swipl sbcl
    pytest unittest timeit jupyter papermill ipython z3 minizinc glpsol cbc scip lp_solve minisat
    obabel xtb psi4 mopac gmx blastn blastp blastx makeblastdb clustalo muscle mafft samtools
    bedtools
""")
FETCHING_PARTS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        ("pip", "conda", "mamba", "micromamba", "uv", "pipx", "poetry", "pipenv", "pdm"),
        _names("install download wheel create update upgrade add sync search"),
    ),
    **dict.fromkeys(
        ("apt", "apt-get", "aptitude", "dnf", "yum", "apk", "brew", "pacman", "zypper", "snap"),
        _names("install update upgrade dist-upgrade full-upgrade add source build-dep -S -Sy -Syu"),
    ),
    **dict.fromkeys(("npm", "yarn", "pnpm"), _names("install i ci add update upgrade view info")),
    **dict.fromkeys(("gem", "cargo", "go", "luarocks", "cpan"), _names("install add get update")),
    "git": _names("clone pull fetch push ls-remote submodule"),
    "docker": _names("pull push"),
    "svn": _names("checkout co update"),
}
COMPUTING_PARTS = {
    **dict.fromkeys(("go", "cargo"), _names("run build test bench")),
    **dict.fromkeys(("npm", "yarn", "pnpm", "bun"), _names("run test start")),
}
GROUPS = _names("pip tool env global")
"""Words between a program and the part of it that is meant: `uv pip install`."""
VALUED = {"git": _names("-C -c"), "curl": _names("-o -H -d -X -A -u"), "wget": _names("-O -o -P")}
LOCAL = re.compile(r"(?:\w+://)?(?:localhost|127\.\d+\.\d+\.\d+|0\.0\.0\.0|\[::1?\])\b|\d+$")


@dataclass(frozen=True, slots=True)
class Filter:
    """A program that reads files if it is given any, else what comes through a pipe."""

    leading: int = 0
    """How many words come before the files."""
    valued: frozenset[str] = frozenset()
    """Options that are followed by a value."""
    script: frozenset[str] = frozenset()
    """Those whose value stands for the leading word."""
    searches_tree: bool = False
    """Whether an option has it read files that are not named."""


RECURSIVE = re.compile(r"-[a-zA-Z]*[rR][a-zA-Z]*|--recursive")
_OF_GREP = _names("-A -B -C -m -e -f -g -t -d --include --exclude")
_GREP = Filter(1, _OF_GREP, _names("-e -f"), searches_tree=True)
TREE_SEARCHERS = frozenset({"rg", "ag", "ack"})
FILTERS = {
    **dict.fromkeys(("grep", "egrep", "fgrep", "zgrep", *TREE_SEARCHERS), _GREP),
    **dict.fromkeys(
        _names("cat tac nl less more wc uniq paste column fold fmt rev shuf base64 bat zcat xzcat"),
        Filter(),
    ),
    **dict.fromkeys(("head", "tail"), Filter(0, _names("-n -c --lines --bytes"))),
    "sort": Filter(0, _names("-k -t -S -T")),
    "join": Filter(0, _names("-t -1 -2 -o")),
    "cut": Filter(0, _names("-d -f -c -b --delimiter --fields")),
    "sed": Filter(1, _names("-e -f -l"), _names("-e -f --expression")),
    **dict.fromkeys(
        ("awk", "gawk", "mawk", "nawk"), Filter(1, _names("-F -v -f"), frozenset({"-f"}))
    ),
    "jq": Filter(1, _names("--indent"), _names("-f --from-file")),
    "yq": Filter(1),
    "xmllint": Filter(0, _names("--xpath")),
    "json.tool": Filter(),
    "tee": Filter(),
    "look": Filter(1),
}
AWK_SUM = re.compile(r"[-+*/%^]=|\+\+|[\w)\]] ?[*/^%] ?[\w(\[$]|\b(?:sqrt|exp|log|sin|cos|int)\(")
VERSIONED = re.compile(r"(?:python|pypy|ipython|pip|pytest)[\d.]*")
SHELLS = _names("bash sh zsh dash ksh ash")
PROBES = _names("--version -V --help -version version help -v")
OF_THE_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/opt/", "/etc/", "/lib")
RESERVED = _names("if then else elif fi while until do done ! { } time coproc")
WRAPPERS: Mapping[str, frozenset[str]] = {
    "sudo": _names("-u -g -U -h -p"),
    "doas": _names("-u"),
    "env": _names("-u -C -S --unset --chdir"),
    "timeout": _names("-k -s --signal --kill-after"),
    "nice": _names("-n"),
    "ionice": _names("-c -n"),
    "xargs": _names("-n -I -P -d -L -s -a -E"),
    "parallel": _names("-j --jobs"),
    "watch": _names("-n --interval"),
    "stdbuf": _names("-i -o -e"),
    **dict.fromkeys(
        _names("command exec builtin nohup setsid unbuffer nocache chronic"), _names("")
    ),
}
"""Programs that run another one, with their options that are followed by a value."""
GIVE_WORDS = frozenset({"xargs", "parallel"})
RUNNERS: Mapping[str, frozenset[str]] = dict.fromkeys(
    _names("uv poetry pipenv pdm conda mamba micromamba"), _names("-n -p --name --prefix --with")
)
"""Programs that do so by the word `run`."""
SCRIPTED = frozenset({"perl", "ruby"})
LINE_BY_LINE = ("-n", "-p", "-i", "-0", "-an", "-lan", "-lne", "-lpe")
