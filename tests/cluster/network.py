"""The network of a cluster: a bridge, and network namespaces for the control plane and each node.

The bridge is in the namespace of the control plane. The machine itself has one address on it, on a
virtual link, so that clients reach the API server. Nothing is forwarded to other networks.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.processes import namespace_file, run

PREFIX = "sandbox-cluster-"
"""The names of all namespaces and cgroups of clusters begin so."""
BRIDGE = "bridge"
SUBNETS = 256
"""The clusters of a machine share 198.18.0.0/15, which RFC 2544 keeps for tests."""
FIRST_NODE = 11


class Network:
    """The namespaces and addresses of one cluster."""

    def __init__(self, name: str, subnet: int) -> None:
        self._name = name
        self._subnet = subnet
        self.control_plane = f"{PREFIX}{name}-control"
        self.host_address = self._address(1)
        self.control_plane_address = self._address(2)

    def _address(self, host: int) -> str:
        return f"198.18.{self._subnet}.{host}"

    def namespace(self, number: int) -> str:
        """Return the network namespace of a node."""
        return f"{PREFIX}{self._name}-node{number}"

    def address(self, number: int) -> str:
        """Return the address of a node."""
        return self._address(FIRST_NODE - 1 + number)

    @staticmethod
    def pod_subnet(number: int) -> str:
        """Return the addresses of a node's Pods."""
        return f"10.244.{number}.0/24"

    def create_control_plane(self) -> None:
        """Create the namespace of the control plane and the machine's own link to it."""
        space = self.control_plane
        if namespace_file(space).exists():
            return
        host = _host_link(self._name)
        with _new_namespace(space):
            _ip(space, "link", "add", BRIDGE, "type", "bridge")
            _ip(space, "address", "add", f"{self.control_plane_address}/24", "dev", BRIDGE)
            _ip(space, "link", "set", BRIDGE, "up")
            run("ip", "link", "add", host, "type", "veth", "peer", "name", "host", "netns", space)
            run("ip", "address", "add", f"{self.host_address}/24", "dev", host)
            run("ip", "link", "set", host, "up")
            _ip(space, "link", "set", "host", "master", BRIDGE, "up")

    def create_node(self, number: int, nodes: int) -> None:
        """Create the namespace of a node, linked to the bridge, with routes to the Pods of the
        others.
        """
        space = self.namespace(number)
        if namespace_file(space).exists():
            return
        port = f"node{number}"
        with _new_namespace(space):
            peer = ("peer", "name", port, "netns", self.control_plane)
            _ip(space, "link", "add", "eth0", "type", "veth", *peer)
            _ip(space, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip(space, "link", "set", "eth0", "up")
            for other in range(1, nodes + 1):
                if other != number:
                    _ip(space, "route", "add", self.pod_subnet(other), "via", self.address(other))
            _ip(self.control_plane, "link", "set", port, "master", BRIDGE, "up")

    def delete_node(self, number: int) -> None:
        """Delete a node's link and its namespace, if they exist."""
        # The kernel deletes the links of a namespace some time after the namespace itself.
        if f"node{number}" in self._ports():
            _ip(self.control_plane, "link", "delete", f"node{number}")
        _delete_namespace(self.namespace(number))

    def cut_off(self, number: int) -> None:
        """Take a node's link from the bridge. The node notices nothing of its own link."""
        _ip(self.control_plane, "link", "set", f"node{number}", "nomaster")

    def heal(self, number: int) -> None:
        """Put a node's link on the bridge again."""
        _ip(self.control_plane, "link", "set", f"node{number}", "master", BRIDGE)

    def connected(self, number: int) -> bool:
        """Return True if a node's link exists and is on the bridge."""
        return self._ports().get(f"node{number}") == BRIDGE

    def _ports(self) -> dict[str, str | None]:
        """Return the bridge that each link of the control plane's namespace is on."""
        if not namespace_file(self.control_plane).exists():
            return {}
        links = json.loads(_ip(self.control_plane, "-json", "link", "show", "type", "veth"))
        return {link["ifname"]: link.get("master") for link in links}


def namespaces_of(name: str) -> list[str]:
    """Return the existing network namespaces of a cluster."""
    found = namespace_file("").glob(f"{PREFIX}{name}-*")
    return sorted(path.name for path in found)


def delete_network(name: str) -> None:
    """Delete the machine's link to a cluster and the cluster's namespaces."""
    if link := host_link(name):
        run("ip", "link", "delete", link)
    for space in namespaces_of(name):
        _delete_namespace(space)


def host_link(name: str) -> str | None:
    """Return the machine's link to a cluster, or None if it does not exist."""
    links = {link["ifname"] for link in json.loads(run("ip", "-json", "link"))}
    return _host_link(name) if _host_link(name) in links else None


def _host_link(name: str) -> str:
    return f"sbc-{name}"


@contextmanager
def _new_namespace(space: str) -> Iterator[None]:
    """Create a network namespace, and delete it if the block fails."""
    run("ip", "netns", "add", space)
    try:
        _ip(space, "link", "set", "lo", "up")
        yield
    except BaseException:
        _delete_namespace(space)
        raise


def _delete_namespace(space: str) -> None:
    if namespace_file(space).exists():
        run("ip", "netns", "delete", space)


def _ip(space: str, *arguments: str) -> str:
    return run("ip", "-netns", space, *arguments)
