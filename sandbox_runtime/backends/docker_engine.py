"""A Docker engine: the calls we make of it, each raising one of ENGINE_ERRORS.

The one door to the SDK, whose calls block; what every container's life is made of goes without it.
Configurations go to the engine as its API has them: the SDK's own builders know less than the
engine does.
"""

import contextlib
import json
import os
import socket
from datetime import datetime
from typing import Any

import docker
import docker.errors
import requests
import requests.exceptions
from docker.utils import kwargs_from_env

from sandbox_runtime.backends.docker_api import (
    API_ERRORS,
    ConflictError,
    DockerAPI,
    Facts,
    MissingError,
)
from sandbox_runtime.errors import EngineMissingError

ENGINE_ERRORS = (
    docker.errors.DockerException,
    requests.exceptions.RequestException,
    *API_ERRORS,
)
_TIMEOUT_S = 30
_REASON_CHARS = 500


def connect(host: str | None = None) -> tuple[Any, str]:
    """A client of the engine at `host`, or where DOCKER_HOST says, and that engine's address.

    The client is a docker.APIClient, half of whose methods have no types.

    Raises EngineMissingError.
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
        client = docker.APIClient(version="auto", timeout=_TIMEOUT_S, **settings)
    except (*ENGINE_ERRORS, OSError) as error:
        raise EngineMissingError(f"no Docker engine answers at {url}: {error}") from error
    # No proxy stands before a socket of this host, and to look for one took a fifth of each call.
    client.trust_env = not url.startswith("unix://")
    return client, url


class Engine:
    """One engine, with what it says about itself. Raises EngineMissingError where none answers."""

    def __init__(self, host: str | None = None) -> None:
        self._client, self.url = connect(host)
        try:
            self.facts: Facts = self._client.info()
        except ENGINE_ERRORS as error:
            self._client.close()
            why = f"the engine at {self.url} does not answer: {error}"
            raise EngineMissingError(why) from error
        self._api = DockerAPI(self.url, self.api_version, timeout_s=_TIMEOUT_S)

    def require_image(self, name: str) -> None:
        """Raise EngineMissingError, the connection closed, if the engine has no such image."""
        try:
            self._client.inspect_image(name)
        except ENGINE_ERRORS as error:
            self._client.close()
            raise EngineMissingError(f"the engine at {self.url}: {said(error)}") from error

    @property
    def api_version(self) -> str:
        version: str = self._client.api_version
        return version

    async def image(self, name: str) -> Facts:
        return await self._api.call("GET", f"images/{name}/json")

    async def create(self, name: str, config: Facts) -> str:
        """Make a container; returns its id."""
        made = await self._api.call("POST", "containers/create", params={"name": name}, body=config)
        return str(made["Id"])

    async def start(self, name: str) -> None:
        await self._api.call("POST", f"containers/{name}/start")

    async def update(self, name: str, limits: Facts) -> None:
        """Change a running container's limits."""
        await self._api.call("POST", f"containers/{name}/update", body=limits)

    async def remove(self, name: str) -> None:
        """End and remove a container; nothing happens when there is none."""
        with contextlib.suppress(MissingError):  # which is what we want
            try:
                await self._api.call(
                    "DELETE", f"containers/{name}", params={"force": "1", "v": "1"}
                )
            except ConflictError:  # the engine removes it already, by itself
                gone = {"condition": "removed"}
                await self._api.call("POST", f"containers/{name}/wait", params=gone)

    async def get(self, container: str, path: str, max_bytes: int) -> bytes:
        """Return a tar of what a container, running or not, has at that path, b"" for nothing; of a
        longer one the first `max_bytes` or some more."""
        where = {"path": path}
        try:
            return await self._api.read(
                f"containers/{container}/archive", params=where, max_bytes=max_bytes
            )
        except MissingError:
            return b""

    async def put(self, container: str, directory: str, tar: bytes) -> None:
        """Unpack a tar in a container, running or not."""
        where = {"path": directory}
        await self._api.call("PUT", f"containers/{container}/archive", params=where, data=tar)

    async def make_volume(self, name: str) -> None:
        """Make a volume, if there is none of that name."""
        await self._api.call("POST", "volumes/create", body={"Name": name})

    # By the SDK: each blocks

    def container(self, name: str, *, size: bool = False) -> Facts:
        """About a container; with `size` also what it has written to its disk (`SizeRw`)."""
        url = f"{self._client.base_url}/v{self.api_version}/containers/{name}/json"
        answer: requests.Response = self._client.get(
            url,
            params={"size": int(size)},
            headers={"connection": "close"},  # the SDK would keep one for each URL
            timeout=_TIMEOUT_S,
        )
        try:
            answer.raise_for_status()
        except requests.exceptions.HTTPError as error:
            docker.errors.create_api_error_from_http_exception(error)
        facts: Facts = answer.json()
        return facts

    def containers(self, label: str) -> list[Facts]:
        """Those with that label, running or not."""
        found: list[Facts] = self._client.containers(all=True, filters={"label": label})
        return found

    def remove_unused_volumes(self, label: str) -> None:
        """Remove the volumes with that label which no container, running or not, has."""
        unused = {"label": label, "dangling": True}
        for volume in self._client.volumes(filters=unused)["Volumes"] or ():
            with contextlib.suppress(docker.errors.APIError):  # another sweep was faster
                self._client.remove_volume(volume["Name"])

    def exit_code(self, name: str, wait_s: float) -> int | None:
        """With what a container's main process has ended; None while it runs."""
        try:
            answer: Facts = self._client.wait(name, timeout=wait_s)
        except docker.errors.NotFound as error:
            raise MissingError(said(error)) from error
        except requests.exceptions.ConnectionError:  # as the SDK also calls a time that is up
            if self.container(name)["State"]["Running"]:
                return None
            raise
        return int(answer["StatusCode"])

    def history(self, name: str, *events: str) -> list[str]:
        """Which of these events befell a container, still there or not, as far as the engine
        remembers, in their order."""
        # Events until now are all of the past; else the engine would wait for more. By its clock.
        now = datetime.fromisoformat(self._client.info()["SystemTime"]).timestamp()
        filters = {"type": ["container"], "container": [name], "event": events}
        answer: requests.Response = self._client.get(
            f"{self._client.base_url}/v{self.api_version}/events",
            params={"until": f"{now:.6f}", "filters": json.dumps(filters)},
            headers={"connection": "close"},
            timeout=_TIMEOUT_S,
        )
        answer.raise_for_status()
        return [str(json.loads(line)["Action"]) for line in answer.text.splitlines() if line]

    async def aclose(self) -> None:
        await self._api.aclose()
        self._client.close()


def said(error: Exception) -> str:
    """What the engine gave as reason, in one line."""
    explained = error.explanation if isinstance(error, docker.errors.APIError) else None
    return str(explained or error).strip().partition("\n")[0][:_REASON_CHARS]
