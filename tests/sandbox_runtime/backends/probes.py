"""Programs that try forbidden operations from inside, and programs for permitted operations."""

import errno
import json
import os

from sandbox_runtime.backends.seccomp import REFUSED, SYSCALL_NUMBERS, UNIMPLEMENTED

_NUMBERS = SYSCALL_NUMBERS[os.uname().machine]

PROGRAM = """
import ctypes, json, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def error(number, *arguments):
    ctypes.set_errno(0)
    if libc.syscall(number, *map(ctypes.c_ulong, arguments)) == -1:
        return ctypes.get_errno()
    return 0
def family_error(family):
    try:
        socket.socket(family, socket.SOCK_DGRAM if family != 38 else socket.SOCK_SEQPACKET).close()
    except OSError as problem:
        return problem.errno
    return 0
calls = json.loads(sys.argv[1])
print(json.dumps({
    **{name: error(number, *[2**64 - 1] * 6) for name, number in calls["plain"].items()},
    **{name: error(*call) for name, call in calls["examined"].items()},
    **{str(family): family_error(family) for family in (16, 38)},
}))
"""
FREE_FOR_ALL = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "add_key"),
    *("request_key", "keyctl", "vmsplice", "name_to_handle_at", "setns", "open_tree", "mbind"),
    *("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("unshare", "personality", "tiocsti", "16", "38"),
)
"""System calls that the kernel itself permits to an unprivileged process."""


def calls(only: tuple[str, ...] | None = None) -> str:
    """Return the argument of PROGRAM."""
    new_user, no_randomisation, tiocsti = 0x1000_0000, 0x0004_0000, 0x5412
    examined = {
        "unshare": (_NUMBERS["unshare"], new_user),
        "personality": (_NUMBERS["personality"], no_randomisation),
        "tiocsti": (_NUMBERS["ioctl"], 0, tiocsti, 0),
    }
    plain = {
        name: _NUMBERS[name]
        for name in REFUSED | UNIMPLEMENTED
        if name in _NUMBERS and (only is None or name in only)
    }
    return json.dumps({"plain": plain, "examined": examined})


def refusals(printed: str) -> dict[str, int]:
    """Return the calls printed by PROGRAM that did not fail as expected: none if all is denied."""
    errors: dict[str, int] = json.loads(printed)
    assert errors.keys() >= (REFUSED | UNIMPLEMENTED) & _NUMBERS.keys()
    families = dict.fromkeys(("16", "38"), errno.EAFNOSUPPORT)
    expected = (
        dict.fromkeys(errors, errno.EPERM) | dict.fromkeys(UNIMPLEMENTED, errno.ENOSYS) | families
    )
    return {name: error for name, error in errors.items() if error != expected[name]}


EVERYDAY = """
import asyncio, multiprocessing, subprocess, threading
def double(n): return 2 * n
async def shell():
    process = await asyncio.create_subprocess_shell("echo asyncio", stdout=-1)
    return (await process.communicate())[0].decode().strip()
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(double, [1, 2]))
print(asyncio.run(shell()), subprocess.check_output(["echo", "subprocess"], text=True).strip())
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
"""
EVERYDAY_PRINTS = "[2, 4]\nasyncio subprocess\nthread\n"
"""A program that uses many permitted operations, and its output."""


WRITABLE_MOUNTS = """
import os
for line in open("/proc/self/mounts"):
    source, point = line.split()[:2]
    for name in (point + "/probe", point):
        try:
            os.close(os.open(name, os.O_WRONLY | (os.O_CREAT if name != point else 0)))
            print(source, point)
        except OSError:
            pass
"""

INSTALL_USER_SCRIPT = """
import pathlib, sysconfig
script = pathlib.Path(sysconfig.get_path("scripts", "posix_user"), "greet")
script.parent.mkdir(parents=True)
script.write_text("#!/bin/sh\\necho hello\\n")
script.chmod(0o755)
"""
"""Writes a program where `pip install --user` puts the scripts of a package."""
