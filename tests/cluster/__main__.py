"""Commands for a Kubernetes cluster on this machine: `python -m tests.cluster --help`."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from tests.cluster.cluster import DEFAULT_NAME, Cluster
from tests.cluster.control_plane import COMPONENTS
from tests.cluster.processes import ClusterError
from tests.engines.installation import NotInstalledError

Command = Callable[[Cluster, argparse.Namespace], None]


def main() -> int:
    """Run one command. Return the exit code."""
    given = _parser().parse_args()
    command: Command = given.command
    try:
        command(Cluster(given.name), given)
    except (ClusterError, NotInstalledError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.cluster", description=__doc__)
    parser.add_argument("--name", default=DEFAULT_NAME, help="default: %(default)s")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, help: str, command: Command) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(command=command)
        return added

    up = add("up", "start what does not run, and print the kubeconfig file", _up)
    up.add_argument("nodes", type=int, nargs="?", default=3, help="default: %(default)s")
    up.add_argument("--image", action="append", default=[], help="copy this Docker image to it")
    add("down", "end and delete the cluster", lambda cluster, _: cluster.down())
    add("namespaces", "print the nodes' network namespaces", _namespaces)
    add("status", "print which components run and which nodes are ready", _status)
    for name, help, method, what, choices in (
        ("load", "copy a Docker image to the nodes", Cluster.load_image, "IMAGE", None),
        ("apply", "create the objects of a manifest", Cluster.apply, "FILE", None),
        ("cut-off", "take a node from the network", Cluster.cut_off, "NODE", None),
        ("heal", "put a node on the network again", Cluster.heal, "NODE", None),
        ("power-off", "end everything on a node at once", Cluster.power_off, "NODE", None),
        ("power-on", "start a node again", Cluster.power_on, "NODE", None),
        ("kill", "kill a part of the control plane", Cluster.kill, "COMPONENT", COMPONENTS),
        ("start", "start a part of the control plane", Cluster.start, "COMPONENT", COMPONENTS),
    ):
        add(name, help, _applied(method)).add_argument("what", metavar=what, choices=choices)
    return parser


def _applied(method: Callable[[Cluster, Any], None]) -> Command:
    """Return a command that calls a method with the argument that was given."""

    def command(cluster: Cluster, given: argparse.Namespace) -> None:
        method(cluster, given.what)

    return command


def _up(cluster: Cluster, given: argparse.Namespace) -> None:
    cluster.up(given.nodes, given.image)
    sys.stdout.write(f"{cluster.kubeconfig}\n")


def _namespaces(cluster: Cluster, _: argparse.Namespace) -> None:
    sys.stdout.write(f"{','.join(cluster.node_namespaces)}\n")


def _status(cluster: Cluster, _: argparse.Namespace) -> None:
    status = cluster.status()
    for component in COMPONENTS:
        sys.stdout.write(f"{component:20}{'runs' if component in status.running else 'ended'}\n")
    for node in status.nodes:
        power = "on" if node.powered else "off"
        network = "connected" if node.connected else "cut off"
        ready = "ready" if node.ready else "not ready"
        sys.stdout.write(f"{node.name:20}{power}, {network}, {ready}\n")


if __name__ == "__main__":
    sys.exit(main())
