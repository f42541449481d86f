"""The command that starts a bubblewrap sandbox: programs that each execute the next one.

sh (enters the cgroup) → setpriv (drops root) → unshare (new mount namespace) → sh (mounts the disk,
and the overlay on a root file system) → bwrap → the payload. Up to bwrap, they all run in one
process.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from policies.isolation import Isolation
from policies.workspace import SHARED_DIR
from sandbox_runtime.backends.limits import DEVPTS_OPTIONS, SANDBOX_USER, guest_user

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_ENTER_CGROUPS = """
while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done
shift
exec "$@"
"""
# The disk is mounted over /sys, which every host has and which never contains a root file system.
# Only the sandbox's own mount namespace sees it. One process makes all mounts, because each process
# takes 2 ms.
_MAKE_DISK = f"""
set -e
umask 022
mount --all --fstab "$1"
shift
tree=/sys/tree
mkdir -p $tree/testbed $tree/root $tree/home $tree/run $tree/etc $tree/tmp \\
  $tree/var/tmp $tree/dev/shm
chmod 1777 $tree/tmp $tree/var/tmp $tree/dev/shm
echo '127.0.0.1 localhost sandbox
::1 localhost' > $tree/etc/hosts
echo 'root:x:0:0:root:/root:/bin/bash
{SANDBOX_USER.name}:x:{SANDBOX_USER.uid}:{SANDBOX_USER.uid}::{SANDBOX_USER.home}:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin' > $tree/etc/passwd
echo 'root:x:0:
{SANDBOX_USER.name}:x:{SANDBOX_USER.uid}:
nogroup:x:65534:' > $tree/etc/group
echo 'passwd: files
group: files
hosts: files' > $tree/etc/nsswitch.conf
exec "$@"
"""
# The lower directory is the current one: the user may have no access to its path, which would also
# need escaping. PWD is unset because the environment of process 1 can be read inside.
_MAKE_ROOT = """
set -e
mkdir /sys/upper /sys/work /sys/rootfs
options=userxattr,lowerdir=.,upperdir=/sys/upper,workdir=/sys/work
mount -t overlay -o "$options" overlay /sys/rootfs
unset PWD
exec "$@"
"""
_DEVICE_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_ISOLATION = (
    *("--unshare-all", "--unshare-user", "--hostname", "sandbox", "--cap-drop", "ALL"),
    # As process 1 the agent cannot be killed from inside, and it reaps orphans.
    *("--new-session", "--die-with-parent", "--as-pid-1", "--clearenv"),
)
# Few binds, because bubblewrap reads the list of all mounts for each. Not --dev, which would mount
# pseudo-terminals without a limit.
_DEVICES = (
    *("--proc", "/proc"),
    *chain.from_iterable(("--dev-bind", name, name) for name in _DEVICE_FILES),
    *("--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/proc/self/fd/0", "/dev/stdin"),
    *("--symlink", "/proc/self/fd/1", "/dev/stdout", "--symlink", "/proc/self/fd/2", "/dev/stderr"),
    *("--symlink", "/proc/kcore", "/dev/core", "--symlink", "pts/ptmx", "/dev/ptmx"),
    *("--dev-bind", "/sys/pts", "/dev/pts"),
)
# Bubblewrap's own tmpfs (/dev, and / at `strict`) have no size limit, so they are read-only.
_SEALED_DEVICES = (
    *("--tmpfs", "/dev", *_DEVICES, "--bind", "/sys/tree/dev/shm", "/dev/shm"),
    *("--remount-ro", "/dev"),
)
_SEAL_ROOT = ("--remount-ro", "/")
_HOST_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_HOST_DATA = (
    *("/etc/ld.so.cache", "/etc/alternatives"),
    # The certificates that TLS trusts, for each family of distributions; never /etc/ssl/private.
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ca-certificates/extracted"),
    *("/etc/pki/ca-trust/extracted", "/etc/pki/tls/certs"),
)
_OWN_PROGRAM_DIR = "/var/local/bin"
"""A directory in the sandbox, last in PATH, for program names that the host's /usr lacks."""
_STRICT_WRITABLE_DIRS = ("/testbed", "/home", "/tmp")


@dataclass(frozen=True, slots=True)
class BwrapCommand:
    """The settings of the command that starts one sandbox."""

    isolation: Isolation
    cgroup_procs_files: tuple[str, ...]
    host_uid: int
    mounts_fd: int
    """A file descriptor with the output of `mount_table`."""
    has_own_root: bool
    """True if the sandbox has its own root file system, an overlay whose lower directory is the
    current directory of the command. Otherwise it has the host's /usr."""
    seccomp_fd: int
    """A file descriptor with the system call filter."""
    inputs: Path | None

    def argv(self, payload: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that starts the sandbox and runs `payload` in it."""
        return (
            *_script_command(_ENTER_CGROUPS, *self.cgroup_procs_files, "--"),
            *setpriv_argv(self.host_uid),
            *("unshare", "--user", "--map-root-user", "--mount"),
            *_script_command(_MAKE_DISK, f"/proc/self/fd/{self.mounts_fd}"),
            *(_script_command(_MAKE_ROOT) if self.has_own_root else ()),
            *self._bwrap_arguments(),
            *payload,
        )

    def _bwrap_arguments(self) -> Iterator[str]:
        user = guest_user(self.isolation)
        yield from ("bwrap", *_ISOLATION, "--uid", str(user.uid), "--gid", str(user.uid))
        path = user.search_path(PATH if self.has_own_root else f"{PATH}:{_OWN_PROGRAM_DIR}")
        for item in {"PATH": path, "LANG": "C.UTF-8", **user.env}.items():
            yield from ("--setenv", *item)
        yield from (
            self._own_root_arguments()
            if self.has_own_root
            else _host_root_arguments(self._is_strict)
        )
        if self.inputs:
            yield from ("--ro-bind", str(self.inputs), SHARED_DIR)
        yield from ("--seccomp", str(self.seccomp_fd), "--chdir", "/", "--")

    def _own_root_arguments(self) -> Iterator[str]:
        yield from ("--bind", "/sys/rootfs", "/", "--dir", "/root", "--dir", "/tmp")
        yield from ("--bind", "/sys/tree/etc/hosts", "/etc/hosts", *_SEALED_DEVICES)
        if self._is_strict:
            for name in _STRICT_WRITABLE_DIRS:
                yield from ("--bind", f"/sys/tree{name}", name)
            yield from _SEAL_ROOT

    @property
    def _is_strict(self) -> bool:
        return self.isolation.level == "strict"


def mount_table(disk_options: str) -> bytes:
    """Return the mounts of a sandbox's disk and terminals in the format of fstab(5)."""
    return (
        f"disk /sys tmpfs {disk_options} 0 0\n"
        f"terminals /sys/pts devpts X-mount.mkdir,{DEVPTS_OPTIONS} 0 0\n"
    ).encode()


@cache
def _host_root_arguments(is_strict: bool) -> tuple[str, ...]:
    """Return bwrap's arguments that show the host's files in the sandbox. The files are looked up
    once per process.

    At level `standard` the disk is mounted as the root directory, so no directory of the disk needs
    a bind of its own.
    """
    data = chain.from_iterable(("--ro-bind-try", name, name) for name in _HOST_DATA)
    if not is_strict:
        return ("--bind", "/sys/tree", "/", *_host_program_arguments(), *data, *_DEVICES)
    disk = chain.from_iterable(
        ("--bind", f"/sys/tree{name}", name) for name in (*_STRICT_WRITABLE_DIRS, "/etc")
    )
    seals = (*_SEAL_ROOT, "--remount-ro", "/etc")
    return (*_host_program_arguments(), *disk, *data, *_SEALED_DEVICES, *seals)


def _host_program_arguments() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in _HOST_LINKS:
        path = Path(name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), name)
        elif path.is_dir():
            yield from ("--ro-bind", name, name)
    yield from ("--perms", "0755", "--dir", "/var")
    if (python3 := _host_program("python3")) and not _host_program("python"):
        yield from ("--symlink", python3, f"{_OWN_PROGRAM_DIR}/python")


def _host_program(name: str) -> str | None:
    """Return the path of a program in the host's /usr, or None."""
    found = shutil.which(name, path=PATH)
    return found if found and Path(found).resolve().is_relative_to("/usr") else None


def setpriv_argv(uid: int) -> tuple[str, ...]:
    """Return the prefix that runs a command as this user; empty if the proxy is not root."""
    if os.geteuid() != 0:
        return ()
    user = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    return ("setpriv", *user, "--inh-caps=-all", "--no-new-privs", "--")


def _script_command(text: str, *arguments: str) -> tuple[str, ...]:
    """Return the first part of a command: a shell script with its `arguments`. The script executes
    the words that the caller appends."""
    return ("/bin/sh", "-c", text, "sh", *arguments)
