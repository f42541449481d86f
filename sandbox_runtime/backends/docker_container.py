"""The request that creates a container: isolation and limits in the terms of Docker's API."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.isolation import Isolation
from policies.workspace import SHARED_DIR, WORKING_DIR
from sandbox_runtime.backends.docker_engine import EngineJson
from sandbox_runtime.backends.limits import (
    DEVPTS_OPTIONS,
    guest_user,
    rlimits,
    tmpfs_options,
    tmpfs_size_mib,
)
from sandbox_runtime.backends.seccomp import docker_seccomp_profile

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID", "KILL")
"""The capabilities that apt and pip need. Sandboxes have only these at the standard level, and none
at the strict level."""
AGENT_DIR = "/.agent"
AGENT_PATH = f"{AGENT_DIR}/agent"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH that the engine sets for images without one."""
RUNSC_PROGRAMS = "/usr/local/lib/runsc/bin"
"""A directory in which an image may have replacements of programs that fail on runsc. Debian's `ls`
and `stat` pass a flag to statx (AT_NO_AUTOMOUNT) that older versions of runsc refuse."""
_STRICT_DISKS = {WORKING_DIR: 1 / 2, "/tmp": 1 / 4, "/home": 1 / 8, "/run": 1 / 8}
"""The writable directories at the strict level, and each one's share of the disk."""
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_VOLUME_MIB = 64
_TTY_GROUP = 5
"""The group of terminals: 5 in Docker's own devpts, and `tty` in all distributions."""
_SHARED_MEMORY_BYTES = 64 << 20
_RUNSC_PIDS = 256
_RUNSC_PIDS_PER_PROCESS = 16
"""The number of runsc's threads that the host's pids limit allows for each process in the sandbox;
up to 11 were measured. runsc itself limits the processes in the sandbox. Reaching the host's limit
ends the sandbox, so it is only a second barrier."""

_MASKED_PATHS = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys"),
    *("/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats"),
    *("/proc/sched_debug", "/proc/scsi", "/proc/slabinfo", "/proc/timer_list", "/proc/timer_stats"),
    *("/proc/vmallocinfo", "/sys/devices/virtual/powercap", "/sys/firmware"),
)
"""Files that show the host kernel's state to root, including root in a container: the files that
Docker masks by default, and more."""


@dataclass(frozen=True, slots=True)
class ImageMetadata:
    """The image metadata that creating a container needs."""

    id: str
    machine: str
    """The image's machine type in the spelling of `uname -m`, such as x86_64. A type that is not in
    _MACHINES keeps the engine's spelling."""
    volumes: tuple[str, ...]
    """Directories for which the image declares volumes."""
    path: str = _PATH
    """The image's PATH."""


def parse_image(response: EngineJson) -> ImageMetadata:
    """Parse the engine's description of an image."""
    config = response["Config"]
    env = {name: value for name, _, value in (e.partition("=") for e in config.get("Env") or ())}
    architecture: str = response.get("Architecture") or ""
    machine = _MACHINES.get(architecture, architecture)
    volumes = tuple(config.get("Volumes") or ())
    return ImageMetadata(response["Id"], machine, volumes, env.get("PATH") or _PATH)


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """The settings of a container to create."""

    image: ImageMetadata
    isolation: Isolation
    labels: Mapping[str, str]
    agent_volume: str
    """The volume that holds the guest agent's program."""
    runtime: str | None = None
    inputs: Path | None = None
    """A directory on the engine's host that all sandboxes see read-only."""
    host_uid: int | None = None
    """The uid and gid of the sandbox's programs; None: those of `guest_user(isolation)`."""
    has_quota: bool = False
    """True if the storage driver limits the disk."""
    disk_device: str | None = None
    """The block device of the engine's data directory, if its I/O can be limited."""

    def to_request(self) -> dict[str, Any]:
        """Return the body of the request that creates the container."""
        user, uid = guest_user(self.isolation), self._uid
        path = self.image.path
        if is_runsc(self.runtime):
            path = f"{RUNSC_PROGRAMS}:{path}"
        env = {
            "PATH": user.search_path(path),
            "LANG": "C.UTF-8",
            "DEBIAN_FRONTEND": "noninteractive",
            **user.env,
        }
        return {
            "Image": self.image.id,
            "Entrypoint": [AGENT_PATH],
            "Cmd": [],
            "Env": [f"{name}={value}" for name, value in env.items()],
            "Labels": dict(self.labels),
            "User": f"{uid}:{uid}",
            "WorkingDir": "/",
            "Hostname": "sandbox",
            # Standard input closes when the attached connection ends.
            **dict.fromkeys(("OpenStdin", "StdinOnce", "AttachStdin"), True),
            **dict.fromkeys(("AttachStdout", "AttachStderr"), True),
            "NetworkDisabled": True,
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": {
                **self._isolation_settings(),
                **resource_limits(self.isolation, self.runtime),
                **self._disk_settings(),
                **self._disk_speed_settings(),
            },
        }

    @property
    def _uid(self) -> int:
        return guest_user(self.isolation).uid if self.host_uid is None else self.host_uid

    def _isolation_settings(self) -> dict[str, Any]:
        strict = self.isolation.level == "strict"
        return {
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "CapAdd": [] if strict else list(CAPABILITIES),
            "SecurityOpt": ["no-new-privileges", f"seccomp={docker_seccomp_profile()}"],
            "IpcMode": "private",
            "CgroupnsMode": "private",
            "ShmSize": _SHARED_MEMORY_BYTES,
            "OomScoreAdj": 500,
            "AutoRemove": True,
            "LogConfig": {"Type": "none"},
            "Runtime": self.runtime or "",
            # The agent is process 1: no process inside can kill it, and it reaps orphans.
            "Init": False,
            "ReadonlyRootfs": strict,
            "MaskedPaths": list(_MASKED_PATHS),
            "Ulimits": [
                {"Name": name, "Soft": value, "Hard": value}
                for name, value in self._rlimits().items()
            ],
        }

    def _rlimits(self) -> Mapping[str, int]:
        # runsc counts the processes of a user per sandbox, so RLIMIT_NPROC works there.
        processes = {"nproc": self.isolation.pids} if is_runsc(self.runtime) else {}
        return {**rlimits(self.isolation), **processes}

    def _disk_settings(self) -> dict[str, Any]:
        # runsc's kernel has its own terminals.
        terminals = [] if is_runsc(self.runtime) else [_terminals_mount(self.labels)]
        mounts = [*terminals, agent_mount(self.agent_volume, is_read_only=True)]
        if self.inputs:
            mounts.append(_mount("bind", str(self.inputs), SHARED_DIR))
        # An image's volumes would have no size limit.
        disks = {path: tmpfs_options(_VOLUME_MIB) + ",exec" for path in self.image.volumes}
        if self.isolation.level == "strict":
            disks |= self._strict_disk_options()
        quota = {"StorageOpt": {"size": f"{self.isolation.disk_mib}m"}} if self.has_quota else {}
        return {"Mounts": mounts, "Tmpfs": disks, **quota}

    def _disk_speed_settings(self) -> dict[str, Any]:
        mib_per_s = self.isolation.disk_mib_per_s
        if self.disk_device is None or mib_per_s is None:
            return {}
        rates = [{"Path": self.disk_device, "Rate": mib_per_s << 20}]
        return {"BlkioDeviceReadBps": rates, "BlkioDeviceWriteBps": rates}

    def _strict_disk_options(self) -> Mapping[str, str]:
        size_mib, uid = tmpfs_size_mib(self.isolation), self._uid
        owner = f"uid={uid},gid={uid},mode=0755,exec"
        return {
            path: f"{tmpfs_options(int(size_mib * share))},{owner}"
            for path, share in _STRICT_DISKS.items()
        }


def resource_limits(isolation: Isolation, runtime: str | None) -> dict[str, int]:
    """Return the limits that can be changed in a running container."""
    memory, pids = isolation.memory_mib << 20, isolation.pids
    if is_runsc(runtime):
        pids = pids * _RUNSC_PIDS_PER_PROCESS + _RUNSC_PIDS
    return {
        "Memory": memory,
        "MemorySwap": memory,
        "NanoCpus": int(isolation.cpus * 1e9),
        "PidsLimit": pids,
    }


def is_runsc(runtime: str | None) -> bool:
    """Return True if the runtime's name begins with runsc: gVisor, which gives each sandbox its own
    kernel."""
    return runtime is not None and runtime.startswith("runsc")


def agent_mount(volume: str, *, is_read_only: bool) -> dict[str, Any]:
    """Return the mount of a volume with an agent's program. The engine copies no files of the image
    into the volume."""
    mount = _mount("volume", volume, AGENT_DIR)
    return {**mount, "ReadOnly": is_read_only, "VolumeOptions": {"NoCopy": True}}


def _terminals_mount(labels: Mapping[str, str]) -> dict[str, Any]:
    """Return an anonymous devpts volume, which replaces the engine's unbounded /dev/pts.

    The engine removes the volume with the container; `sweep` removes leftover volumes.
    """
    options = {"type": "devpts", "device": "devpts", "o": f"{DEVPTS_OPTIONS},gid={_TTY_GROUP}"}
    return {
        "Type": "volume",
        "Target": "/dev/pts",
        "VolumeOptions": {
            "NoCopy": True,
            "Labels": dict(labels),
            "DriverConfig": {"Name": "local", "Options": options},
        },
    }


def _mount(kind: str, source: str, target: str) -> dict[str, Any]:
    return {"Type": kind, "Source": source, "Target": target, "ReadOnly": True}
