"""Sandboxes without an engine: unprivileged Linux namespaces, put together by bubblewrap.

Everything writable lies on one tmpfs, so the disk's bound is a hard one. Without `rootfs`,
sandboxes see the host's /usr as it is, /usr/local included, read-only, and nothing else of the
host but whom TLS trusts: programs and Python packages there are at the model's disposal, and so is
a secret kept there. Kernel and processor are shared with the host: good for development and for
models one half trusts.
"""

import asyncio
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
from sandbox_runtime.backends.base import Check
from sandbox_runtime.backends.bubblewrap_check import PROBE, hindrance, observed, walls
from sandbox_runtime.backends.bubblewrap_command import PATH, Chain, as_user, mount_table
from sandbox_runtime.backends.cgroups import Cgroups, find_cgroups
from sandbox_runtime.backends.limits import (
    NOBODY,
    SHARE_OF_MEMORY,
    guest_user,
    has_range,
    largest_disk_mib,
    new_uid,
    process_limits,
    tmpfs_options,
)
from sandbox_runtime.backends.process_guest import ProcessGuest, spawn
from sandbox_runtime.backends.rootfs import prepare_rootfs, rootfs_fingerprint
from sandbox_runtime.backends.sealed import sealed_copy
from sandbox_runtime.backends.seccomp import bpf_filter
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest.agent import GuestConfig, agent_program, first_message

LIFETIME_S = 24 * 3600.0
_TRIAL_TIMEOUT_S = 10.0


class BubblewrapBackend:
    """Sandboxes by bubblewrap, as `uid` when we are root and as ourselves when not.

    Without a `uid`, root gives each sandbox one of its own; with a `rootfs`, whose files belong to
    one user, all run as nobody. A `uid` that nothing else on the host uses is best: what escapes
    has that user's powers.

    `rootfs` is a directory that belongs to that user or a tar as `docker export` writes it, which
    is unpacked once below `state_dir`. With none, sandboxes have the host's /usr. `inputs` is a
    directory that all of them see, read-only; that user must be able to reach it. `lifetime_s` is
    how long one may live; 0 sets no end. `allow_weak`: whether sandboxes will do whose memory and
    processes nothing bounds together. Raises SandboxStartError where no agent was built for this
    machine.
    """

    def __init__(
        self,
        *,
        rootfs: Path | None = None,
        uid: int | None = None,
        state_dir: Path,
        inputs: Path | None = None,
        lifetime_s: float = LIFETIME_S,
        allow_weak: bool = False,
    ) -> None:
        self._rootfs = rootfs
        self._allow_weak = allow_weak
        self._state_dir = state_dir
        if uid is None and (rootfs or not has_range()):
            uid = NOBODY
        self._uid = os.geteuid() or uid
        self._inputs = inputs
        # Read now: an update on the disk must not change the agent of a server that runs.
        self._agent = agent_program(platform.machine()).read_bytes()
        self._agent_fd: int | None = None
        self._lifetime_s = lifetime_s
        self._prepared: tuple[str, Path] | None = None
        self._preparing = asyncio.Lock()

    @property
    def name(self) -> str:
        return "bubblewrap"

    async def start(self, isolation: Isolation) -> ProcessGuest:
        message = first_message(self._guest_config(isolation))
        agent = self._agent_file()
        # Handed over open and executed as such: it lies nowhere inside.
        guest = await self._spawn(isolation, (f"/proc/self/fd/{agent}",), agent)
        guest.write(message)
        return guest

    async def fingerprint(self) -> str:
        if self._rootfs is None:
            return "the host's /usr"
        return await asyncio.to_thread(rootfs_fingerprint, self._rootfs)

    async def sweep(self) -> int:
        return await self._cgroups.sweep() if self._cgroups else 0

    async def check(self) -> list[Check]:
        found = [await asyncio.to_thread(_installed), self._payload_user()]
        if all(check.ok for check in found):
            found += await self._trial()
        return [*found, self._bounds()]

    async def aclose(self) -> None:
        if self._agent_fd is not None:
            os.close(self._agent_fd)
            self._agent_fd = None

    @cached_property
    def _cgroups(self) -> Cgroups | None:
        return find_cgroups()

    def _agent_file(self) -> int:
        """Return the agent's program as an open file, one for all sandboxes."""
        if self._agent_fd is None:
            # Sealed: who can open the file that he runs could else change it for all the others.
            self._agent_fd = sealed_copy("agent", self._agent)
        return self._agent_fd

    async def _spawn(
        self, isolation: Isolation, payload: tuple[str, ...], *descriptors: int
    ) -> ProcessGuest:
        uid = new_uid() if self._uid is None else self._uid
        if uid == 0:
            # As root even a sandbox without capabilities can set the host's core_pattern.
            raise SandboxStartError("bubblewrap runs nothing as root: configure another uid")
        root = await self._root(uid)
        id = secrets.token_hex(6)
        with (
            ExitStack() as undo,
            _sealed("seccomp", _seccomp_code()) as seccomp,
            _sealed("mounts", mount_table(self._disk(isolation))) as mounts,
        ):
            cgroup = self._cgroups.create(id, isolation) if self._cgroups else None
            if cgroup:
                undo.callback(cgroup.discard)
            chain = Chain(
                isolation,
                cgroup_entrances=cgroup.entrances if cgroup else (),
                host_uid=uid,
                mounts=mounts,
                has_own_root=root is not None,
                seccomp=seccomp,
                inputs=self._inputs,
            )
            # An environment of its own: that of process 1 can be read inside the sandbox.
            guest = await spawn(
                id,
                chain.command(payload),
                cwd=root or Path("/"),
                env={"PATH": PATH, "LC_ALL": "C"},
                pass_fds=(seccomp, mounts, *descriptors),
                cgroup=cgroup,
            )
            undo.pop_all()
        return guest

    async def _root(self, uid: int) -> Path | None:
        """The root file system; None for the host's /usr."""
        if self._rootfs is None:
            return None
        async with self._preparing:
            fingerprint = await self.fingerprint()
            if self._prepared is None or self._prepared[0] != fingerprint:
                prepared = await asyncio.to_thread(
                    prepare_rootfs,
                    self._rootfs,
                    cache=self._state_dir / "rootfs",
                    uid=uid,
                    as_uid=as_user(uid),
                )
                self._prepared = (fingerprint, prepared)
            return self._prepared[1]

    def _disk(self, isolation: Isolation) -> str:
        """Mount options."""
        size_mib = largest_disk_mib(isolation) if self._cgroups else isolation.disk_mib
        return f"{tmpfs_options(size_mib)},mode=0700"

    def _guest_config(self, isolation: Isolation) -> GuestConfig:
        config = GuestConfig(rlimits=self._rlimits(isolation), lifetime_s=self._lifetime_s)
        return replace(config, directories=(*config.directories, guest_user(isolation).home))

    def _rlimits(self, isolation: Isolation) -> Mapping[str, int]:
        limits = dict(process_limits(isolation))
        if self._cgroups is None:
            limits |= {"as": isolation.memory_mib << 20, "nproc": isolation.pids}
        named = {f"RLIMIT_{name.upper()}": value for name, value in limits.items()}
        return {name: _at_most_ours(name, value) for name, value in named.items()}

    def _payload_user(self) -> Check:
        if self._uid is None:
            return Check("user", True, "each sandbox runs as a host uid of its own")
        detail = f"sandboxes run as host uid {self._uid}"
        return Check("user", self._uid != 0, detail if self._uid else f"{detail}: refused")

    def _bounds(self) -> Check:
        if self._cgroups is None:
            return Check(
                "bounds",
                self._allow_weak,
                "per process only (RLIMIT_AS, RLIMIT_NPROC), for no cgroup can be written here: a"
                " sandbox can take all of the host's memory. Run as root, or in a systemd unit with"
                " Delegate=yes; or say --allow-weak",
            )
        controllers = ", ".join(self._cgroups.controllers)
        share = f"the disk takes at most {SHARE_OF_MEMORY:.0%} of the memory"
        detail = f"per sandbox, by cgroup v{self._cgroups.version}: {controllers}; {share}"
        return Check("bounds", True, detail)

    async def _trial(self) -> list[Check]:
        try:
            guest = await self._spawn(Isolation(), ("/bin/sh", "-c", PROBE))
        except SandboxStartError as error:
            return [Check("trial", False, str(error))]
        try:
            printed = await _read_all(guest)
        finally:
            await guest.kill()
        if not printed:
            said = (guest.last_words().splitlines() or ["it said nothing"])[-1]
            return [Check("trial", False, f"no sandbox starts: {said} ({hindrance()})")]
        return [Check("trial", True, "a sandbox starts"), *walls(observed(printed))]


def _seccomp_code() -> bytes:
    """Return the filter of system calls. Raises SandboxStartError."""
    try:
        return bpf_filter()
    except ValueError as error:
        raise SandboxStartError(f"bubblewrap cannot be used: {error}") from error


@contextmanager
def _sealed(name: str, content: bytes) -> Iterator[int]:
    descriptor = sealed_copy(name, content)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _at_most_ours(name: str, value: int) -> int:
    """Without privileges a limit can only be lowered."""
    _, hard = resource.getrlimit(getattr(resource, name))
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _installed() -> Check:
    missing = [
        name
        for name in ("bwrap", "setpriv", "unshare", "mount")
        if not shutil.which(name, path=PATH)
    ]
    if missing:
        need = "install bubblewrap and util-linux"
        return Check("bubblewrap", False, f"{', '.join(missing)} not found: {need}")
    said = subprocess.run(["bwrap", "--version"], capture_output=True, check=False, text=True)
    return Check("bubblewrap", said.returncode == 0, said.stdout.strip() or said.stderr.strip())


async def _read_all(guest: ProcessGuest) -> bytes:
    """What it prints until it ends; nothing if it does not end in time."""
    printed = bytearray()
    try:
        async with asyncio.timeout(_TRIAL_TIMEOUT_S):
            await guest.listen(printed.extend)
    except TimeoutError:
        return b""
    return bytes(printed)
