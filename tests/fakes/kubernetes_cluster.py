"""A cluster of this process: an API server whose Pods are agents under bubblewrap, and whose attach
calls can be cut anywhere.

The containers' standard streams behave as with containerd. What attached clients send is written to
one pipe in pieces, also what an earlier client has sent and what arrives late. What the agent
prints goes to the clients that are attached at that moment, and to nobody else.
"""

import asyncio
import json
import platform
import random
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sandbox_runtime.backends.kubernetes import KubernetesBackend
from sandbox_runtime.backends.kubernetes_pod import AGENT_PATH, PodSpec
from sandbox_runtime.guest.agent import agent_program

SUBPROTOCOL = "v4.channel.k8s.io"
PIECE_BYTES = 32 << 10
"""The runtime copies standard streams in pieces of this size."""
NAMESPACE = "sandboxes"
_ROOT = (
    *("--unshare-pid", "--unshare-net", "--unshare-uts", "--die-with-parent", "--clearenv"),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink", "usr/bin", "/bin"),
    *("--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev"),
    *(part for path in ("/tmp", "/testbed", "/root", "/run") for part in ("--tmpfs", path)),
)


class Cuts:
    """Decides after how many bytes in each direction the connection of an attach call is cut, and
    whether what is on its way then arrives late. By default no call is cut."""

    def next(self) -> tuple[int | None, int | None]:
        """Return the numbers of bytes to and from the agent; None: no limit."""
        return None, None

    def is_delayed(self) -> bool:
        """Return True if the bytes of a message that was cut arrive during the next call."""
        return False

    def interrupts(self) -> bool:
        """Return True if late bytes arrive in the middle of a message, as no runtime that copies
        in large pieces lets them."""
        return False


class RandomCuts(Cuts):
    """Cuts at random positions, up to `max_bytes` in each direction."""

    def __init__(self, seed: int, max_bytes: int) -> None:
        self._random = random.Random(seed)
        self._max_bytes = max_bytes
        self.count = 0

    def next(self) -> tuple[int | None, int | None]:
        self.count += 1
        return self._random.randrange(self._max_bytes), self._random.randrange(self._max_bytes)

    def is_delayed(self) -> bool:
        return self._random.random() < 0.5


class FakePod:
    """One Pod and its agent."""

    def __init__(self, document: dict[str, Any], process: asyncio.subprocess.Process) -> None:
        self.document = document
        self.process = process
        self.late_pieces: list[bytes] = []
        self.attached: set[_Attachment] = set()
        self._write_lock = asyncio.Lock()

    async def write(self, data: bytes) -> None:
        """Write to the agent's standard input, as one client of several."""
        stdin = self.process.stdin
        assert stdin
        for start in range(0, len(data), PIECE_BYTES):
            async with self._write_lock:
                with suppress(ConnectionError):
                    stdin.write(data[start : start + PIECE_BYTES])
                    await stdin.drain()

    async def run(self) -> None:
        """Pass on what the agent prints until it ends."""
        assert self.process.stdout
        while printed := await self.process.stdout.read(PIECE_BYTES):
            for each in list(self.attached):
                await each.send(printed)
        await self.process.wait()


class _Attachment:
    """One attach call."""

    def __init__(
        self,
        request: web.Request,
        socket: web.WebSocketResponse,
        limits: tuple[int | None, int | None],
    ) -> None:
        self._request = request
        self._socket = socket
        self._to_agent, self._from_agent = limits

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Return what of a message still reaches the agent, and what is cut off."""
        passed, self._to_agent = _up_to(self._to_agent, data)
        if len(passed) < len(data):
            self.cut()
        return passed, data[len(passed) :]

    async def send(self, data: bytes) -> None:
        passed, self._from_agent = _up_to(self._from_agent, data)
        with suppress(ConnectionError):
            await self._socket.send_bytes(b"\x01" + passed)
        if len(passed) < len(data):
            self.cut()

    def cut(self) -> None:
        """Break the connection without a word."""
        if self._request.transport:
            self._request.transport.abort()


def _up_to(limit: int | None, data: bytes) -> tuple[bytes, int | None]:
    if limit is None:
        return data, None
    return data[:limit], max(0, limit - len(data))


class FakeCluster:
    """The API server, with the calls that KubernetesBackend makes."""

    def __init__(self, shared: Path | None = None) -> None:
        """`shared` is a directory that all Pods see at /mnt."""
        self._shared = shared
        self._leases: dict[str, dict[str, Any]] = {}
        self.cuts = Cuts()
        self.refuses_to_attach = False
        self.refuses_to_delete = False
        self.loses_responses_to_patches = False
        """True if the connection ends instead of the response to the change of a Pod."""
        self.changes_pods = False
        """True if a Pod changes whenever it is to be deleted in a certain version."""
        self.cuts_the_watch = False
        """True to end the next response of a watch in the middle of a line."""
        self.loses_events = False
        """True if nobody is told of the end of a Pod."""
        self.attach_calls = 0
        self.pods: dict[str, FakePod] = {}
        self.url = ""
        self._events: list[bytes] = []
        """Each is a line of a watch's response. A resource version is the number of events."""
        self._has_event = asyncio.Event()
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def application(self) -> web.Application:
        core = f"/api/v1/namespaces/{NAMESPACE}/pods"
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
        app = web.Application()
        app.router.add_post(core, self._create)
        app.router.add_get(core, self._list_or_watch)
        app.router.add_get(core + "/{name}", self._read)
        app.router.add_patch(core + "/{name}", self._patch)
        app.router.add_delete(core + "/{name}", self._delete)
        app.router.add_get(core + "/{name}/attach", self._attach)
        app.router.add_post(leases, self._create_lease)
        app.router.add_get(leases, self._list_leases)
        app.router.add_patch(leases + "/{name}", self._change_lease)
        app.router.add_delete(leases + "/{name}", self._delete_lease)
        reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        app.router.add_post(reviews, self._allow)
        app.router.add_get("/version/", self._version)
        return app

    def cut_all(self) -> None:
        """Break all connections of attach calls."""
        for pod in self.pods.values():
            for each in list(pod.attached):
                each.cut()

    async def aclose(self) -> None:
        self._is_closed = True
        self._has_event.set()
        for pod in self.pods.values():
            if pod.process.returncode is None:
                pod.process.kill()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _create_lease(self, request: web.Request) -> web.Response:
        lease = await request.json()
        self._leases[lease["metadata"]["name"]] = lease
        return web.json_response(lease, status=201)

    async def _list_leases(self, request: web.Request) -> web.Response:
        return web.json_response({"items": list(self._leases.values())})

    async def _change_lease(self, request: web.Request) -> web.Response:
        lease = self._leases[request.match_info["name"]]
        lease.update(await request.json())
        return web.json_response(lease)

    async def _delete_lease(self, request: web.Request) -> web.Response:
        self._leases.pop(request.match_info["name"], None)
        return web.json_response({})

    async def _allow(self, request: web.Request) -> web.Response:
        return web.json_response({"status": {"allowed": True}}, status=201)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"gitVersion": "v1.0.0"})

    async def _create(self, request: web.Request) -> web.Response:
        document = await request.json()
        container = document["spec"]["containers"][0]
        env = {each["name"]: each.get("value", "") for each in container["env"]}
        env["PATH"] = "/usr/bin:/bin"
        process = await asyncio.create_subprocess_exec(
            "bwrap",
            *_ROOT,
            *(("--bind", str(self._shared), "/mnt") if self._shared else ()),
            *("--ro-bind", str(agent_program(platform.machine())), AGENT_PATH),
            *(part for name, value in env.items() for part in ("--setenv", name, value)),
            *("--", *container["command"]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        name = document["metadata"]["name"]
        pod = self.pods[name] = FakePod(document, process)
        self._set_state(pod, "ADDED", "Running", {"running": {}})
        running = asyncio.create_task(self._run(pod))
        self._tasks.add(running)
        return web.json_response(document, status=201)

    async def _run(self, pod: FakePod) -> None:
        await pod.run()
        code = pod.process.returncode
        # 137: killed, see wait(1)
        ended = {"terminated": {"exitCode": 137 if code else 0}}
        if not self.loses_events:
            self._set_state(pod, "MODIFIED", "Failed" if code else "Succeeded", ended)
        for each in list(pod.attached):
            each.cut()

    def _set_state(self, pod: FakePod, event: str, phase: str, state: dict[str, Any]) -> None:
        pod.document["status"] = {"phase": phase, "containerStatuses": [{"state": state}]}
        self._add_event(pod, event)

    def _add_event(self, pod: FakePod, event: str) -> None:
        pod.document["metadata"]["resourceVersion"] = str(len(self._events) + 1)
        line = json.dumps({"type": event, "object": pod.document})
        self._events.append(line.encode() + b"\n")
        self._has_event.set()

    async def _list_or_watch(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") is None:
            items = [pod.document for pod in self.pods.values()]
            metadata = {"resourceVersion": str(len(self._events))}
            return web.json_response({"items": items, "metadata": metadata})
        response = web.StreamResponse()
        await response.prepare(request)
        sent = int(request.query["resourceVersion"])
        while not self._is_closed:
            for line in self._events[sent:]:
                if self.cuts_the_watch:
                    self.cuts_the_watch = False
                    await response.write(line[: len(line) // 2])
                    return response
                await response.write(line)
            sent = len(self._events)
            self._has_event.clear()
            await self._has_event.wait()
        return response

    async def _read(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return web.json_response({"reason": "NotFound"}, status=404)
        return web.json_response(pod.document)

    async def _patch(self, request: web.Request) -> web.Response:
        """Change a label, if it has the expected value."""
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return web.json_response({"reason": "NotFound"}, status=404)
        test, change = await request.json()
        assert (test["op"], change["op"], test["path"]) == ("test", "replace", change["path"])
        label = test["path"].removeprefix("/metadata/labels/").replace("~1", "/")
        labels = pod.document["metadata"]["labels"]
        if labels[label] != test["value"]:
            return web.json_response({"reason": "Invalid"}, status=422)
        labels[label] = change["value"]
        self._add_event(pod, "MODIFIED")
        if self.loses_responses_to_patches and request.transport:
            request.transport.close()
        return web.json_response(pod.document)

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        body = await request.json() if request.can_read_body else {}
        version = body.get("preconditions", {}).get("resourceVersion")
        if pod and version and self.changes_pods:
            self._add_event(pod, "MODIFIED")
        if pod and version and version != pod.document["metadata"]["resourceVersion"]:
            return web.json_response({"reason": "Conflict"}, status=409)
        if self.refuses_to_delete:
            return web.json_response({"message": "refused by the test"}, status=500)
        if pod is None:
            return web.json_response({"reason": "NotFound"}, status=404)
        pod.document["metadata"]["deletionTimestamp"] = "2026-11-29T00:00:00Z"
        if pod.process.returncode is None:
            pod.process.kill()
        else:
            self._set_state(pod, "DELETED", "Succeeded", {})
        return web.json_response({})

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        self.attach_calls += 1
        pod = self.pods[request.match_info["name"]]
        if self.refuses_to_attach or pod.process.returncode is not None:
            return web.json_response({"message": "refused by the test"}, status=500)
        socket = web.WebSocketResponse(protocols=[SUBPROTOCOL], max_msg_size=1 << 20)
        await socket.prepare(request)
        attachment = _Attachment(request, socket, self.cuts.next())
        pod.attached.add(attachment)
        try:
            async for message in socket:
                passed, cut_off = attachment.take(message.data[1:])
                middle = len(passed) // 2 if self.cuts.interrupts() else len(passed)
                late, pod.late_pieces = pod.late_pieces, []
                for piece in (passed[:middle], *late, passed[middle:]):
                    await pod.write(piece)
                if cut_off and self.cuts.is_delayed():
                    pod.late_pieces.append(cut_off)
        finally:
            pod.attached.discard(attachment)
        return socket


@asynccontextmanager
async def fake_cluster(shared: Path | None = None) -> AsyncIterator[FakeCluster]:
    """Serve a cluster, whose Pods see the directory `shared` at /mnt. Skips the test without
    bubblewrap."""
    if not shutil.which("bwrap"):
        pytest.skip("there is no bubblewrap")
    cluster = FakeCluster(shared)
    async with TestServer(cluster.application()) as server:
        cluster.url = str(server.make_url(""))
        try:
            yield cluster
        finally:
            cluster.cut_all()
            await cluster.aclose()


@asynccontextmanager
async def backend_of(
    cluster: FakeCluster, directory: Path, **settings: Any
) -> AsyncIterator[KubernetesBackend]:
    """Yield a backend that starts sandboxes in the cluster."""
    kubeconfig = write_kubeconfig(cluster, directory)
    backend = KubernetesBackend(
        PodSpec("sandbox:1"),
        namespace=NAMESPACE,
        kubeconfig=kubeconfig,
        allow_unenforced_network_policy=True,
        **settings,
    )
    try:
        yield backend
    finally:
        await backend.aclose()


def write_kubeconfig(cluster: FakeCluster, directory: Path) -> Path:
    """Write the kubeconfig file of the cluster into a directory."""
    path = directory / "kubeconfig"
    path.write_text(json.dumps(_kubeconfig(cluster.url)), encoding="utf-8")
    return path


def _kubeconfig(url: str) -> dict[str, Any]:
    def named(**value: Any) -> Iterable[dict[str, Any]]:
        return [{"name": "test", **value}]

    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": named(cluster={"server": url}),
        "users": named(user={"token": "any"}),
        "contexts": named(context={"cluster": "test", "user": "test"}),
        "current-context": "test",
    }
