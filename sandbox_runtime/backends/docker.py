"""Sandboxes in Docker containers, on a local or a remote engine.

The guest agent is the container's main process. The proxy attaches to the agent's standard streams
before the container starts, so no port is opened and `docker exec` is never used. If the proxy
dies, the agent's standard input closes, the agent ends, and the engine removes the container
(`StdinOnce`, `AutoRemove`).
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import anyio

from policies.isolation import Isolation
from sandbox_runtime.backends.base import (
    Check,
    Guest,
    cannot_adopt_error,
    parallel_starts_per_host,
    run_to_end,
)
from sandbox_runtime.backends.docker_agent import AgentVolumes
from sandbox_runtime.backends.docker_check import (
    accepted_escapes,
    block_device,
    engine_checks,
    engine_info,
)
from sandbox_runtime.backends.docker_container import (
    ContainerSpec,
    ImageMetadata,
    is_runsc,
    parse_image,
)
from sandbox_runtime.backends.docker_disk import DiskUsage, DiskWatch, DockerDisk
from sandbox_runtime.backends.docker_engine import (
    DockerEngine,
    EngineError,
    EngineJson,
    EngineNotFoundError,
)
from sandbox_runtime.backends.docker_guest import DockerGuest, RunscProcesses
from sandbox_runtime.backends.limits import FILES_PER_MIB, SANDBOX_USER, guest_user, new_host_uid
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest.agent import LIFETIME_S, GuestConfig, agent_program, config_message
from sandbox_runtime.ownership import Owner
from sandbox_runtime.sandbox import SandboxReference

logger = logging.getLogger(__name__)

INSTALL_LABEL = "llm-sandbox-proxy.install"
OWNER_LABEL = "llm-sandbox-proxy.owner"
EXPIRES_LABEL = "llm-sandbox-proxy.expires"
GET_IMAGE = "pull it, or build it with `sandbox-proxy build-image`"
_EXPIRY_GRACE_S = 60.0


class DockerBackend:
    """Starts sandboxes as containers of one image on one Docker engine.

    `runtime` is the name of one of the engine's runtimes, such as `runsc`. `inputs` is a directory
    on the engine's host that all sandboxes see read-only. Raises EngineMissingError if no engine
    answers, or, with `needs_image`, if the engine does not have the image.
    """

    def __init__(
        self,
        image: str,
        *,
        state_dir: Path,
        runtime: str | None = None,
        host: str | None = None,
        inputs: Path | None = None,
        needs_image: bool = False,
    ) -> None:
        self._image = image
        self._runtime = runtime
        self._inputs = inputs
        self._engine = DockerEngine(host, needs_image=image if needs_image else None)
        self._engine_info = engine_info(self._engine.info, self._engine.url)
        self._owner = Owner(state_dir)
        self._labels = {INSTALL_LABEL: self._owner.install_id, OWNER_LABEL: self._owner.id}
        self._agent_volumes = AgentVolumes(self._engine, self._labels)
        self._has_quota = self._engine_info.may_have_quota
        self._disk_watch = DiskWatch(DockerDisk(self._engine, self._engine_info.directory))
        self._block_device = block_device(self._engine_info)
        if self._block_device.path is None:
            why = self._block_device.why_unlimited
            logger.warning("the disk speed of sandboxes is not limited: %s", why)
        self._has_host_uids = self._engine_info.has_host_uids and not is_runsc(runtime)
        self._runsc = RunscProcesses(state_dir) if is_runsc(runtime) else None
        self._own_containers: set[str] = set()
        """The names of this process's containers, which a sweep leaves alone. A name is added
        before the creation and removed when the removal has succeeded or failed."""

    @property
    def name(self) -> str:
        return "docker"

    @property
    def accepted_escapes(self) -> Mapping[str, str]:
        return accepted_escapes(self._engine_info, self._runtime)

    @property
    def capacity(self) -> None:
        return None

    @property
    def sandbox_count(self) -> int:
        """The number of this process's sandboxes on the engine, from before their start until their
        removal."""
        return len(self._own_containers)

    @property
    def parallel_starts(self) -> int:
        return parallel_starts_per_host()

    @property
    def can_resize(self) -> bool:
        return True

    @property
    def max_outage_s(self) -> float:
        return 0.0

    async def start(self, isolation: Isolation) -> DockerGuest:
        name = f"sandbox-{self._owner.id}-{uuid.uuid4().hex[:12]}"
        guest = DockerGuest(name, self._engine, self._runtime, self._runsc, self._on_removed)
        self._own_containers.add(name)
        try:
            message = await run_to_end(self._create(name, isolation))
            guest.stream = await self._engine.attach(name)
            await self._engine.start(name)
            guest.write(message)
            await guest.drain()
        except (EngineError, OSError) as error:
            self._agent_volumes.invalidate()
            await guest.kill()
            raise SandboxStartError(
                f"cannot start a container of {self._image!r}: {error}"
            ) from error
        except BaseException:  # such as a cancellation: no container may be left on the engine
            with anyio.CancelScope(shield=True):
                await guest.kill()
            raise
        self._watch_disk(guest, isolation)
        return guest

    @property
    def can_adopt(self) -> bool:
        return False

    async def adopt(self, reference: SandboxReference) -> Guest:
        raise cannot_adopt_error(self.name)

    async def fingerprint(self) -> str:
        try:
            return (await self._inspect_image()).id
        except EngineError as error:
            raise SandboxStartError(f"cannot use {self._image!r}: {error}") from error

    async def sweep(self) -> int:
        try:
            return await self._sweep()
        except EngineError as error:
            logger.warning("leftovers could not be swept, the next sweep tries again: %s", error)
            return 0

    async def check(self) -> list[Check]:
        watched = "disk by a watch, which stops a sandbox that exceeds its limit"
        disk = "disk by the storage driver" if self._has_quota else watched
        return [
            Check("docker engine", True, f"{self._engine_info.version} at {self._engine.url}"),
            await self._check_image(),
            *engine_checks(self._engine_info, self._runtime, disk, self._block_device),
            Check("docker users at strict", True, self._strict_users_text()),
        ]

    async def aclose(self) -> None:
        await self._disk_watch.aclose()
        await self._engine.aclose()
        self._owner.release()

    async def _create(self, name: str, isolation: Isolation) -> bytes:
        """Create a container and return the first message for its agent."""
        image = await self._inspect_image()
        spec = ContainerSpec(
            image,
            isolation,
            labels=self._labels | self._expiry_label(),
            runtime=self._runtime,
            inputs=self._inputs,
            agent_volume=await self._agent_volumes.volume_for(agent_program(image.machine), image),
            disk_device=self._block_device.path,
            host_uid=self._host_uid(isolation),
        )
        container_id = await self._create_container(name, spec)
        if self._runsc:
            await asyncio.to_thread(self._runsc.record, name, container_id)
        return config_message(self._guest_config(isolation))

    async def _create_container(self, name: str, spec: ContainerSpec) -> str:
        if self._has_quota:
            try:
                return await self._engine.create(name, replace(spec, has_quota=True).to_request())
            except EngineError as error:
                if "quota" not in str(error):
                    raise
                logger.info(
                    "the storage driver sets no disk limit, so disks are watched: %s", error
                )
                self._has_quota = False
        return await self._engine.create(name, spec.to_request())

    def _guest_config(self, isolation: Isolation) -> GuestConfig:
        config = GuestConfig()
        home = guest_user(isolation).home
        return replace(config, directories=(*config.directories, home))

    def _host_uid(self, isolation: Isolation) -> int | None:
        """Return a host uid for one sandbox, or None if the sandbox runs as root or host uids
        cannot be used."""
        return new_host_uid() if self._has_host_uids and isolation.level == "strict" else None

    def _strict_users_text(self) -> str:
        if self._has_host_uids:
            return "each sandbox has a host uid of its own"
        return f"all sandboxes run as uid {SANDBOX_USER.uid}"

    def _expiry_label(self) -> dict[str, str]:
        """Return a label with the Unix time by which the container must have ended by itself."""
        return {EXPIRES_LABEL: str(int(time.time() + LIFETIME_S + _EXPIRY_GRACE_S))}

    def _watch_disk(self, guest: DockerGuest, isolation: Isolation) -> None:
        if not self._has_quota and isolation.level == "standard":  # at strict the disk is in memory
            mib = isolation.disk_mib
            self._disk_watch.add(guest.id, DiskUsage(mib << 20, mib * FILES_PER_MIB), guest.stop)

    def _on_removed(self, name: str) -> None:
        self._own_containers.discard(name)
        self._disk_watch.discard(name)

    async def _inspect_image(self) -> ImageMetadata:
        return parse_image(await self._engine.image(self._image))

    async def _sweep(self) -> int:
        label = f"{INSTALL_LABEL}={self._owner.install_id}"
        found = await self._engine.containers(label)
        removed = sum([await self._remove_leftover(container) for container in found])
        # A container that was removed by hand leaves its volume behind.
        await self._engine.remove_unused_volumes(label)
        if self._runsc:
            await asyncio.to_thread(self._runsc.sweep, self._has_dead_owner)
        await asyncio.to_thread(self._owner.remove_dead_records)
        return removed

    def _has_dead_owner(self, name: str) -> bool:
        return self._owner.is_dead(name.split("-")[1])

    async def _remove_leftover(self, container: EngineJson) -> bool:
        """Remove a container if it is a leftover: its proxy process is dead, its lifetime is over,
        or an earlier removal failed. Return True if it was removed."""
        labels, names = container["Labels"], container["Names"]
        expired = float(labels.get(EXPIRES_LABEL, "inf")) < time.time()
        # An engine that was killed while it removed a container lists the container without a name.
        name = names[0].strip("/") if names else ""
        is_own = not name or name.startswith(f"sandbox-{self._owner.id}-")
        lost = is_own and name not in self._own_containers
        if not expired and not lost and not self._owner.is_dead(labels.get(OWNER_LABEL, "")):
            return False
        try:
            await self._engine.remove(container["Id"])
        except EngineError as error:
            logger.warning("%s could not be swept: %s", container["Id"], error)
            return False
        return True

    async def _check_image(self) -> Check:
        try:
            image = await self._inspect_image()
        except EngineNotFoundError:
            return Check("docker image", False, f"{self._image!r} is missing: {GET_IMAGE}")
        except EngineError as error:
            return Check("docker image", False, str(error))
        try:
            agent_program(image.machine)
        except SandboxStartError as error:
            return Check("docker image", False, f"{self._image}: {error}")
        return Check("docker image", True, f"{self._image} {image.id[7:19]}")
