"""A Kubernetes cluster on this machine: `Cluster` brings it up, breaks parts of it, and takes it
down.

The control plane and each node run in a network namespace of their own; a node also has its own
mounts and process numbers. The files of a cluster are in a folder below `/var/lib/sandbox-cluster`.
"""

import fcntl
import json
import os
import re
import shutil
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.cluster import control_plane
from tests.cluster.cgroups import delete_cgroup, existing_cgroups
from tests.cluster.control_plane import COMPONENTS, PROGRAMS, Component
from tests.cluster.credentials import (
    ADMIN,
    ADMINISTRATORS,
    API_SERVER,
    API_SERVER_TO_KUBELETS,
    SERVICE_ACCOUNTS,
    Credentials,
    Identity,
)
from tests.cluster.images import load_docker_image, load_pause_image
from tests.cluster.install import find_installation
from tests.cluster.network import PREFIX, SUBNETS, Network, delete_network, host_link, namespaces_of
from tests.cluster.node import Node
from tests.cluster.processes import ClusterError, kill, kill_all, pids_in, run, start, wait_until

STATE = Path("/var/lib/sandbox-cluster")
NAME = re.compile(r"[a-z][a-z0-9]{0,10}")
"""A network interface has the name with `sbc-` before it: 15 characters at most."""
DEFAULT_NAME = "cluster"
MAX_NODES = 20
START_TIMEOUT_S = 120
"""Time limit for the start of the API server or of a node on a busy machine; 10 s on a free one."""
REQUEST_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as the machine and the API server see it."""

    name: str
    powered: bool
    connected: bool
    ready: bool


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a cluster. Without an API server no node is ready."""

    running: tuple[Component, ...]
    nodes: tuple[NodeStatus, ...]


class Cluster:
    """A cluster with a name of its own; several can be up at a time.

    All methods raise ClusterError. The constructor raises NotInstalledError.
    """

    def __init__(self, name: str = DEFAULT_NAME) -> None:
        if not NAME.fullmatch(name):
            raise ClusterError(f"a cluster's name must match {NAME.pattern} (got {name!r})")
        if os.geteuid():
            raise ClusterError("a cluster needs root: it creates namespaces and cgroups")
        self.name = name
        self._installation = find_installation()
        self._folder = STATE / name
        self._deleted_folder = STATE / f"{name}.deleted"
        self._cgroup = f"{PREFIX}{name}"
        self._credentials = Credentials(self._folder / "credentials")

    @property
    def kubeconfig(self) -> Path:
        """The file with which clients may do everything."""
        return self._credentials.kubeconfig(ADMIN)

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl with full rights and return its standard output."""
        options = (f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self._folder}/kubectl")
        return run(self._installation.program("kubectl"), *options, *arguments)

    def apply(self, manifest: str) -> None:
        """Create or change the objects of a manifest file."""
        self.kubectl("apply", "--filename", manifest)

    def up(self, nodes: int = 3, images: Sequence[str] = ()) -> None:
        """Start what does not run, import Docker's images, and return when all nodes are ready."""
        if not 1 <= nodes <= MAX_NODES:
            raise ClusterError(f"a cluster has 1 to {MAX_NODES} nodes (got {nodes})")
        self._create(nodes)
        # The nodes get their images while the API server starts. The controller manager must not
        # be started before: it gives up after 10 s without an API server.
        self._launch("etcd")
        self._launch("api-server")
        for node in self.nodes:
            self.power_on(node.name)
            self.heal(node.name)
        for image in images:
            self.load_image(image)
        for component in COMPONENTS:
            self.start(component)
        for node in self.nodes:
            self.wait_for_node(node.name)

    def down(self) -> None:
        """End all processes and delete everything of the cluster, whatever state it is in."""
        for space in namespaces_of(self.name):
            kill_all(space)
        delete_network(self.name)
        delete_cgroup(self._cgroup)
        # Renamed first: an interrupted `down` must not leave half a disk to the next `up`.
        if self._deleted_folder.exists():
            shutil.rmtree(self._deleted_folder)
        if self._folder.exists():
            self._folder.rename(self._deleted_folder)
            shutil.rmtree(self._deleted_folder)

    def remains(self) -> list[str]:
        """Return what exists of the cluster: its link, namespaces, cgroups and folder."""
        link = host_link(self.name)
        return [
            *([link] if link else []),
            *namespaces_of(self.name),
            *map(str, existing_cgroups(self._cgroup)),
            *(str(each) for each in (self._folder, self._deleted_folder) if each.exists()),
        ]

    @property
    def host_address(self) -> str:
        """The address of this machine in the cluster, which Pods can reach."""
        return self._network.host_address

    @property
    def node_namespaces(self) -> list[str]:
        """The network namespaces of the nodes, as `ip netns` names them."""
        return [node.network_namespace for node in self.nodes]

    @property
    def nodes(self) -> list[Node]:
        """The cluster's nodes, those without power included."""
        network = self._network
        return [
            Node(
                number,
                self._folder / "nodes" / f"node{number}",
                self._cgroup,
                self._installation,
                self._credentials,
                network,
            )
            for number in range(1, self._description["nodes"] + 1)
        ]

    def status(self) -> Status:
        """Return which components run and which nodes are ready."""
        space = self._network.control_plane
        readiness = self._readiness()
        return Status(
            tuple(each for each in COMPONENTS if pids_in(space, PROGRAMS[each])),
            tuple(
                NodeStatus(
                    node.name,
                    node.running,
                    self._network.connected(node.number),
                    readiness.get(node.name, False),
                )
                for node in self.nodes
            ),
        )

    def load_image(self, image: str) -> None:
        """Copy an image of the Docker engine into every node that has power."""
        load_docker_image(image, [node.images for node in self.nodes if node.running])

    def remove_image(self, image: str) -> None:
        """Remove an image's name from every node that has power."""
        for node in self.nodes:
            if node.running:
                node.images.remove(image)

    def cut_off(self, node: str) -> None:
        """Take a node from the network. Its processes go on."""
        self._network.cut_off(self._node(node).number)

    def heal(self, node: str) -> None:
        """Put a node that was cut off on the network again."""
        self._network.heal(self._node(node).number)

    def power_off(self, node: str) -> None:
        """End everything on a node at once. Its disk is kept."""
        self._node(node).power_off()

    def power_on(self, node: str) -> None:
        """Start a node, unless it runs."""
        found = self._node(node)
        found.start(self._description["nodes"])
        load_pause_image(Path(self._installation.program("pause")), [found.images])

    def kill(self, component: Component) -> None:
        """Kill a component of the control plane with SIGKILL."""
        kill(pids_in(self._network.control_plane, PROGRAMS[component]))

    def start(self, component: Component) -> None:
        """Start a component of the control plane, unless it runs. Return when the API server or
        the controller manager is ready; the others are not waited for.
        """
        self._launch(component)
        log = self._log(component)
        if component == "api-server":
            wait_until(self._api_server_is_ready, START_TIMEOUT_S, "the API server is ready", log)
        elif component == "controller-manager":
            # Pods of a namespace are refused until it has its service account.
            wait_until(
                self._has_service_account, START_TIMEOUT_S, "a service account is there", log
            )

    def wait_for_node(self, node: str, *, ready: bool = True) -> None:
        """Return when the API server sees the node as ready, or as not ready."""
        name = self._node(node).name
        expected = f"{name} is {'ready' if ready else 'not ready'}"
        log = self._folder / "nodes" / name / "kubelet.log"
        wait_until(lambda: self._readiness().get(name) is ready, START_TIMEOUT_S, expected, log)

    def _create(self, nodes: int) -> None:
        """Create the folder, the certificates and the control plane's network."""
        with _lock():
            path = self._folder / "cluster.json"
            if not path.exists():
                used = {
                    json.loads(each.read_text())["subnet"] for each in STATE.glob("*/cluster.json")
                }
                subnet = next((each for each in range(SUBNETS) if each not in used), None)
                if subnet is None:
                    raise ClusterError(f"{SUBNETS} clusters have a network already")
                self._folder.mkdir(exist_ok=True)
                path.write_text(json.dumps({"subnet": subnet, "nodes": nodes}), encoding="utf-8")
        if self._description["nodes"] != nodes:
            raise ClusterError(
                f"cluster {self.name} has {self._description['nodes']} nodes, not {nodes}: "
                "take it down first"
            )
        network = self._network
        self._credentials.create(self._url, list(_identities(network, nodes)))
        network.create_control_plane()

    def _launch(self, component: Component) -> None:
        network = self._network
        if not pids_in(network.control_plane, PROGRAMS[component]):
            command = control_plane.command(
                component,
                self._installation,
                self._folder,
                self._credentials,
                network.control_plane_address,
            )
            start(network.control_plane, command, self._log(component))

    def _log(self, component: Component) -> Path:
        return self._folder / f"{component}.log"

    @property
    def _description(self) -> dict[str, int]:
        try:
            text = (self._folder / "cluster.json").read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ClusterError(f"cluster {self.name} is not up") from error
        described: dict[str, int] = json.loads(text)
        return described

    @property
    def _network(self) -> Network:
        return Network(self.name, self._description["subnet"])

    @property
    def _url(self) -> str:
        return f"https://{self._network.control_plane_address}:{control_plane.API_PORT}"

    def _node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise ClusterError(f"cluster {self.name} has no node {name}")

    def _get(self, path: str) -> httpx.Response | None:
        """Return the API server's answer, or None if it has none."""
        context = ssl.create_default_context(cafile=self._credentials.authority)
        context.load_cert_chain(self._credentials.certificate(ADMIN), self._credentials.key(ADMIN))
        try:
            return httpx.get(
                f"{self._url}{path}",
                verify=context,
                timeout=REQUEST_TIMEOUT_S,
                trust_env=False,
            )
        except httpx.TransportError:
            return None

    def _api_server_is_ready(self) -> bool:
        answer = self._get("/readyz")
        return answer is not None and answer.is_success

    def _has_service_account(self) -> bool:
        answer = self._get("/api/v1/namespaces/default/serviceaccounts/default")
        return answer is not None and answer.is_success

    def _readiness(self) -> dict[str, bool]:
        """Return which nodes are ready, as far as the API server answers and knows them."""
        answer = self._get("/api/v1/nodes")
        if answer is None or not answer.is_success:
            return {}
        return {node["metadata"]["name"]: _is_ready(node) for node in answer.json()["items"]}


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _identities(network: Network, nodes: int) -> Iterator[Identity]:
    addresses = (network.control_plane_address, control_plane.SERVICE_ADDRESS)
    yield Identity(API_SERVER, API_SERVER, addresses=(*addresses, "kubernetes.default.svc"))
    for name in (ADMIN, API_SERVER_TO_KUBELETS):
        yield Identity(name, name, ADMINISTRATORS)
    for name in ("controller-manager", "scheduler"):
        yield Identity(name, f"system:kube-{name}")
    yield Identity(SERVICE_ACCOUNTS, SERVICE_ACCOUNTS)
    for number in range(1, nodes + 1):
        name = f"node{number}"
        yield Identity(name, f"system:node:{name}", "system:nodes", (name, network.address(number)))


@contextmanager
def _lock() -> Iterator[None]:
    """Let one process at a time give a cluster its subnet."""
    STATE.mkdir(exist_ok=True)
    descriptor = os.open(STATE, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
