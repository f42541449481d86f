"""Sandboxes in Docker containers, on a local or a remote engine.

The agent is the container's main process and is attached before it starts: no port is opened,
`docker exec` is never used. Its standard input closes when the proxy dies, the agent ends with it,
and the engine removes the container (`StdinOnce`, `AutoRemove`).
"""

import asyncio
import logging
import os
import platform
import socket
import time
import uuid
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import anyio

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Check
from sandbox_runtime.backends.disk_watch import DiskWatch, Usage
from sandbox_runtime.backends.docker_agent import AgentVolumes
from sandbox_runtime.backends.docker_api import Facts, MissingError
from sandbox_runtime.backends.docker_attach import attach
from sandbox_runtime.backends.docker_check import findings
from sandbox_runtime.backends.docker_container import Blueprint, Image, image_of, is_runsc
from sandbox_runtime.backends.docker_device import block_device
from sandbox_runtime.backends.docker_disk import DockerDisk
from sandbox_runtime.backends.docker_engine import ENGINE_ERRORS, Engine, said
from sandbox_runtime.backends.docker_guest import DockerGuest
from sandbox_runtime.backends.limits import FILES_PER_MIB, SANDBOX, guest_user, has_range, new_uid
from sandbox_runtime.backends.runsc_leftovers import RunscLeftovers
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest.agent import GuestConfig, agent_program, first_message
from sandbox_runtime.ownership import Owner

logger = logging.getLogger(__name__)

INSTALL_LABEL = "llm-sandbox-proxy.install"
OWNER_LABEL = "llm-sandbox-proxy.owner"
EXPIRES_LABEL = "llm-sandbox-proxy.expires"
LIFETIME_S = 24 * 3600.0
GET_IMAGE = "pull it, or build it with `sandbox-proxy build-image`"
_EXPIRY_GRACE_S = 60.0
_QUOTA_DRIVERS = ("btrfs", "zfs")

T = TypeVar("T")


class _Removals:
    """What a container's end means for those who keep an eye on it."""

    def __init__(self, watch: DiskWatch, leftovers: RunscLeftovers | None) -> None:
        self._watch = watch
        self._leftovers = leftovers
        self.pending: set[str] = set()
        """Ours, from before the engine is asked for one until after it was asked to remove it."""

    async def hasten(self, name: str) -> None:
        if self._leftovers:
            await asyncio.to_thread(self._leftovers.kill, name)

    async def over(self, name: str) -> None:
        self.pending.discard(name)
        self._watch.discard(name)
        if self._leftovers:
            await asyncio.to_thread(self._leftovers.end, name)


class DockerBackend:
    """A Docker engine and an image. `runtime` names one of the engine's, such as `runsc`.

    `inputs` is a directory on the engine's host that all sandboxes see, read-only. `lifetime_s` is
    how long one may live; 0 sets no end. Raises EngineMissingError where no engine answers, or,
    with `needs_image`, where it has not the image.
    """

    def __init__(
        self,
        image: str,
        *,
        state_dir: Path,
        runtime: str | None = None,
        host: str | None = None,
        inputs: Path | None = None,
        lifetime_s: float = LIFETIME_S,
        needs_image: bool = False,
    ) -> None:
        self._image = image
        self._runtime = runtime
        self._inputs = inputs
        self._lifetime_s = lifetime_s
        self._engine = Engine(host)
        if needs_image:
            self._engine.require_image(image)
        self._owner = Owner(state_dir)
        self._labels = {INSTALL_LABEL: self._owner.install_id, OWNER_LABEL: self._owner.id}
        self._agents = AgentVolumes(self._engine, self._labels)
        self._has_quota = _may_have_quota(self._engine.facts)
        directory = _directory(self._engine)
        self._watch = DiskWatch(DockerDisk(self._engine, directory))
        self._device = block_device(self._engine.facts, directory)
        if self._device.path is None:
            why = self._device.why_not
            logger.warning("nothing limits how fast sandboxes read and write the disk: %s", why)
        self._has_host_users = not is_runsc(runtime) and _has_host_users(self._engine)
        self._leftovers = RunscLeftovers(state_dir) if is_runsc(runtime) else None
        self._removals = _Removals(self._watch, self._leftovers)

    @property
    def name(self) -> str:
        return "docker"

    @property
    def runtimes(self) -> frozenset[str]:
        """What the engine can run containers with."""
        return frozenset(self._engine.facts.get("Runtimes") or ())

    async def start(self, isolation: Isolation) -> DockerGuest:
        name = f"sandbox-{self._owner.id}-{uuid.uuid4().hex[:12]}"
        guest = DockerGuest(name, self._engine, self._runtime, self._removals)
        self._removals.pending.add(name)
        try:
            message = await _to_its_end(self._create(name, isolation))
            guest.attachment = await attach(self._engine.url, self._engine.api_version, name)
            await self._engine.start(name)
            guest.write(message)
            await guest.drain()
        except (*ENGINE_ERRORS, OSError) as error:
            self._agents.forget()
            await guest.kill()
            raise SandboxStartError(
                f"cannot start a container of {self._image!r}: {said(error)}"
            ) from error
        except BaseException:  # refused or cancelled: nothing may be left on the engine
            with anyio.CancelScope(shield=True):
                await guest.kill()
            raise
        self._watch_disk(guest, isolation)
        return guest

    async def fingerprint(self) -> str:
        try:
            return (await self._inspect_image()).id
        except ENGINE_ERRORS as error:
            raise SandboxStartError(f"cannot use {self._image!r}: {said(error)}") from error

    async def sweep(self) -> int:
        try:
            return await self._sweep()
        except ENGINE_ERRORS as error:
            logger.warning("leftovers could not be swept, the next sweep will: %s", said(error))
            return 0

    async def check(self) -> list[Check]:
        facts = self._engine.facts
        disk = "disk by the storage driver" if self._has_quota else "disk watched, and stopped"
        return [
            Check("docker engine", True, f"{facts['ServerVersion']} at {self._engine.url}"),
            await self._check_image(),
            *findings(facts, self._runtime, disk, self._device),
            Check("docker users at strict", True, self._users_at_strict()),
        ]

    async def aclose(self) -> None:
        await self._watch.aclose()
        await self._engine.aclose()
        self._owner.release()

    async def _create(self, name: str, isolation: Isolation) -> bytes:
        """Make a container; returns what its agent is to be told first."""
        image = await self._inspect_image()
        blueprint = Blueprint(
            image,
            isolation,
            labels=self._labels | self._expiry(),
            runtime=self._runtime,
            inputs=self._inputs,
            agent_volume=await self._agents.name(agent_program(image.machine), image),
            disk_device=self._device.path,
            host_uid=self._host_uid(isolation),
        )
        container_id = await self._make(name, blueprint)
        if self._leftovers:
            await asyncio.to_thread(self._leftovers.note, name, container_id)
        return first_message(self._guest_config(isolation))

    async def _make(self, name: str, blueprint: Blueprint) -> str:
        if self._has_quota:
            try:
                return await self._engine.create(name, replace(blueprint, quota=True).config())
            except ENGINE_ERRORS as error:
                if "quota" not in said(error):
                    raise
                logger.info("the storage driver bounds no disk, so disks are watched: %s", error)
                self._has_quota = False
        return await self._engine.create(name, blueprint.config())

    def _guest_config(self, isolation: Isolation) -> GuestConfig:
        config = GuestConfig(lifetime_s=self._lifetime_s)
        home = guest_user(isolation).home
        return replace(config, directories=(*config.directories, home))

    def _host_uid(self, isolation: Isolation) -> int | None:
        """A host uid for one sandbox; None where root is inside, or the host's uids are not."""
        return new_uid() if self._has_host_users and isolation.level == "strict" else None

    def _users_at_strict(self) -> str:
        if self._has_host_users:
            return "each sandbox has a host uid of its own"
        return f"all sandboxes run as uid {SANDBOX.uid}"

    def _expiry(self) -> dict[str, str]:
        """When it must have ended by itself, in seconds since 1970."""
        if not self._lifetime_s:
            return {}
        return {EXPIRES_LABEL: str(int(time.time() + self._lifetime_s + _EXPIRY_GRACE_S))}

    def _watch_disk(self, guest: DockerGuest, isolation: Isolation) -> None:
        if not self._has_quota and isolation.level == "standard":  # else it is in memory
            mib = isolation.disk_mib
            self._watch.add(guest.id, Usage(mib << 20, mib * FILES_PER_MIB), guest.stop)

    async def _inspect_image(self) -> Image:
        return image_of(await self._engine.image(self._image))

    async def _sweep(self) -> int:
        label = f"{INSTALL_LABEL}={self._owner.install_id}"
        found = await asyncio.to_thread(self._engine.containers, label)
        removed = sum([await self._remove_leftover(each) for each in found])
        # Whoever removes a container by hand leaves its volume.
        await asyncio.to_thread(self._engine.remove_unused_volumes, label)
        if self._leftovers:
            await asyncio.to_thread(self._leftovers.sweep, self._is_of_the_dead)
        await asyncio.to_thread(self._owner.forget_dead)
        return removed

    def _is_of_the_dead(self, name: str) -> bool:
        return self._owner.is_dead(name.split("-")[1])

    async def _remove_leftover(self, container: Facts) -> bool:
        """Remove a container if nobody has it: its owner is dead, its time is over, or we have lost
        it to an engine that did not answer."""
        labels, name = container["Labels"], container["Names"][0].strip("/")
        expired = float(labels.get(EXPIRES_LABEL, "inf")) < time.time()
        lost = name.startswith(f"sandbox-{self._owner.id}-") and name not in self._removals.pending
        if not expired and not lost and not self._owner.is_dead(labels.get(OWNER_LABEL, "")):
            return False
        try:
            await self._engine.remove(container["Id"])
        except ENGINE_ERRORS as error:
            logger.warning("%s could not be swept: %s", container["Id"], said(error))
            return False
        return True

    async def _check_image(self) -> Check:
        try:
            image = await self._inspect_image()
        except MissingError:
            return Check("docker image", False, f"{self._image!r} is missing: {GET_IMAGE}")
        try:
            agent_program(image.machine)
        except SandboxStartError as error:
            return Check("docker image", False, f"{self._image}: {error}")
        return Check("docker image", True, f"{self._image} {image.id[7:19]}")


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Have something done, and come back only when it is over, also when cancelled."""
    doing = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        with anyio.CancelScope(shield=True):
            await asyncio.wait([doing])
        raise


def _may_have_quota(engine: Facts) -> bool:
    """Whether it is worth asking the storage driver for a bound; only it knows."""
    status = dict(engine.get("DriverStatus") or ())
    on_xfs = status.get("Backing Filesystem") == "xfs"
    return engine.get("Driver") in _QUOTA_DRIVERS or on_xfs


def _has_host_users(engine: Engine) -> bool:
    """Return whether containers' uids are the host's, and the host gives away all of a range.

    Only this kernel's uids can be seen from here.
    """
    facts = engine.facts
    options = facts.get("SecurityOptions") or ()
    if any(option.startswith(("name=userns", "name=rootless")) for option in options):
        return False
    here = engine.url.startswith("unix://") and facts.get("KernelVersion") == platform.release()
    return here and has_range()


def _directory(engine: Engine) -> Path | None:
    """Where the engine has its containers, if that is on this host."""
    directory = Path(engine.facts.get("DockerRootDir") or "/nonexistent")
    status = dict(engine.facts.get("DriverStatus") or ())
    here = engine.url.startswith("unix://") and engine.facts.get("Name") == socket.gethostname()
    elsewhere = "driver-type" in status  # with containerd, which does not say where
    seen = here and not elsewhere and os.access(directory, os.F_OK)
    return directory if seen else None
