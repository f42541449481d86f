"""The bubblewrap backend: sandboxes in unprivileged Linux namespaces, without an engine.

Everything writable lies on one tmpfs, so the disk limit is a hard limit. Without `rootfs`,
sandboxes see the host's /usr (with /usr/local), /bin, /sbin and /lib read-only. Of /etc they see
the certificates that TLS trusts, OpenSSL's settings, the linker's cache and the alternatives. They
see nothing else of the host, except the directory `inputs`. The model can use the programs and
Python packages in /usr, and can read any secret that is kept there. Sandboxes share the host's
kernel: use this backend for development and for partly trusted models.
"""

import asyncio
import fcntl
import hashlib
import os
import platform
import resource
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from policies.isolation import Isolation
from sandbox_runtime.backends.base import (
    Check,
    Guest,
    cannot_adopt_error,
    parallel_starts_per_host,
)
from sandbox_runtime.backends.bubblewrap_check import PROBE, isolation_checks, start_failure_reason
from sandbox_runtime.backends.bubblewrap_command import (
    PATH,
    BwrapCommand,
    mount_table,
    setpriv_argv,
)
from sandbox_runtime.backends.cgroups import Cgroups, find_cgroups
from sandbox_runtime.backends.limits import (
    NOBODY,
    TMPFS_MEMORY_SHARE,
    guest_user,
    maps_host_uids,
    new_host_uid,
    rlimits,
    tmpfs_options,
    tmpfs_size_mib,
)
from sandbox_runtime.backends.process_guest import ProcessGuest, spawn
from sandbox_runtime.backends.seccomp import bpf_filter
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest.agent import GuestConfig, agent_program, config_message
from sandbox_runtime.sandbox import SandboxReference

_TRIAL_TIMEOUT_S = 10.0
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_UNPACK_COMMAND = ("tar", "--extract", "--file=-", "--no-same-owner", "--delay-directory-restore")
_EXCLUDE_DEVICES = ("--anchored", "--exclude=dev/*", "--exclude=./dev/*")


class BubblewrapBackend:
    """Starts sandboxes with bubblewrap.

    If the proxy is not root, sandboxes run as the proxy's user. If it is root, they run as `uid`.
    Choose a `uid` that nothing else on the host uses: a program that escapes has the rights of its
    sandbox's user. If the proxy is root and `uid` is None, each sandbox has a uid of its own from
    HOST_UIDS. But if HOST_UIDS are not mapped on this host, or if there is a `rootfs`, whose files
    belong to one user, all sandboxes run as nobody.

    `rootfs` is a directory that belongs to the sandboxes' user, or a tar archive as `docker export`
    writes it, which is unpacked once below `state_dir`. Without it, sandboxes have the host's /usr.
    `inputs` is a directory that all sandboxes see read-only; their users must be able to access it.
    With `allow_weak`, `check` accepts a host without cgroups, where the memory and processes of a
    sandbox are not limited as a whole. Raises SandboxStartError if no agent was built for this
    machine.
    """

    def __init__(
        self,
        *,
        rootfs: Path | None = None,
        uid: int | None = None,
        state_dir: Path,
        inputs: Path | None = None,
        allow_weak: bool = False,
    ) -> None:
        self._rootfs = rootfs
        self._allow_weak = allow_weak
        self._state_dir = state_dir
        if uid is None and (rootfs or not maps_host_uids()):
            uid = NOBODY
        self._uid = os.geteuid() or uid
        self._inputs = inputs
        # Read now, so that an update on disk does not change the agent of a running server.
        self._agent = agent_program(platform.machine()).read_bytes()
        self._agent_fd: int | None = None
        self._prepared_rootfs: tuple[str, Path] | None = None
        self._prepare_lock = asyncio.Lock()

    @property
    def name(self) -> str:
        return "bubblewrap"

    @property
    def accepted_escapes(self) -> Mapping[str, str]:
        return {}

    @property
    def capacity(self) -> None:
        return None

    @property
    def parallel_starts(self) -> int:
        return parallel_starts_per_host()

    @property
    def can_resize(self) -> bool:
        return True

    @property
    def max_outage_s(self) -> float:
        return 0.0

    async def start(self, isolation: Isolation) -> ProcessGuest:
        message = config_message(self._guest_config(isolation))
        agent = self._agent_descriptor()
        # Executed from an open descriptor, so that the sandbox needs no file with the program.
        guest = await self._spawn(isolation, (f"/proc/self/fd/{agent}",), agent)
        guest.write(message)
        return guest

    @property
    def can_adopt(self) -> bool:
        return False

    async def adopt(self, reference: SandboxReference) -> Guest:
        raise cannot_adopt_error(self.name)

    async def fingerprint(self) -> str:
        if self._rootfs is None:
            return "the host's /usr"
        return await asyncio.to_thread(_rootfs_fingerprint, self._rootfs)

    async def sweep(self) -> int:
        return await self._cgroups.sweep() if self._cgroups else 0

    async def check(self) -> list[Check]:
        found = [await asyncio.to_thread(_check_installed), self._check_user()]
        if all(check.ok for check in found):
            found += await self._try_sandbox()
        return [*found, self._check_limits()]

    async def aclose(self) -> None:
        if self._agent_fd is not None:
            os.close(self._agent_fd)
            self._agent_fd = None

    @cached_property
    def _cgroups(self) -> Cgroups | None:
        return find_cgroups()

    def _agent_descriptor(self) -> int:
        """Return the descriptor of the agent's program, which all sandboxes share."""
        if self._agent_fd is None:
            # Sealed, so that a sandbox, which can open the file, cannot change it for others.
            self._agent_fd = _sealed_memfd("agent", self._agent)
        return self._agent_fd

    async def _spawn(
        self, isolation: Isolation, payload: tuple[str, ...], *descriptors: int
    ) -> ProcessGuest:
        uid = new_host_uid() if self._uid is None else self._uid
        if uid == 0:
            # Even without capabilities, root in a sandbox can set the host's core_pattern.
            raise SandboxStartError(
                "bubblewrap must not run sandboxes as root: configure another uid"
            )
        root = await self._root_directory(uid)
        id = secrets.token_hex(6)
        with (
            ExitStack() as undo,
            _open_sealed_memfd("seccomp", _seccomp_code()) as seccomp,
            _open_sealed_memfd("mounts", mount_table(self._disk_options(isolation))) as mounts,
        ):
            cgroup = self._cgroups.create(id, isolation) if self._cgroups else None
            if cgroup:
                undo.callback(cgroup.remove_empty)
            command = BwrapCommand(
                isolation,
                cgroup_procs_files=cgroup.procs_files if cgroup else (),
                host_uid=uid,
                mounts_fd=mounts,
                has_own_root=root is not None,
                seccomp_fd=seccomp,
                inputs=self._inputs,
            )
            # Not our own environment: that of process 1 can be read inside the sandbox.
            guest = await spawn(
                id,
                command.argv(payload),
                cwd=root or Path("/"),
                env={"PATH": PATH, "LC_ALL": "C"},
                pass_fds=(seccomp, mounts, *descriptors),
                cgroup=cgroup,
            )
            undo.pop_all()
        return guest

    async def _root_directory(self, uid: int) -> Path | None:
        """Return the directory of the root file system, or None for the host's /usr."""
        if self._rootfs is None:
            return None
        async with self._prepare_lock:
            fingerprint = await self.fingerprint()
            if self._prepared_rootfs is None or self._prepared_rootfs[0] != fingerprint:
                prepared = await asyncio.to_thread(
                    _prepare_rootfs,
                    self._rootfs,
                    cache=self._state_dir / "rootfs",
                    uid=uid,
                    as_uid=setpriv_argv(uid),
                )
                self._prepared_rootfs = (fingerprint, prepared)
            return self._prepared_rootfs[1]

    def _disk_options(self, isolation: Isolation) -> str:
        """Return the mount options of the sandbox's disk."""
        size_mib = tmpfs_size_mib(isolation) if self._cgroups else isolation.disk_mib
        return f"{tmpfs_options(size_mib)},mode=0700"

    def _guest_config(self, isolation: Isolation) -> GuestConfig:
        config = GuestConfig(rlimits=self._rlimits(isolation))
        return replace(config, directories=(*config.directories, guest_user(isolation).home))

    def _rlimits(self, isolation: Isolation) -> Mapping[str, int]:
        limits = dict(rlimits(isolation))
        if self._cgroups is None:
            limits |= {"as": isolation.memory_mib << 20, "nproc": isolation.pids}
        named = {f"RLIMIT_{name.upper()}": value for name, value in limits.items()}
        return {name: _cap_at_hard_limit(name, value) for name, value in named.items()}

    def _check_user(self) -> Check:
        if self._uid is None:
            return Check("user", True, "each sandbox runs as a host uid of its own")
        detail = f"sandboxes run as host uid {self._uid}"
        return Check("user", self._uid != 0, detail if self._uid else f"{detail}: refused")

    def _check_limits(self) -> Check:
        if self._cgroups is None:
            return Check(
                "bounds",
                self._allow_weak,
                "per process only (RLIMIT_AS, RLIMIT_NPROC), because no cgroup is writable here: a"
                " sandbox can use all of the host's memory. Run as root, or in a systemd unit with"
                " Delegate=yes; or pass --allow-weak",
            )
        controllers = ", ".join(self._cgroups.controllers)
        share = f"the disk takes at most {TMPFS_MEMORY_SHARE:.0%} of the memory"
        detail = f"per sandbox, by cgroup v{self._cgroups.version}: {controllers}; {share}"
        return Check("bounds", True, detail)

    async def _try_sandbox(self) -> list[Check]:
        try:
            guest = await self._spawn(Isolation(), ("/bin/sh", "-c", PROBE))
        except SandboxStartError as error:
            return [Check("trial", False, str(error))]
        try:
            printed = await _read_output(guest)
        finally:
            await guest.kill()
        if not printed:
            reason = (guest.diagnostics().splitlines() or ["no error output"])[-1]
            return [
                Check("trial", False, f"no sandbox starts: {reason} ({start_failure_reason()})")
            ]
        return [Check("trial", True, "a sandbox starts"), *isolation_checks(printed)]


def _seccomp_code() -> bytes:
    """Return the system call filter. Raises SandboxStartError."""
    try:
        return bpf_filter()
    except ValueError as error:
        raise SandboxStartError(f"bubblewrap cannot be used: {error}") from error


@contextmanager
def _open_sealed_memfd(name: str, content: bytes) -> Iterator[int]:
    descriptor = _sealed_memfd(name, content)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sealed_memfd(name: str, content: bytes) -> int:
    """Return the descriptor of an immutable, executable file in memory. The caller closes it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], written)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def _cap_at_hard_limit(name: str, value: int) -> int:
    """Return `value`, or the proxy's own hard limit if that is lower. Only root could raise a hard
    limit."""
    _, hard = resource.getrlimit(getattr(resource, name))
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _check_installed() -> Check:
    missing = [
        name
        for name in ("bwrap", "setpriv", "unshare", "mount")
        if not shutil.which(name, path=PATH)
    ]
    if missing:
        need = "install bubblewrap and util-linux"
        return Check("bubblewrap", False, f"{', '.join(missing)} not found: {need}")
    done = subprocess.run(["bwrap", "--version"], capture_output=True, check=False, text=True)
    return Check("bubblewrap", done.returncode == 0, done.stdout.strip() or done.stderr.strip())


async def _read_output(guest: ProcessGuest) -> bytes:
    """Return all output of the guest, or b"" if the guest does not end in time."""
    printed = bytearray()
    try:
        async with asyncio.timeout(_TRIAL_TIMEOUT_S):
            await guest.receive(printed.extend)
    except TimeoutError:
        return b""
    return bytes(printed)


def _prepare_rootfs(rootfs: Path, *, cache: Path, uid: int, as_uid: tuple[str, ...]) -> Path:
    """Return the directory of a root file system that belongs to `uid`. It is `rootfs` itself, or,
    if that is a tar archive, a directory below `cache` into which the archive is unpacked once.
    `as_uid` is the command prefix that runs a command as that user. Raises SandboxStartError."""
    try:
        directory = _unpack_once(rootfs, cache, uid, as_uid) if rootfs.is_file() else rootfs
        owner = directory.stat().st_uid
    except OSError as error:
        raise SandboxStartError(f"cannot use rootfs {str(rootfs)!r}: {error}") from error
    if owner != uid:
        raise SandboxStartError(
            f"rootfs {str(directory)!r} belongs to uid {owner}, but sandboxes run as uid {uid}:"
            " change its owner or configure a tar archive"
        )
    return directory


def _rootfs_fingerprint(rootfs: Path) -> str:
    """Return an id that changes when the directory or archive changes. Raises SandboxStartError."""
    try:
        status = rootfs.stat()
    except OSError as error:
        raise SandboxStartError(f"cannot use rootfs {str(rootfs)!r}: {error}") from error
    return f"{rootfs}:{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def _unpack_once(archive: Path, cache: Path, uid: int, as_uid: tuple[str, ...]) -> Path:
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache / digest
    # No other user may enter it. A sandbox starts in the directory, so it needs no access by path.
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (cache / f"{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            partial = cache / f"{digest}.partial"
            if partial.exists():
                shutil.rmtree(partial)
            _unpack(archive, partial, uid, as_uid)
            partial.rename(target)
    return target


def _unpack(archive: Path, target: Path, uid: int, as_uid: tuple[str, ...]) -> None:
    target.mkdir()
    os.chown(target, uid, -1)
    with archive.open("rb") as file:
        # The archive and the directory are passed open, because the user may have no access to
        # their paths, such as below /root.
        done = subprocess.run(
            (*as_uid, *_UNPACK_COMMAND, *_EXCLUDE_DEVICES),
            cwd=target,
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
    if done.returncode != 0:
        shutil.rmtree(target, ignore_errors=True)
        errors = done.stderr.decode(errors="replace").strip().splitlines()
        raise SandboxStartError(f"cannot unpack {str(archive)!r}: {' / '.join(errors[:3])}")
