"""The Docker SDK's client, whose calls block.

The import of the SDK takes a tenth of the processor time of a start of the proxy, so the proxy
imports it only for an engine that is not on a Unix socket.
"""

import os
import socket
from typing import Any

import docker
import docker.errors
import requests.exceptions
from docker.utils import kwargs_from_env

from sandbox_runtime.errors import EngineMissingError

TIMEOUT_S = 30
DEFAULT_URL = "unix:///var/run/docker.sock"


def connect(host: str | None = None) -> tuple[Any, str]:
    """Return a docker.APIClient for the engine at `host` or DOCKER_HOST, and the engine's URL.

    Raises EngineMissingError. The client has the type Any, because many of its methods have no
    types."""
    engine = {"DOCKER_HOST": host} if host else {}
    try:
        settings: dict[str, Any] = dict(kwargs_from_env(environment={**os.environ, **engine}))
    except docker.errors.TLSParameterError as error:
        reason = str(error).strip().partition("\n")[0]
        raise EngineMissingError(f"DOCKER_CERT_PATH: {reason}") from error
    url = settings.get("base_url") or DEFAULT_URL
    if "tls" in settings:
        url = url.replace("tcp://", "https://")
    try:
        if url.startswith("unix://"):
            # Tried first, because the SDK leaks its socket if the engine does not listen.
            with socket.socket(socket.AF_UNIX) as trial:
                trial.connect(url.removeprefix("unix://"))
        client = docker.APIClient(version="auto", timeout=TIMEOUT_S, **settings)
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise EngineMissingError(f"no Docker engine answers at {url}: {error}") from error
    # A unix socket needs no HTTP proxy, and the lookup of one took a fifth of each call.
    client.trust_env = not url.startswith("unix://")
    return client, url
