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
"""Leaks are counted by the targets themselves, after each input."""
BUSY = ("sha256",)
"""Decides nothing by what it reads: to trace it would take most of the time."""
_DISK_BYTES = 16 << 20


def build(directory: Path, *, fuzzer: bool) -> None:
    """Build all targets into `directory`. Raises CalledProcessError."""
    compiler = "clang" if fuzzer else "gcc"
    fuzzed = ("-fsanitize=fuzzer-no-link",) if fuzzer else ()
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        agent = [
            (source, directory / f"agent-{source.stem}.o", () if source.stem in BUSY else fuzzed)
            for source in sorted(AGENT.glob("*.c"))
        ]
        ours = [
            (source, directory / f"{source.stem}.o", ())
            for source in sorted(NATIVE.glob("*.c"))
            if not (fuzzer and source.stem == "replay")
        ]
        list(workers.map(lambda work: _compile(compiler, *work), agent + ours))
        parts = [target for _, target, _ in ours if not target.stem.startswith("target_")]
        parts = [part for part in parts if part.stem not in ("first", "last")]
        # The agent's objects stand between two markers: its variables are reset between inputs.
        inner = [directory / "first.o", *(target for _, target, _ in agent), directory / "last.o"]
        list(
            workers.map(
                lambda name: _link(
                    compiler, directory, name, [*map(str, inner), *map(str, parts)], fuzzer
                ),
                TARGETS,
            )
        )


def _compile(compiler: str, source: Path, target: Path, more: Sequence[str]) -> None:
    main = ("-Dmain=agent_main",) if source.parent == AGENT and source.stem == "main" else ()
    words = (*FLAGS, *more, *main, f"-I{AGENT}", f"-I{NATIVE}", "-c", str(source))
    subprocess.run((compiler, *words, "-o", str(target)), check=True)


def _link(compiler: str, directory: Path, name: str, objects: list[str], fuzzer: bool) -> None:
    engine = ("-fsanitize=fuzzer",) if fuzzer else ()
    target = str(directory / f"target_{name}.o")
    words = (*FLAGS, *engine, *LINKED, target, *objects, "-o", str(directory / name))
    subprocess.run((compiler, *words), check=True)


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
    """What is not installed and needed to build or run targets; None if all is there."""
    needed = ("clang" if fuzzer else "gcc", "bwrap")
    return next((name for name in needed if not shutil.which(name)), None)


def kept(target: str) -> Iterator[Path]:
    """The inputs that are kept for a target."""
    yield from sorted((CORPUS / target).iterdir())
