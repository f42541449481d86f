"""Fuzz targets built from the agent's own sources, and the sandbox that they run in.

The agent runs whole inside a target. What would leave the process, or would make two runs of one
input differ, goes to `native/` instead: the linker's --wrap does that, so no source of the agent
knows. clang builds targets for libFuzzer; gcc builds the same ones to replay inputs.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sandbox_runtime

AGENT = Path(sandbox_runtime.__file__).parent / "guest/native"
HERE = Path(__file__).parent
NATIVE = HERE / "native"
CORPUS = HERE / "corpus"
TARGETS = tuple(sorted(path.stem.removeprefix("target_") for path in NATIVE.glob("target_*.c")))
WRAPPED = (
    *("malloc", "calloc", "realloc", "free", "vasprintf", "fdopendir", "closedir"),
    *("open", "openat", "mkdir", "rename", "pipe2", "memfd_create", "posix_openpt", "fcntl"),
    *("read", "write", "ppoll", "clock_gettime", "getrandom", "syscall", "prctl", "setrlimit"),
    *("socket", "setsockopt", "bind", "listen", "accept4", "signal", "sigaction", "sigprocmask"),
    *("posix_spawn", "posix_spawn_file_actions_adddup2", "wait4", "kill", "session_kill"),
    *("session_visit", "commands_add", "die", "_exit"),
)
FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-fno-omit-frame-pointer", "-fno-common"),
    *("-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
LINKED = tuple(f"-Wl,--wrap={name}" for name in WRAPPED)
ENV = {
    "ASAN_OPTIONS": "detect_leaks=0:handle_abort=1:quarantine_size_mb=4:max_malloc_fill_size=0",
}
"""The targets detect leaks themselves after each input."""
BUSY = ("sha256",)
"""Decides nothing by what it reads: to trace it would take most of the time."""
_DISK_BYTES = 16 << 20


def build(directory: Path, *, fuzzer: bool) -> None:
    """Build all targets into `directory`. Raises CalledProcessError."""
    agent = sorted(AGENT.glob("*.c"))
    ours = {path.stem: path for path in NATIVE.glob("*.c")}
    mains = [ours.pop(f"target_{target}") for target in TARGETS]
    if fuzzer:
        del ours["replay"]  # libFuzzer has a main of its own
    # The agent's objects stand between these two: its variables are reset between inputs.
    inner = [ours.pop("first"), *agent, ours.pop("last")]
    parts = [_object(directory, source) for source in (*inner, *ours.values())]
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        sources = [*inner, *ours.values(), *mains]
        list(workers.map(lambda source: _compile(directory, source, fuzzer), sources))
        list(workers.map(lambda main: _link(directory, [main, *parts], fuzzer), mains))


def _object(directory: Path, source: Path) -> Path:
    side = "agent" if source.parent == AGENT else "ours"
    return directory / f"{side}-{source.stem}.o"


def _compile(directory: Path, source: Path, fuzzer: bool) -> None:
    words = [*FLAGS, f"-I{AGENT}", f"-I{NATIVE}", "-c", str(source)]
    if source.parent == AGENT:
        words += ["-Dmain=agent_main"]
        words += ["-fsanitize=fuzzer-no-link"] if fuzzer and source.stem not in BUSY else []
    _run(fuzzer, *words, "-o", str(_object(directory, source)))


def _link(directory: Path, parts: Sequence[Path], fuzzer: bool) -> None:
    main, *others = parts
    words = [*FLAGS, *LINKED, str(_object(directory, main)), *map(str, others)]
    words += ["-fsanitize=fuzzer"] if fuzzer else []
    _run(fuzzer, *words, "-o", str(directory / main.stem.removeprefix("target_")))


def _run(fuzzer: bool, *words: str) -> None:
    subprocess.run(("clang" if fuzzer else "gcc", *words), check=True)


def sandboxed(
    directory: Path, *, shown: Mapping[str, Path], written: Mapping[str, Path]
) -> tuple[str, ...]:
    """The start of a command line that runs a program of `directory`, as /fuzz/bin, by bubblewrap.

    Inputs make the agent open, write and remove files by any name: inside there are a few files in
    memory, and `shown` and `written` below /fuzz.
    """
    bound = [("--ro-bind", "bin", directory)]
    bound += [("--ro-bind", name, path) for name, path in shown.items()]
    bound += [("--bind", name, path) for name, path in written.items()]
    disk = ("--size", str(_DISK_BYTES), "--tmpfs")
    return (
        *("bwrap", "--unshare-all", "--uid", "65534", "--gid", "65534", "--die-with-parent"),
        *("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib"),
        *("--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin"),
        *("--proc", "/proc", "--dev", "/dev", *disk, "/run", *disk, "/tmp", *disk, "/box"),
        *(part for how, name, path in bound for part in (how, str(path), f"/fuzz/{name}")),
        *("--remount-ro", "/", "--chdir", "/box", "--clearenv"),
        *(part for name, value in ENV.items() for part in ("--setenv", name, value)),
    )


def missing(*, fuzzer: bool) -> str | None:
    """Return a missing program that building or running targets needs, or None."""
    needed = ("clang" if fuzzer else "gcc", "bwrap")
    return next((name for name in needed if not shutil.which(name)), None)


def kept(target: str) -> Iterator[Path]:
    """Return the corpus inputs of a target."""
    yield from sorted((CORPUS / target).iterdir())
