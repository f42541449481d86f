"""Helpers of the attempts: raw system calls, and checks whether files open."""

from __future__ import annotations

import ctypes
import os
import platform
import stat
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# A copy of the filter's table would hide its errors, so these numbers are written out here.
_X86_64, _AARCH64 = 0, 1
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "io_destroy": (207, 1),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "mmap": (9, 222),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "timer_create": (222, 107),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_COLUMN = {"x86_64": _X86_64, "aarch64": _AARCH64}
_SHOWN = 3

_libc = ctypes.CDLL(None, use_errno=True)


class NotApplicableError(Exception):
    """The attempt cannot be made here, so nothing is known about the boundary."""


def call(name: str, *arguments: object, reached: tuple[int, ...] = ()) -> int:
    """Make a system call with harmless arguments, and return its result. The errors in `reached`
    show that the kernel has permitted the call before it rejected the arguments: they count as
    success (0). Raises OSError for other errors."""
    return call_by_number(syscall_number(name), *arguments, reached=reached)


def call_by_number(value: int, *arguments: object, reached: tuple[int, ...] = ()) -> int:
    """Make a system call by its number, as `call` does by its name."""
    # As full registers: ctypes passes a plain int as 32 bits.
    registers = [ctypes.c_long(part) if isinstance(part, int) else part for part in arguments]
    _libc.syscall.restype = ctypes.c_long
    result: int = _libc.syscall(ctypes.c_long(value), *registers)
    error = ctypes.get_errno()
    if result >= 0:
        return result
    if error in reached:
        return 0
    raise OSError(error, os.strerror(error))


def syscall_number(name: str) -> int:
    """Return the number of a system call on this machine. Raises NotApplicableError on an unknown
    machine, and OSError if the machine has no such call."""
    column = _COLUMN.get(platform.machine())
    if column is None:
        raise NotApplicableError(f"the system calls of {platform.machine()} are not known")
    found = NUMBERS[name][column]
    if found is None:
        raise OSError(38, f"{name} does not exist on {platform.machine()}")
    return found


def opens(path: Path, flags: int = os.O_WRONLY) -> bool:
    """Return True if a file opens. Nothing is written; opening must have no effect."""
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def writable_files_below(top: Path, excluded: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield regular files below `top` that open for writing, except those whose path begins with
    one of the `excluded` prefixes."""
    try:
        entries = sorted(top.iterdir())
    except OSError:
        return
    for entry in entries:
        if str(entry).startswith(excluded):
            continue
        try:
            mode = entry.lstat().st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode):
            yield from writable_files_below(entry, excluded)
        elif stat.S_ISREG(mode) and opens(entry):
            yield entry


def summarize(what: str, found: Iterable[object]) -> str | None:
    """Return `what`, followed by the first items of `found`, or None if `found` is empty."""
    names = [str(finding) for finding in found]
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}: {shown}{more}" if names else None


def survives(trial: Callable[[], object]) -> bool:
    """Return True if a child process runs `trial` to its end without an error."""
    child = os.fork()
    if child == 0:
        try:
            trial()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
