"""The request that creates a container: its isolation and its limits, in the engine's terms."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.isolation import Isolation
from policies.workspace import SHARED_DIR, WORKING_DIR
from sandbox_runtime.backends.docker_engine import EngineJson
from sandbox_runtime.backends.limits import (
    TERMINALS,
    guest_user,
    largest_disk_mib,
    process_limits,
    tmpfs_options,
)
from sandbox_runtime.backends.seccomp import docker_seccomp_profile

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID", "KILL")
"""What apt and pip need of root inside; all others are dropped."""
AGENT_DIR = "/.agent"
AGENT_PATH = f"{AGENT_DIR}/agent"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What the engine takes where an image does not say."""
RUNSC_PROGRAMS = "/usr/local/lib/runsc/bin"
"""Where an image may have programs for runsc in place of its own. Debian's `ls` and `stat` pass
statx a flag (AT_NO_AUTOMOUNT) that runsc's kernel refused for years."""
_STRICT_DISKS = {WORKING_DIR: 1 / 2, "/tmp": 1 / 4, "/home": 1 / 8, "/run": 1 / 8}
"""All that can be written at the strict level: the share of the disk that each has."""
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_VOLUME_MIB = 64
_TTY_GROUP = 5
"""As the engine's own terminals have it, and every distribution calls it `tty`."""
_SHARED_MEMORY_BYTES = 64 << 20
_RUNSC_PIDS = 256
_RUNSC_PIDS_PER_PROCESS = 16
"""runsc counts a sandbox's processes itself. The host's bound, on all threads of runsc, is for one
that has gone wrong, and the end of the sandbox. Measured: up to 11 of them for a process inside."""

_MASKED = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys"),
    *("/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats"),
    *("/proc/sched_debug", "/proc/scsi", "/proc/slabinfo", "/proc/timer_list", "/proc/timer_stats"),
    *("/proc/vmallocinfo", "/sys/devices/virtual/powercap", "/sys/firmware"),
)
"""What the host's kernel says of itself to root, and so to the root inside: what engines hide, and
more."""


@dataclass(frozen=True, slots=True)
class Image:
    """The image metadata that creating a container needs."""

    id: str
    machine: str
    """As `uname -m` calls it, or the engine where that is all we know."""
    volumes: tuple[str, ...]
    """Directories that the image wants on volumes."""
    path: str = _PATH
    """Where it has its programs."""


def image_of(answer: EngineJson) -> Image:
    """Return the metadata in the engine's answer about an image."""
    config = answer["Config"]
    env = {name: value for name, _, value in (e.partition("=") for e in config.get("Env") or ())}
    architecture: str = answer.get("Architecture") or ""
    machine = _MACHINES.get(architecture, architecture)
    volumes = tuple(config.get("Volumes") or ())
    return Image(answer["Id"], machine, volumes, env.get("PATH") or _PATH)


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """A container to create."""

    image: Image
    isolation: Isolation
    labels: Mapping[str, str]
    agent_volume: str
    """Holds the agent's program."""
    runtime: str | None = None
    inputs: Path | None = None
    """On the engine's host: shown read-only to all sandboxes."""
    host_uid: int | None = None
    """The user and the group that its programs are; None: those of the isolation's level."""
    quota: bool = False
    """Whether the storage driver bounds the disk."""
    disk_device: str | None = None
    """The block device below the engine's directory, if I/O to it can be limited."""

    def to_request(self) -> dict[str, Any]:
        """Return the body of the request that creates it."""
        user, uid = guest_user(self.isolation), self._uid
        env = {"LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", **user.env}
        if is_runsc(self.runtime):
            env["PATH"] = f"{RUNSC_PROGRAMS}:{self.image.path}"
        return {
            "Image": self.image.id,
            "Entrypoint": [AGENT_PATH],
            "Cmd": [],
            "Env": [f"{name}={value}" for name, value in env.items()],
            "Labels": dict(self.labels),
            "User": f"{uid}:{uid}",
            "WorkingDir": "/",
            "Hostname": "sandbox",
            # Its standard input ends with the connection that it came by.
            **dict.fromkeys(("OpenStdin", "StdinOnce", "AttachStdin"), True),
            **dict.fromkeys(("AttachStdout", "AttachStderr"), True),
            "NetworkDisabled": True,
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": {
                **self._isolation(),
                **limits(self.isolation, self.runtime),
                **self._disk(),
                **self._disk_speed(),
            },
        }

    @property
    def _uid(self) -> int:
        return guest_user(self.isolation).uid if self.host_uid is None else self.host_uid

    def _isolation(self) -> dict[str, Any]:
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
            # The agent is process 1: nothing inside can kill it, and it collects the orphans.
            "Init": False,
            "ReadonlyRootfs": strict,
            "MaskedPaths": list(_MASKED),
            "Ulimits": [
                {"Name": name, "Soft": value, "Hard": value}
                for name, value in self._rlimits().items()
            ],
        }

    def _rlimits(self) -> Mapping[str, int]:
        # Under runsc a user inside is nobody else's user, so that his processes can be counted.
        processes = {"nproc": self.isolation.pids} if is_runsc(self.runtime) else {}
        return {**process_limits(self.isolation), **processes}

    def _disk(self) -> dict[str, Any]:
        # runsc's own kernel has terminals of its own.
        terminals = [] if is_runsc(self.runtime) else [_terminals(self.labels)]
        mounts = [*terminals, agent_mount(self.agent_volume, is_read_only=True)]
        if self.inputs:
            mounts.append(_mount("bind", str(self.inputs), SHARED_DIR))
        # An image's volumes would be disk that nothing bounds.
        disks = {path: tmpfs_options(_VOLUME_MIB) + ",exec" for path in self.image.volumes}
        if self.isolation.level == "strict":
            disks |= self._strict_disks()
        quota = {"StorageOpt": {"size": f"{self.isolation.disk_mib}m"}} if self.quota else {}
        return {"Mounts": mounts, "Tmpfs": disks, **quota}

    def _disk_speed(self) -> dict[str, Any]:
        mib_per_s = self.isolation.disk_mib_per_s
        if self.disk_device is None or mib_per_s is None:
            return {}
        rates = [{"Path": self.disk_device, "Rate": mib_per_s << 20}]
        return {"BlkioDeviceReadBps": rates, "BlkioDeviceWriteBps": rates}

    def _strict_disks(self) -> Mapping[str, str]:
        size_mib, uid = largest_disk_mib(self.isolation), self._uid
        owner = f"uid={uid},gid={uid},mode=0755,exec"
        return {
            path: f"{tmpfs_options(int(size_mib * share))},{owner}"
            for path, share in _STRICT_DISKS.items()
        }


def limits(isolation: Isolation, runtime: str | None) -> dict[str, int]:
    """Return the limits that can be changed while a container runs."""
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
    """Return whether a runtime, by its name, is gVisor's: each sandbox has a kernel of its own."""
    return runtime is not None and runtime.startswith("runsc")


def agent_mount(volume: str, *, is_read_only: bool) -> dict[str, Any]:
    """How a container has an agent's volume: never with what its image has in that place."""
    mount = _mount("volume", volume, AGENT_DIR)
    return {**mount, "ReadOnly": is_read_only, "VolumeOptions": {"NoCopy": True}}


def _terminals(labels: Mapping[str, str]) -> dict[str, Any]:
    """An anonymous devpts volume, which replaces the engine's unbounded /dev/pts.

    The engine removes it with the container; `sweep` removes those left over.
    """
    options = {"type": "devpts", "device": "devpts", "o": f"{TERMINALS},gid={_TTY_GROUP}"}
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
