"""Sandboxes without an engine: unprivileged Linux namespaces, put together by bubblewrap.

Each start is one chain of programs that replace each other, so the process we hold is bubblewrap's
own in the end: sh (enter the cgroup) → setpriv (stop being root) → unshare (a namespace for
mounts) → sh (the disk, and the overlay on a root file system) → bwrap → the agent.

Everything writable lies on one tmpfs, so the disk's bound is a hard one. Without `rootfs`,
sandboxes see the host's /usr as it is, /usr/local included, read-only, and nothing else of the
host: programs and Python packages there are at the model's disposal, and so is a secret kept there.
Kernel and processor are shared with the host: good for development and for models one half trusts.
"""

import asyncio
import json
import os
import resource
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Check
from sandbox_runtime.backends.bubblewrap_check import PROBE, Observed, hindrance, walls
from sandbox_runtime.backends.cgroups import Cgroups, find_cgroups
from sandbox_runtime.backends.process_guest import ProcessGuest, spawn
from sandbox_runtime.backends.rootfs import prepare_rootfs
from sandbox_runtime.backends.seccomp import seccomp_filter
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest.bootstrap import COMMAND, GuestConfig, program

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_GUEST_ENV = {"PATH": _PATH, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8"}
_NOBODY = 65534
_TRIAL_TIMEOUT_S = 10.0

_DISK_SHARE_OF_MEMORY = 0.75
"""How much of its memory a sandbox may fill with files: a full disk is to be an error that the
model can read, not the end of all its processes."""
_INODES_PER_MIB = 128
"""A file of no bytes takes kernel memory too."""

_ENTER_CGROUPS = """
while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done
shift
exec "$@"
"""
# The disk hides /sys: a directory that every host has and where no root file system lies. Nobody
# else sees it, for this namespace of mounts ends with the sandbox.
_MAKE_DISK = """
set -e
umask 022
mount -t tmpfs -o "$1" disk /sys
shift
mkdir -p /sys/testbed /sys/root /sys/run /sys/etc /sys/tmp /sys/var/tmp /sys/shm
chmod 1777 /sys/tmp /sys/var/tmp /sys/shm
echo '127.0.0.1 localhost sandbox
::1 localhost' > /sys/etc/hosts
echo 'root:x:0:0:root:/root:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin' > /sys/etc/passwd
echo 'root:x:0:
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
_WALLS = (
    *("--unshare-all", "--unshare-user", "--hostname", "sandbox", "--cap-drop", "ALL"),
    *("--new-session", "--die-with-parent", "--clearenv"),
)
# Bubblewrap's own tmpfs at / and /dev have no size: nobody may write there.
_DEVICES = ("--proc", "/proc", "--dev", "/dev", "--bind", "/sys/shm", "/dev/shm")
_SEAL = ("--remount-ro", "/dev")
_HOST_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_HOST_DATA = ("/etc/ld.so.cache", "/etc/alternatives")
_WRITABLE = ("/testbed", "/root", "/run", "/etc", "/tmp", "/var/tmp")


class BubblewrapBackend:
    """Sandboxes by bubblewrap, as `uid` when we are root and as ourselves when not.

    A `uid` that nothing else on the host uses is best: what escapes has that user's powers.

    `rootfs` is a directory that belongs to that user or a tar as `docker export` writes it, which
    is unpacked once below `state_dir`. With none, sandboxes have the host's /usr.
    """

    def __init__(self, *, rootfs: Path | None = None, uid: int = _NOBODY, state_dir: Path) -> None:
        self._rootfs = rootfs
        self._state_dir = state_dir
        self._uid = os.geteuid() or uid
        self._prepared: Path | None = None
        self._preparing = asyncio.Lock()

    @property
    def name(self) -> str:
        return "bubblewrap"

    async def start(self, isolation: Isolation) -> ProcessGuest:
        agent = program(GuestConfig(rlimits=self._rlimits(isolation), env=_GUEST_ENV))
        guest = await self._spawn(isolation, COMMAND)
        guest.write(agent)
        return guest

    async def sweep(self) -> int:
        return await self._cgroups.sweep() if self._cgroups else 0

    async def check(self) -> list[Check]:
        found = [await asyncio.to_thread(_installed), self._payload_user()]
        if all(check.ok for check in found):
            found += await self._trial()
        return [*found, self._bounds()]

    async def aclose(self) -> None:
        """Nothing is held."""

    @cached_property
    def _cgroups(self) -> Cgroups | None:
        return find_cgroups()

    async def _spawn(self, isolation: Isolation, payload: tuple[str, ...]) -> ProcessGuest:
        if self._uid == 0:
            # As root even a sandbox without capabilities can set the host's core_pattern.
            raise SandboxStartError("bubblewrap runs nothing as root: configure another uid")
        root = await self._root()
        id = secrets.token_hex(6)
        with ExitStack() as undo, _seccomp_file() as seccomp:
            cgroup = self._cgroups.create(id, isolation) if self._cgroups else None
            if cgroup:
                undo.callback(cgroup.discard)
            command = (
                *_script(_ENTER_CGROUPS, *(cgroup.entrances if cgroup else ()), "--"),
                *_as_user(self._uid),
                *("unshare", "--user", "--map-root-user", "--mount"),
                *_script(_MAKE_DISK, self._disk(isolation)),
                *(_script(_MAKE_ROOT) if root else ()),
                *_bwrap(seccomp, own_root=root is not None),
                *payload,
            )
            # An environment of its own: that of process 1 can be read inside the sandbox.
            guest = await spawn(
                id,
                command,
                cwd=root or Path("/"),
                env={"PATH": _PATH, "LC_ALL": "C"},
                pass_fds=(seccomp,),
                cgroup=cgroup,
            )
            undo.pop_all()
        return guest

    async def _root(self) -> Path | None:
        """The root file system; None for the host's /usr."""
        if self._rootfs is None:
            _require_host_python()
            return None
        async with self._preparing:
            if self._prepared is None:
                self._prepared = await asyncio.to_thread(
                    prepare_rootfs,
                    self._rootfs,
                    cache=self._state_dir / "rootfs",
                    uid=self._uid,
                    as_uid=_as_user(self._uid),
                )
        return self._prepared

    def _disk(self, isolation: Isolation) -> str:
        """Mount options. With a cgroup, what files take is taken from the sandbox's memory."""
        size_mib = isolation.disk_mib
        if self._cgroups:
            size_mib = min(size_mib, int(isolation.memory_mib * _DISK_SHARE_OF_MEMORY))
        return f"size={size_mib}m,nr_inodes={size_mib * _INODES_PER_MIB},mode=0700,nosuid,nodev"

    def _rlimits(self, isolation: Isolation) -> Mapping[str, int]:
        # With 0 the host's core handler would still be started, as root, by a crash in here: only 1
        # byte keeps the kernel from it.
        limits = {"RLIMIT_NOFILE": isolation.open_files, "RLIMIT_CORE": 1}
        if self._cgroups is None:
            limits |= {"RLIMIT_AS": isolation.memory_mib << 20, "RLIMIT_NPROC": isolation.pids}
        return {name: _at_most_ours(name, value) for name, value in limits.items()}

    def _payload_user(self) -> Check:
        detail = f"sandboxes run as host uid {self._uid}"
        return Check("user", self._uid != 0, detail if self._uid else f"{detail}: refused")

    def _bounds(self) -> Check:
        if self._cgroups is None:
            detail = "per process only (no cgroup can be written here): RLIMIT_AS, RLIMIT_NPROC"
        else:
            controllers = ", ".join(self._cgroups.controllers)
            share = f"the disk takes at most {_DISK_SHARE_OF_MEMORY:.0%} of the memory"
            detail = f"per sandbox, by cgroup v{self._cgroups.version}: {controllers}; {share}"
        return Check("bounds", True, detail)

    async def _trial(self) -> list[Check]:
        try:
            guest = await self._spawn(Isolation(), ("python3", "-I", "-S", "-c", PROBE))
        except SandboxStartError as error:
            return [Check("trial", False, str(error))]
        try:
            printed = await _read_all(guest)
        finally:
            await guest.kill()
        if not printed:
            said = (guest.last_words().splitlines() or ["it said nothing"])[-1]
            return [Check("trial", False, f"no sandbox starts: {said} ({hindrance()})")]
        observed: Observed = json.loads(printed)
        return [Check("trial", True, "a sandbox starts"), *walls(observed)]


def _script(text: str, *arguments: str) -> tuple[str, ...]:
    """A shell script that takes `arguments` and gives way to the command after them."""
    return ("/bin/sh", "-c", text, "sh", *arguments)


def _as_user(uid: int) -> tuple[str, ...]:
    if os.geteuid() != 0:
        return ()
    user = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    return ("setpriv", *user, "--inh-caps=-all", "--no-new-privs", "--")


def _bwrap(seccomp: int, *, own_root: bool) -> tuple[str, ...]:
    if own_root:
        files: tuple[str, ...] = (
            *("--bind", "/sys/rootfs", "/", "--dir", "/root", "--dir", "/tmp"),
            *("--bind", "/sys/etc/hosts", "/etc/hosts", *_DEVICES, *_SEAL),
        )
    else:
        files = (*_host_files(), *_DEVICES, *_SEAL, "--remount-ro", "/")
    env = [part for item in _GUEST_ENV.items() for part in ("--setenv", *item)]
    return ("bwrap", *_WALLS, *env, *files, "--seccomp", str(seccomp), "--chdir", "/", "--")


def _host_files() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in _HOST_LINKS:
        path = Path(name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), name)
        elif path.is_dir():
            yield from ("--ro-bind", name, name)
    yield from ("--perms", "0755", "--dir", "/var")
    for name in _WRITABLE:
        yield from ("--bind", f"/sys{name}", name)
    for name in _HOST_DATA:
        yield from ("--ro-bind-try", name, name)


@contextmanager
def _seccomp_file() -> Iterator[int]:
    try:
        code = seccomp_filter()
    except ValueError as error:
        raise SandboxStartError(f"bubblewrap cannot be used: {error}") from error
    descriptor = os.memfd_create("seccomp")
    try:
        os.pwrite(descriptor, code, 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _require_host_python() -> None:
    found = shutil.which("python3", path=_PATH)
    if found is None or not Path(found).resolve().is_relative_to("/usr"):
        raise SandboxStartError("the host has no python3 in /usr: install it or configure a rootfs")


def _at_most_ours(name: str, value: int) -> int:
    """Without privileges a limit can only be lowered."""
    _, hard = resource.getrlimit(getattr(resource, name))
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _installed() -> Check:
    missing = [
        name
        for name in ("bwrap", "setpriv", "unshare", "mount")
        if not shutil.which(name, path=_PATH)
    ]
    if missing:
        need = "install bubblewrap and util-linux"
        return Check("bubblewrap", False, f"{', '.join(missing)} not found: {need}")
    said = subprocess.run(["bwrap", "--version"], capture_output=True, check=False, text=True)
    return Check("bubblewrap", said.returncode == 0, said.stdout.strip() or said.stderr.strip())


async def _read_all(guest: ProcessGuest) -> bytes:
    """What it prints until it ends; nothing if it does not end in time."""
    printed = b""
    try:
        async with asyncio.timeout(_TRIAL_TIMEOUT_S):
            while data := await guest.receive():
                printed += data
    except TimeoutError:
        return b""
    return printed
