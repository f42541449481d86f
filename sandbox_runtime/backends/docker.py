"""Sandboxes in Docker containers, on a local or a remote engine.

The agent is the container's main process and is attached before it starts: nothing is mounted, no
port is opened, `docker exec` is never used. Its standard input closes when the proxy dies, the
agent ends with it, and the engine removes the container (`StdinOnce`, `AutoRemove`).
"""

import asyncio
import contextlib
import functools
import logging
import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import docker
import docker.errors
import docker.types
import requests.exceptions
from docker.utils import kwargs_from_env

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Check
from sandbox_runtime.backends.docker_attach import Attachment, attach
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest.bootstrap import COMMAND, GuestConfig, program
from sandbox_runtime.ownership import Owner

log = logging.getLogger(__name__)

INSTALL_LABEL = "llm-sandbox-proxy.install"
OWNER_LABEL = "llm-sandbox-proxy.owner"
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID", "KILL"]
"""What apt and pip need of root inside; all others are dropped."""
ENGINE_ERRORS = (docker.errors.DockerException, requests.exceptions.RequestException)


class DockerGuest:
    """One container."""

    def __init__(self, name: str, remove: Callable[[], None]) -> None:
        self.attachment: Attachment | None = None
        self._name = name
        self._remove = remove
        self._ending: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self._name

    async def receive(self) -> bytes:
        assert self.attachment
        return await self.attachment.receive()

    def write(self, data: bytes) -> None:
        assert self.attachment
        self.attachment.write(data)

    async def send(self, data: bytes) -> None:
        assert self.attachment
        await self.attachment.send(data)

    async def kill(self) -> None:
        # One task for all who call: each returns when the container is gone, cancelled or not.
        self._ending = self._ending or asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self.attachment:
            self.attachment.close()
        try:
            await anyio.to_thread.run_sync(self._remove)
        except ENGINE_ERRORS as error:
            log.warning("container %s could not be removed, a sweep will: %s", self._name, error)

    def last_words(self) -> str:
        return self.attachment.last_words() if self.attachment else ""


def connect(host: str | None = None) -> tuple[Any, str]:
    """A client of the engine at `host`, or where DOCKER_HOST says, and that engine's address.

    The client is a docker.APIClient, half of whose methods have no types. Raises SandboxStartError.
    """
    engine = {"DOCKER_HOST": host} if host else {}
    settings: dict[str, Any] = dict(kwargs_from_env(environment={**os.environ, **engine}))
    url = settings.get("base_url") or "unix:///var/run/docker.sock"
    if "tls" in settings:
        url = url.replace("tcp://", "https://")
    try:
        if url.startswith("unix://"):
            # The SDK forgets to close a socket that nobody listens to.
            with socket.socket(socket.AF_UNIX) as trial:
                trial.connect(url.removeprefix("unix://"))
        return docker.APIClient(version="auto", timeout=30, **settings), url
    except (*ENGINE_ERRORS, OSError) as error:
        raise SandboxStartError(f"no Docker engine answers at {url}: {error}") from error


class DockerBackend:
    """A Docker engine and an image. `runtime` names one of the engine's, such as `runsc`."""

    def __init__(
        self, image: str, *, state_dir: Path, runtime: str | None = None, host: str | None = None
    ) -> None:
        self._image = image
        self._runtime = runtime
        self._client, self._url = connect(host)
        self._owner = Owner(state_dir)

    @property
    def name(self) -> str:
        return "docker"

    async def start(self, isolation: Isolation) -> DockerGuest:
        name = f"sandbox-{self._owner.id}-{uuid.uuid4().hex[:12]}"
        guest = DockerGuest(name, functools.partial(self._remove, name))
        try:
            await self._created(name, isolation)
            guest.attachment = await attach(self._url, self._client.api_version, name)
            await anyio.to_thread.run_sync(self._client.start, name)
            await guest.send(program(GuestConfig()))
        except (*ENGINE_ERRORS, OSError) as error:
            await guest.kill()
            raise SandboxStartError(
                f"cannot start a container of {self._image!r}: {error}"
            ) from error
        except BaseException:  # cancelled: nothing may be left on the engine
            with anyio.CancelScope(shield=True):
                await guest.kill()
            raise
        return guest

    async def _created(self, name: str, isolation: Isolation) -> None:
        """Have the container made, and come back only when that is over, also when cancelled."""
        creating = asyncio.ensure_future(asyncio.to_thread(self._create, name, isolation))
        try:
            await asyncio.shield(creating)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([creating])
            raise

    def _create(self, name: str, isolation: Isolation) -> None:
        config = self._client.create_container_config(
            self._image,
            command=list(COMMAND[1:]),
            entrypoint=[COMMAND[0]],
            environment={"LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
            labels={INSTALL_LABEL: self._owner.install_id, OWNER_LABEL: self._owner.id},
            stdin_open=True,
            network_disabled=True,
            working_dir="/",
            hostname="sandbox",
            host_config=self._walls(isolation),
        )
        config["StdinOnce"] = True
        self._client.create_container_from_config(config, name)

    def _walls(self, isolation: Isolation) -> dict[str, Any]:
        memory = isolation.memory_mib << 20
        files = isolation.open_files
        walls: dict[str, Any] = self._client.create_host_config(
            network_mode="none",
            cap_drop=["ALL"],
            cap_add=CAPABILITIES,
            security_opt=["no-new-privileges"],
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=int(isolation.cpus * 1e9),
            pids_limit=isolation.pids,
            ulimits=[
                docker.types.Ulimit(name="nofile", soft=files, hard=files),
                docker.types.Ulimit(name="core", soft=0, hard=0),
            ],
            ipc_mode="private",
            shm_size=64 << 20,
            oom_score_adj=500,
            init=True,
            auto_remove=True,
            log_config=docker.types.LogConfig(type="none"),
            runtime=self._runtime,
        )
        return walls

    def _remove(self, name: str) -> None:
        with contextlib.suppress(docker.errors.NotFound):  # which is what we want
            try:
                self._client.remove_container(name, force=True, v=True)
            except docker.errors.APIError as error:
                if error.status_code != requests.codes.conflict:
                    raise
                # The engine removes it already, by itself.
                self._client.wait(name, condition="removed")

    async def sweep(self) -> int:
        try:
            return await anyio.to_thread.run_sync(self._sweep)
        except ENGINE_ERRORS as error:
            log.warning("leftovers could not be swept, the next sweep will: %s", error)
            return 0

    def _sweep(self) -> int:
        ours = {"label": f"{INSTALL_LABEL}={self._owner.install_id}"}
        removed = 0
        for container in self._client.containers(all=True, filters=ours):
            if self._owner.is_dead(container["Labels"].get(OWNER_LABEL, "")):
                self._remove(container["Id"])
                removed += 1
        self._owner.forget_dead()
        return removed

    async def check(self) -> list[Check]:
        return await anyio.to_thread.run_sync(self._check)

    def _check(self) -> list[Check]:
        facts = self._client.info()
        runtime = self._runtime or facts.get("DefaultRuntime", "?")
        security = ", ".join(facts.get("SecurityOptions") or ["none"])
        return [
            Check("docker engine", True, f"{facts['ServerVersion']} at {self._url}"),
            self._check_image(),
            Check(
                "docker runtime",
                runtime in facts.get("Runtimes", {}),
                runtime if runtime == "runsc" else f"{runtime} (shares the host's kernel)",
            ),
            Check(
                "docker limits",
                bool(facts.get("MemoryLimit") and facts.get("PidsLimit")),
                "memory, swap, pids, cpu by cgroup; disk not limited"
                if facts.get("SwapLimit")
                else "memory, pids, cpu by cgroup; swap and disk not limited",
            ),
            Check("docker security", True, f"{security}; capabilities dropped; no network"),
        ]

    def _check_image(self) -> Check:
        try:
            image = self._client.inspect_image(self._image)
        except docker.errors.ImageNotFound:
            return Check(
                "docker image", False, f"{self._image!r} is missing: build it with `make image`"
            )
        return Check("docker image", True, f"{self._image} {image['Id'][7:19]}")

    async def aclose(self) -> None:
        self._client.close()
        self._owner.release()
