"""One node: its configuration files, its start, and its end as if the power were cut."""

import json
import os
from pathlib import Path
from typing import Any

from tests.cluster.cgroups import create_cgroup, delete_cgroup
from tests.cluster.credentials import Credentials
from tests.cluster.images import PAUSE_IMAGE, ImageStore
from tests.cluster.install import Installation
from tests.cluster.network import Network
from tests.cluster.processes import kill_all, pids_in, start, wait_until

INIT = Path(__file__).with_name("node_init.sh")
SECCOMP_PROFILE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "seccomp.json"
"""The kubelet finds it as `llm-sandbox.json`."""
PIDS_OF_A_POD = 256
"""Below the 512 processes at which an attack of the escape suite counts as successful."""
START_TIMEOUT_S = 60
LEASE_SECONDS = 4
"""The kubelet renews its Lease four times as often: each second."""
MEMORY_SHARES = 4
"""Each node offers this part of the machine's memory to Pods, so that three nodes fit on it."""


class Node:
    """A node of a cluster, numbered from 1. Its folder, with its disk, survives its end."""

    def __init__(
        self,
        number: int,
        folder: Path,
        cgroup: str,
        installation: Installation,
        credentials: Credentials,
        network: Network,
    ) -> None:
        self.number = number
        self.name = f"node{number}"
        self.network_namespace = network.namespace(number)
        self._folder = folder
        self._cgroup = f"{cgroup}/{self.name}"
        self._installation = installation
        self._credentials = credentials
        self._network = network
        socket = folder / "containerd.sock"
        self.images = ImageStore(installation.program("ctr"), socket, folder / "images")

    @property
    def running(self) -> bool:
        return bool(pids_in(self.network_namespace))

    def start(self, nodes: int) -> None:
        """Start the node, one of so many, unless it runs. Raise ClusterError."""
        if self.running:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write_configuration()
        self._network.create_node(self.number, nodes)
        create_cgroup(self._cgroup)
        self.images.socket.unlink(missing_ok=True)
        packages = self._installation.packages
        path = f"{packages}/usr/bin:{packages}/usr/sbin:{os.environ['PATH']}"
        # A kill of the first process, or of unshare, ends every process of the node.
        unshare = ("unshare", "--mount", "--propagation", "private", "--mount-proc", "--uts")
        folders = (self._folder, self._folder.parents[1], packages.parent)
        start(
            self.network_namespace,
            [
                *("env", f"PATH={path}", *unshare, "--pid", "--fork", "--kill-child"),
                *("sh", str(INIT), self.name, *map(str, folders), *self._kubelet()),
            ],
            self._folder / "node.log",
        )
        log = self._folder / "containerd.log"
        wait_until(self.images.socket.exists, START_TIMEOUT_S, "containerd of a node answers", log)

    def power_off(self) -> None:
        """End everything of the node at once, without a word to anybody. Raise ClusterError."""
        # First: a peer of this moment gets no reset connection, but no answer.
        if self._network.connected(self.number):
            self._network.cut_off(self.number)
        kill_all(self.network_namespace)
        self._network.delete_node(self.number)
        delete_cgroup(self._cgroup)

    def _kubelet(self) -> list[str]:
        return [
            self._installation.program("kubelet"),
            f"--config={self._folder}/kubelet.json",
            f"--kubeconfig={self._credentials.kubeconfig(self.name)}",
            f"--hostname-override={self.name}",
            f"--node-ip={self._network.address(self.number)}",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{self.images.socket}",
            # Images of this name are never removed to make room.
            f"--pod-infra-container-image={PAUSE_IMAGE}",
        ]

    def _write_configuration(self) -> None:
        files = {
            "containerd.toml": self._containerd(),
            "cni/10-bridge.conflist": json.dumps(self._cni()),
            "kubelet.json": json.dumps(self._kubelet_configuration()),
            "resolv.conf": "",
            # The node's /var is a folder of its disk.
            "var/lib/kubelet/seccomp/llm-sandbox.json": SECCOMP_PROFILE.read_text(encoding="utf-8"),
        }
        for name, content in files.items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")

    def _containerd(self) -> str:
        # Without CAP_SYS_RESOURCE, which virtual machines may lack, a negative oom_score_adj is
        # refused: hence restrict_oom_score_adj.
        return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
address = "{self.images.socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{self._installation.cni_plugins}"
conf_dir = "{self._folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{self._installation.program("runc")}"
"""

    def _cni(self) -> dict[str, Any]:
        bridge = {
            "type": "bridge",
            "bridge": "pods",
            "isDefaultGateway": True,
            "ipMasq": True,
            "ipam": {
                "type": "host-local",
                "subnet": self._network.pod_subnet(self.number),
                # On a tmpfs: a node that starts again has given no address.
                "dataDir": "/run/cni",
            },
        }
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}

    def _kubelet_configuration(self) -> dict[str, Any]:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        reserved = memory - memory // MEMORY_SHARES
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self._network.address(self.number),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self._credentials.authority)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(self._credentials.certificate(self.name)),
            "tlsPrivateKeyFile": str(self._credentials.key(self.name)),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._cgroup}",
            "cgroupsPerQOS": True,
            "systemReserved": {"memory": str(reserved)},
            "failSwapOn": False,
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "podPidsLimit": PIDS_OF_A_POD,
            "resolvConf": str(self._folder / "resolv.conf"),
            "makeIPTablesUtilChains": False,
            "nodeLeaseDurationSeconds": LEASE_SECONDS,
            "nodeStatusUpdateFrequency": "1s",
            # An image that is removed cannot be pulled again.
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
        }
