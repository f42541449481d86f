"""Attempts that cannot succeed on this machine even without isolation, because their target is
missing."""

import errno
import os
import platform
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from sandbox_runtime.escape.inside.attempt import call, call_by_number
from tests.sandbox_runtime.escape.open_containers import our_capabilities

X32_GETPID = 0x4000_0000 + 39
REAL_TIME = Path("/sys/fs/cgroup/cpu/docker/cpu.rt_runtime_us")


def no_file(path: str) -> Callable[[], bool]:
    return lambda: not Path(path).exists()


def no_modules() -> bool:
    return not Path("/proc/modules").exists()


def no_ports() -> bool:
    if platform.machine() != "x86_64":
        return True
    return fails_with(errno.ENOSYS, lambda: call("ioperm", 0x80, 1, 0))


def no_x32() -> bool:
    if platform.machine() != "x86_64":
        return True
    return fails_with(errno.ENOSYS, lambda: call_by_number(X32_GETPID))


def no_alg() -> bool:
    return fails_with(errno.EAFNOSUPPORT, lambda: socket.socket(38, socket.SOCK_SEQPACKET).close())


def no_disk() -> bool:
    """Return True if even root cannot read the disk with the engine's files."""
    engine = Path("/var/lib/docker")
    device = (engine if engine.exists() else Path("/")).stat().st_dev
    with TemporaryDirectory() as folder:
        node = Path(folder, "disk")
        os.mknod(node, 0o600 | stat.S_IFBLK, device)
        return fails_with(errno.EPERM, lambda: os.close(os.open(node, os.O_RDONLY)))


def no_real_time() -> bool:
    return REAL_TIME.exists() and REAL_TIME.read_text(encoding="ascii") == "0\n"


def fails_with(error: int, attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError as raised:
        return raised.errno == error
    return False


ABSENT: Mapping[str, tuple[str, Callable[[], bool]]] = {
    "kexec_load": ("the kernel loads no other", no_file("/sys/kernel/kexec_loaded")),
    "kexec_file_load": ("the kernel loads no other", no_file("/sys/kernel/kexec_loaded")),
    "init_module": ("the kernel has no modules", no_modules),
    "finit_module": ("the kernel has no modules", no_modules),
    "delete_module": ("the kernel has no modules", no_modules),
    "modprobe": ("the kernel has no modules", no_modules),
    "io_ports": ("the kernel gives nobody ports", no_ports),
    "io_privilege": ("the kernel gives nobody ports", no_ports),
    "x32_calls": ("the kernel has no x32", no_x32),
    "i386_calls": ("the machine is none of that family", lambda: platform.machine() != "x86_64"),
    "alg_socket": ("the kernel has no AF_ALG", no_alg),
    "uevent_helper": ("the kernel starts no helper", no_file("/sys/kernel/uevent_helper")),
    "sysrq": ("the kernel has no sysrq", no_file("/proc/sysrq-trigger")),
    "release_agent": ("there is no cgroup v1", no_file("/sys/fs/cgroup/memory/release_agent")),
    "root_disk": ("its disk opens for nobody, root included", no_disk),
    "realtime": ("the engine's control group gives nobody real time", no_real_time),
    "killed_last": ("root lacks SYS_RESOURCE", lambda: "SYS_RESOURCE" not in our_capabilities()),
}
"""By attempt: the reason, and a function that returns True if it applies to this machine."""
