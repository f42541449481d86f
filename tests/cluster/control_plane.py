"""The command lines of the control plane's components."""

from pathlib import Path
from typing import Literal, get_args

from tests.cluster.credentials import (
    API_SERVER,
    API_SERVER_TO_KUBELETS,
    SERVICE_ACCOUNTS,
    Credentials,
)
from tests.cluster.install import Installation

Component = Literal["etcd", "api-server", "controller-manager", "scheduler"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
PROGRAMS: dict[Component, str] = {
    "etcd": "etcd",
    "api-server": "kube-apiserver",
    "controller-manager": "kube-controller-manager",
    "scheduler": "kube-scheduler",
}
API_PORT = 6443
ETCD_URL = "http://127.0.0.1:2379"
ETCD_PEER_URL = "http://127.0.0.1:2380"
NODE_GRACE_S = 8
"""A node that renews its Lease no more is not ready after this time (Kubernetes' default: 40 s)."""
SERVICE_SUBNET = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"
"""The address of the API server's own Service. No kube-proxy runs, so nothing answers there."""


def command(
    component: Component,
    installation: Installation,
    folder: Path,
    credentials: Credentials,
    address: str,
) -> list[str]:
    """Return the command line of a component whose API server has this address."""
    options = {
        "etcd": _etcd(folder),
        "api-server": _api_server(credentials, address),
        "controller-manager": _controller_manager(folder, credentials),
        "scheduler": _client("scheduler", credentials),
    }
    lines = (f"--{name}={value}" for name, value in options[component].items())
    return [installation.program(PROGRAMS[component]), *lines]


def _etcd(folder: Path) -> dict[str, object]:
    return {
        "data-dir": folder / "etcd",
        "listen-client-urls": ETCD_URL,
        "advertise-client-urls": ETCD_URL,
        "listen-peer-urls": ETCD_PEER_URL,
        "initial-advertise-peer-urls": ETCD_PEER_URL,
        "initial-cluster": f"default={ETCD_PEER_URL}",
        # The data may be lost with the machine, not with the process.
        "unsafe-no-fsync": "true",
    }


def _api_server(credentials: Credentials, address: str) -> dict[str, object]:
    return {
        "etcd-servers": ETCD_URL,
        "bind-address": address,
        "advertise-address": address,
        "secure-port": API_PORT,
        "tls-cert-file": credentials.certificate(API_SERVER),
        "tls-private-key-file": credentials.key(API_SERVER),
        "client-ca-file": credentials.authority,
        "kubelet-certificate-authority": credentials.authority,
        "kubelet-client-certificate": credentials.certificate(API_SERVER_TO_KUBELETS),
        "kubelet-client-key": credentials.key(API_SERVER_TO_KUBELETS),
        # No name server knows the nodes' names.
        "kubelet-preferred-address-types": "InternalIP",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": credentials.certificate(SERVICE_ACCOUNTS),
        "service-account-signing-key-file": credentials.key(SERVICE_ACCOUNTS),
        "service-cluster-ip-range": SERVICE_SUBNET,
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
    }


def _controller_manager(folder: Path, credentials: Credentials) -> dict[str, object]:
    return {
        **_client("controller-manager", credentials),
        "service-account-private-key-file": credentials.key(SERVICE_ACCOUNTS),
        "root-ca-file": credentials.authority,
        "use-service-account-credentials": "true",
        # It creates this folder, by default in the machine's /usr.
        "flex-volume-plugin-dir": folder / "volume-plugins",
        "node-monitor-period": "1s",
        "node-monitor-grace-period": f"{NODE_GRACE_S}s",
    }


def _client(name: str, credentials: Credentials) -> dict[str, object]:
    return {
        "kubeconfig": credentials.kubeconfig(name),
        "leader-elect": "false",
        "bind-address": "127.0.0.1",
        # The port without TLS.
        "port": 0,
    }
