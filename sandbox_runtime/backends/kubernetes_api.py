"""The client of a Kubernetes cluster: the calls of its API that sandboxes need, in one namespace.

The calls go through kubernetes_asyncio, which reads kubeconfig files and service accounts. Objects
are JSON, because the library's classes fit one version of the API: they validate its fields and
drop those of other versions.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.config.config_exception import ConfigException
from kubernetes_asyncio.stream import WsApiClient

from sandbox_runtime.backends.kubernetes_errors import (
    AlreadyExistsError,
    ConflictError,
    Json,
    KubernetesError,
    NotFoundError,
    error_of,
)
from sandbox_runtime.backends.kubernetes_pod import CONTAINER, OWNER_LABEL
from sandbox_runtime.backends.kubernetes_stream import (
    SUBPROTOCOLS,
    AttachedStream,
    WebSocketTransport,
)

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 30.0
OWNER_CHANGE_TIMEOUT_S = 5.0
"""Maximum wait for the response to a change of a Pod's owner. It is short, so that the process that
adopts the sandbox has time left to read whether the change had an effect."""
WATCH_S = 60
"""Duration of one watch request in seconds. The API server then ends the request and the next one
continues the watch, so that a dead connection is noticed soon."""
HEARTBEAT_S = 20.0
"""Interval of the websocket's pings. A connection counts as lost if a pong takes more than half of
this time. Load balancers commonly drop connections that are silent for 60 s."""
MAX_RESPONSE_BYTES = 64 << 20
Method = Callable[..., Awaitable[Any]]
"""A method of the library that makes one request."""
REMOVAL_GRACE_S = 1
"""Time between SIGTERM and SIGKILL. The agent has usually ended before, because the host told it
to. With 0 the API server would forget the Pod before its processes have ended."""
MAX_DELETION_ATTEMPTS = 10
"""Maximum number of attempts to delete a Pod. Each attempt reads the Pod, and fails if the Pod
changes before it is deleted."""
_UNAUTHORIZED = 401


class KubernetesApi:
    """A client of the API of one cluster.

    If `kubeconfig` or `context` is given, it selects the cluster. Otherwise the client uses the
    cluster in which this process runs, or, outside of any cluster, that of the default kubeconfig.
    Nothing is read or opened before the first call. All calls must come from one event loop; they
    raise KubernetesError.
    """

    def __init__(
        self, namespace: str, *, kubeconfig: Path | None = None, context: str | None = None
    ) -> None:
        self.namespace = namespace
        self._kubeconfig = kubeconfig
        self._context = context
        self._connect_lock = asyncio.Lock()
        self._configuration: Any = None
        self._api: Any = None
        self._sockets: Any = None
        self._clock_offset_s = 0.0

    @property
    def url(self) -> str:
        """The URL of the API server, or an empty string before the first call."""
        return str(self._configuration.host) if self._configuration else ""

    def now_s(self) -> float:
        """Return the Unix time of the API server's clock, which all its clients share."""
        return time.time() + self._clock_offset_s

    async def version(self) -> str:
        """Return the version of the API server, such as v1.33.1."""
        await self._connect()
        return str((await self._call(client.VersionApi(self._api).get_code))["gitVersion"])

    async def may(self, verb: str, resource: str, subresource: str = "", group: str = "") -> bool:
        """Return True if this client may perform `verb` on `resource` in the namespace."""
        attributes = {
            "namespace": self.namespace,
            "verb": verb,
            "resource": resource,
            "subresource": subresource,
            "group": group,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        await self._connect()
        create = client.AuthorizationV1Api(self._api).create_self_subject_access_review
        return bool((await self._call(create, review))["status"].get("allowed"))

    # Pods

    async def create_pod(self, pod: Json) -> None:
        """Create a Pod. If a Pod with this name exists, do nothing: only this process chooses the
        name, so an earlier attempt has created the Pod and its response was lost."""
        core = await self._core_api()
        with suppress(AlreadyExistsError):
            await self._call(core.create_namespaced_pod, self.namespace, pod)

    async def pods_and_version(self, selector: str) -> tuple[list[Json], str]:
        """Return the Pods that a label selector selects, and the version of the list, from which a
        watch can continue."""
        core = await self._core_api()
        found = await self._call(core.list_namespaced_pod, self.namespace, label_selector=selector)
        return list(found["items"]), str(found["metadata"]["resourceVersion"])

    async def watch_pods(
        self, selector: str, version: str, on_event: Callable[[str, Json], None]
    ) -> None:
        """Call `on_event` with the type and the Pod of each change since a version, for WATCH_S
        seconds. Raises ExpiredError if the API server no longer has this version."""
        core = await self._core_api()
        response = await self._send(
            core.list_namespaced_pod,
            self.namespace,
            label_selector=selector,
            resource_version=version,
            watch=True,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_S,
            _request_timeout=(CONNECT_TIMEOUT_S, WATCH_S + READ_TIMEOUT_S),
        )
        try:
            if response.status >= 400:
                raise error_of(response.status, _parse(await response.read()))
            while line := await response.content.readline():
                event = _parse(line)
                kind, changed = str(event.get("type")), event.get("object")
                if not isinstance(changed, dict):
                    raise ValueError(f"a line without an object: {line[:80]!r}")
                if kind == "ERROR":
                    raise error_of(int(changed.get("code") or 500), changed)
                on_event(kind, changed)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._no_answer_error(error) from error
        finally:
            _drop(response)

    async def delete_pod(self, name: str, version: str | None = None) -> None:
        """Ask the API server to delete a Pod, if it exists. Returns before the Pod has ended. With
        a resource version, raises ConflictError if the Pod has changed since."""
        core = await self._core_api()
        options = {"body": {"preconditions": {"resourceVersion": version}}} if version else {}
        with suppress(NotFoundError):
            await self._call(
                core.delete_namespaced_pod,
                name,
                self.namespace,
                grace_period_seconds=REMOVAL_GRACE_S,
                **options,
            )

    async def delete_pod_of(self, owner: str, name: str) -> bool:
        """Ask the API server to delete a Pod, if it exists. Return False and do nothing if it does
        not have the label of `owner` any more. Raises ConflictError if the Pod changes all the
        time."""
        core = await self._core_api()
        for _ in range(MAX_DELETION_ATTEMPTS):
            try:
                pod = await self._call(core.read_namespaced_pod, name, self.namespace)
            except NotFoundError:
                return True
            if pod["metadata"]["labels"].get(OWNER_LABEL) != owner:
                return False
            with suppress(ConflictError):  # the Pod has changed meanwhile, such as its status
                await self.delete_pod(name, pod["metadata"]["resourceVersion"])
                return True
        raise ConflictError(f"Pod {name} has changed at each attempt to delete it", 409)

    async def change_owner(self, name: str, owner: str, new_owner: str) -> None:
        """Replace the owner's label of a Pod. If the Pod has the new label already, do nothing.
        Raises NotFoundError if the Pod does not exist, and KubernetesError with status 422 if the
        Pod has another owner."""
        core = await self._core_api()
        path = f"/metadata/labels/{OWNER_LABEL.replace('/', '~1')}"
        changes = [
            {"op": "test", "path": path, "value": owner},
            {"op": "replace", "path": path, "value": new_owner},
        ]
        try:
            await self._call(
                core.patch_namespaced_pod,
                name,
                self.namespace,
                changes,
                _content_type="application/json-patch+json",
                _request_timeout=(CONNECT_TIMEOUT_S, OWNER_CHANGE_TIMEOUT_S),
            )
        except KubernetesError:
            # An earlier attempt, whose response was lost, may have changed the label.
            pod = await self._call(core.read_namespaced_pod, name, self.namespace)
            if pod["metadata"]["labels"].get(OWNER_LABEL) != new_owner:
                raise

    async def attach(self, name: str) -> AttachedStream:
        """Attach to the standard streams of a running Pod's sandbox."""
        await self._connect()
        try:
            socket = await self._open_attach(name)
        except KubernetesError as error:
            if error.status != _UNAUTHORIZED:
                raise
            await self._load_credentials(self._configuration)  # they may have expired
            socket = await self._open_attach(name)
        stream = AttachedStream()
        WebSocketTransport(socket, stream)
        return stream

    async def _open_attach(self, name: str) -> aiohttp.ClientWebSocketResponse:
        attach = client.CoreV1Api(self._sockets).connect_get_namespaced_pod_attach
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                opening = await attach(
                    name,
                    self.namespace,
                    container=CONTAINER,
                    stdin=True,
                    stdout=True,
                    stderr=True,
                    tty=False,
                    _headers={"sec-websocket-protocol": SUBPROTOCOLS},
                    _preload_content=False,
                )
                socket = await opening
        except aiohttp.WSServerHandshakeError as error:
            raise KubernetesError(
                f"the API server refused to attach to Pod {name}: {error.message}", error.status
            ) from error
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise self._no_answer_error(error) from error
        assert isinstance(socket, aiohttp.ClientWebSocketResponse)
        return socket

    # Leases

    async def create_lease(self, lease: Json) -> None:
        """Create a Lease. Raises AlreadyExistsError."""
        coordination = await self._coordination_api()
        await self._call(coordination.create_namespaced_lease, self.namespace, lease)

    async def change_lease(self, name: str, changes: Json) -> None:
        """Change fields of a Lease. Raises NotFoundError."""
        coordination = await self._coordination_api()
        await self._call(
            coordination.patch_namespaced_lease,
            name,
            self.namespace,
            changes,
            _content_type="application/merge-patch+json",
        )

    async def leases(self, selector: str) -> list[Json]:
        """Return the Leases that a label selector selects."""
        coordination = await self._coordination_api()
        found = await self._call(
            coordination.list_namespaced_lease, self.namespace, label_selector=selector
        )
        return list(found["items"])

    async def delete_lease(self, name: str) -> None:
        """Remove a Lease, if it exists."""
        coordination = await self._coordination_api()
        with suppress(NotFoundError):
            await self._call(coordination.delete_namespaced_lease, name, self.namespace)

    async def aclose(self) -> None:
        """Close all connections."""
        clients, self._api, self._sockets = (self._api, self._sockets), None, None
        for each in clients:
            if each is not None:
                await each.close()

    # Requests

    async def _connect(self) -> None:
        async with self._connect_lock:
            if self._api is None:
                configuration = client.Configuration()
                # No limit: each sandbox has a connection of its own.
                configuration.connection_pool_maxsize = 0
                await self._load_credentials(configuration)
                self._configuration = configuration
                self._api = client.ApiClient(configuration)
                self._sockets = WsApiClient(configuration, heartbeat=HEARTBEAT_S)

    async def _core_api(self) -> Any:
        await self._connect()
        return client.CoreV1Api(self._api)

    async def _coordination_api(self) -> Any:
        await self._connect()
        return client.CoordinationV1Api(self._api)

    async def _load_credentials(self, configuration: Any) -> None:
        in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
        try:
            if self._kubeconfig is None and self._context is None and in_cluster:
                config.load_incluster_config(client_configuration=configuration)
            else:
                await config.load_kube_config(
                    str(self._kubeconfig) if self._kubeconfig else None,
                    context=self._context,
                    client_configuration=configuration,
                    persist_config=False,
                )
        except (ConfigException, OSError, ValueError, TypeError) as error:
            named = self._kubeconfig or "KUBECONFIG or ~/.kube/config"
            raise KubernetesError(f"{named} names no cluster that can be used: {error}") from error

    async def _call(self, method: Method, *args: Any, **options: Any) -> Json:
        """Make a request and return the response's JSON object."""
        response = await self._send(method, *args, **options)
        if response.status == _UNAUTHORIZED:  # the credentials may have expired
            response.close()
            await self._load_credentials(self._configuration)
            response = await self._send(method, *args, **options)
        content = bytearray()
        try:
            async for piece in response.content.iter_any():
                content += piece
                if len(content) > MAX_RESPONSE_BYTES:
                    raise KubernetesError(f"a response of more than {MAX_RESPONSE_BYTES} bytes")
        except (aiohttp.ClientError, OSError) as error:
            raise self._no_answer_error(error) from error
        finally:
            _drop(response)
        self._set_clock(response.headers.get("Date"))
        if response.status >= 400:
            raise error_of(response.status, _parse(content))
        return _parse(content)

    async def _send(self, method: Method, *args: Any, **options: Any) -> aiohttp.ClientResponse:
        options.setdefault("_request_timeout", (CONNECT_TIMEOUT_S, READ_TIMEOUT_S))
        try:
            try:
                response = await method(*args, _preload_content=False, **options)
            except aiohttp.ServerDisconnectedError:  # an idle connection was closed meanwhile
                # Each request creates a named object, has the same effect twice, or, as a change of
                # an owner, is refused the second time.
                response = await method(*args, _preload_content=False, **options)
        except (aiohttp.ClientError, OSError) as error:
            raise self._no_answer_error(error) from error
        assert isinstance(response, aiohttp.ClientResponse)
        return response

    def _no_answer_error(self, error: Exception) -> KubernetesError:
        if isinstance(error, KubernetesError):
            return error
        why = str(error) or type(error).__name__
        return KubernetesError(f"the Kubernetes API at {self.url} does not answer: {why}")

    def _set_clock(self, date: str | None) -> None:
        with suppress(ValueError, TypeError):
            served: datetime = parsedate_to_datetime(date or "")
            self._clock_offset_s = served.timestamp() - time.time()


def _drop(response: aiohttp.ClientResponse) -> None:
    """Close the connection of a response at once, unless the response was read to its end.
    Otherwise the connection would wait for the server to end TLS, even after `aclose`."""
    if response.connection and response.connection.protocol:
        response.connection.protocol.abort()
    response.close()


def _parse(content: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object. Other content, such as a load balancer's error page, becomes an object
    with the start of its text as the `message`."""
    try:
        value = json.loads(content)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    return {"message": content[:200].decode(errors="replace")}
