"""The chain of programs that puts a sandbox together, each giving way to the next.

sh (enter the cgroup) → setpriv (stop being root) → unshare (a namespace for mounts) → sh (the disk,
and the overlay on a root file system) → bwrap → the payload. The process that is started is bwrap's
own in the end.
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
from sandbox_runtime.backends.limits import SANDBOX, TERMINALS, guest_user

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_ENTER_CGROUPS = """
while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done
shift
exec "$@"
"""
# The disk hides /sys: a directory that every host has and where no root file system lies. Nobody
# else sees it, for this namespace of mounts ends with the sandbox. One process mounts all there is:
# each takes 2 ms.
_MAKE_DISK = f"""
set -e
umask 022
mount --all --fstab "$1"
shift
mkdir -p /sys/testbed /sys/root /sys/home /sys/run /sys/etc /sys/tmp /sys/var/tmp /sys/shm
chmod 1777 /sys/tmp /sys/var/tmp /sys/shm
echo '127.0.0.1 localhost sandbox
::1 localhost' > /sys/etc/hosts
echo 'root:x:0:0:root:/root:/bin/bash
{SANDBOX.name}:x:{SANDBOX.uid}:{SANDBOX.uid}::{SANDBOX.home}:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin' > /sys/etc/passwd
echo 'root:x:0:
{SANDBOX.name}:x:{SANDBOX.uid}:
nogroup:x:65534:' > /sys/etc/group
echo 'passwd: files
group: files
hosts: files' > /sys/etc/nsswitch.conf
exec "$@"
"""
# The lower directory is the current one: reached without its path, which the user may be unable to
# walk, and which would need escaping. Nor is it to be read in process 1's environment.
_MAKE_ROOT = """
set -e
mkdir /sys/upper /sys/work /sys/rootfs
options=userxattr,lowerdir=.,upperdir=/sys/upper,workdir=/sys/work
mount -t overlay -o "$options" overlay /sys/rootfs
unset PWD
exec "$@"
"""
_DEVICE_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_WALLS = (
    *("--unshare-all", "--unshare-user", "--hostname", "sandbox", "--cap-drop", "ALL"),
    # As process 1 nothing inside can kill the agent, and it collects the orphans.
    *("--new-session", "--die-with-parent", "--as-pid-1", "--clearenv"),
)
# Bubblewrap's own tmpfs at / and /dev have no size: nobody may write there. Its --dev would mount
# terminals of its own, which have no bound.
_DEVICES = (
    *("--proc", "/proc", "--tmpfs", "/dev"),
    *chain.from_iterable(("--dev-bind", name, name) for name in _DEVICE_FILES),
    *("--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/proc/self/fd/0", "/dev/stdin"),
    *("--symlink", "/proc/self/fd/1", "/dev/stdout", "--symlink", "/proc/self/fd/2", "/dev/stderr"),
    *("--symlink", "/proc/kcore", "/dev/core", "--symlink", "pts/ptmx", "/dev/ptmx"),
    *("--bind", "/sys/shm", "/dev/shm", "--dev-bind", "/sys/pts", "/dev/pts"),
)
_SEAL_DEVICES = ("--remount-ro", "/dev")
_SEAL_ROOT = ("--remount-ro", "/")
_HOST_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_HOST_DATA = (
    *("/etc/ld.so.cache", "/etc/alternatives"),
    # Whom TLS trusts, as each family of distributions has it; never /etc/ssl/private beside it.
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ca-certificates/extracted"),
    *("/etc/pki/ca-trust/extracted", "/etc/pki/tls/certs"),
)
_OWN_PROGRAMS = "/var/local/bin"
"""Inside, behind all others: names that the host's /usr has not."""
_WRITABLE = ("/testbed", "/root", "/run", "/tmp", "/var/tmp")  # and /etc
_WRITABLE_STRICT = ("/testbed", "/home", "/tmp")


@dataclass(frozen=True, slots=True)
class Chain:
    """A sandbox to be put together."""

    isolation: Isolation
    cgroup_entrances: tuple[str, ...]
    host_uid: int
    mounts: int
    """The file descriptor of what `mount_table` returns."""
    has_own_root: bool
    """Its lower directory is then the one that the chain is started in."""
    seccomp: int
    """The file descriptor of the filter."""
    inputs: Path | None

    def command(self, payload: tuple[str, ...]) -> tuple[str, ...]:
        """What to start."""
        return (
            *_script(_ENTER_CGROUPS, *self.cgroup_entrances, "--"),
            *as_user(self.host_uid),
            *("unshare", "--user", "--map-root-user", "--mount"),
            *_script(_MAKE_DISK, f"/proc/self/fd/{self.mounts}"),
            *(_script(_MAKE_ROOT) if self.has_own_root else ()),
            *self._bwrap(),
            *payload,
        )

    def _bwrap(self) -> Iterator[str]:
        user = guest_user(self.isolation)
        yield from ("bwrap", *_WALLS, "--uid", str(user.uid), "--gid", str(user.uid))
        path = PATH if self.has_own_root else f"{PATH}:{_OWN_PROGRAMS}"
        for item in {"PATH": path, "LANG": "C.UTF-8", **user.env}.items():
            yield from ("--setenv", *item)
        yield from self._own_files() if self.has_own_root else _host_files(self._is_strict)
        if self.inputs:
            yield from ("--ro-bind", str(self.inputs), SHARED_DIR)
        yield from ("--seccomp", str(self.seccomp), "--chdir", "/", "--")

    def _own_files(self) -> Iterator[str]:
        yield from ("--bind", "/sys/rootfs", "/", "--dir", "/root", "--dir", "/tmp")
        yield from ("--bind", "/sys/etc/hosts", "/etc/hosts", *_DEVICES, *_SEAL_DEVICES)
        if self._is_strict:
            for name in _WRITABLE_STRICT:
                yield from ("--bind", f"/sys{name}", name)
            yield from _SEAL_ROOT

    @property
    def _is_strict(self) -> bool:
        return self.isolation.level == "strict"


def mount_table(disk_options: str) -> bytes:
    """Return the disk and the terminals of a sandbox in the format of fstab(5)."""
    return (
        f"disk /sys tmpfs {disk_options} 0 0\n"
        f"terminals /sys/pts devpts X-mount.mkdir,{TERMINALS} 0 0\n"
    ).encode()


@cache
def _host_files(is_strict: bool) -> tuple[str, ...]:
    """The part of the command for the host's own files, as they are when it is first needed."""
    command = ["--ro-bind", "/usr", "/usr"]
    for name in _HOST_LINKS:
        path = Path(name)
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            command += ["--ro-bind", name, name]
    command += ["--perms", "0755", "--dir", "/var", "--bind", "/sys/etc", "/etc"]
    if (python3 := _host_program("python3")) and not _host_program("python"):
        command += ["--symlink", python3, f"{_OWN_PROGRAMS}/python"]
    for name in _WRITABLE_STRICT if is_strict else _WRITABLE:
        command += ["--bind", f"/sys{name}", name]
    for name in _HOST_DATA:
        command += ["--ro-bind-try", name, name]
    command += [*_DEVICES, *_SEAL_DEVICES, *_SEAL_ROOT]
    if is_strict:
        command += ["--remount-ro", "/etc"]
    return tuple(command)


def _host_program(name: str) -> str | None:
    """Where a program of the host's /usr is found inside; None where it is not."""
    found = shutil.which(name, path=PATH)
    return found if found and Path(found).resolve().is_relative_to("/usr") else None


def as_user(uid: int) -> tuple[str, ...]:
    """What a command is preceded by to be run as that user, if we are root."""
    if os.geteuid() != 0:
        return ()
    user = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    return ("setpriv", *user, "--inh-caps=-all", "--no-new-privs", "--")


def _script(text: str, *arguments: str) -> tuple[str, ...]:
    """A shell script that takes `arguments` and gives way to the command after them."""
    return ("/bin/sh", "-c", text, "sh", *arguments)
