"""The properties of a Docker engine, and the checks of `doctor` that report which isolation these
properties allow."""

import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox_runtime.backends.base import Check
from sandbox_runtime.backends.docker_container import is_runsc
from sandbox_runtime.backends.docker_engine import EngineJson
from sandbox_runtime.backends.limits import (
    PENDING_SIGNAL_ATTEMPTS,
    PENDING_SIGNALS,
    maps_host_uids,
)

_LIMIT_KEYS = {
    "memory": "MemoryLimit",
    "swap": "SwapLimit",
    "cpu": "CpuCfsQuota",
    "pids": "PidsLimit",
}
_NEEDED_LIMITS = ("memory", "pids")
_QUOTA_DRIVERS = ("btrfs", "zfs")
_BLOCK_DEVICES, _DEVICES = Path("/sys/dev/block"), Path("/dev")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The properties of an engine that sandboxes depend on, from its `/info`."""

    version: str
    runtimes: frozenset[str]
    default_runtime: str
    security: Mapping[str, str]
    """The security options by name, with their parameters."""
    limits: tuple[str, ...]
    """The names, among memory, swap, cpu and pids, of the resources that the engine can limit."""
    limits_block_io: bool
    cgroup_version: str
    may_have_quota: bool
    """True if the storage driver may support disk limits. Only an attempt to set one shows it."""
    directory: Path | None
    """The engine's data directory, if it is on this host."""
    has_host_uids: bool
    """True if the uids of containers are host uids, so that HOST_UIDS can be used."""

    @property
    def maps_uids(self) -> bool:
        """True if root in a container is another user on the host."""
        return _maps_uids(self.security)


def engine_info(response: EngineJson, url: str) -> EngineInfo:
    """Parse the `/info` response of the engine at `url`."""
    security = _security_options(response)
    status = dict(response.get("DriverStatus") or ())
    on_xfs = status.get("Backing Filesystem") == "xfs"
    is_local = url.startswith("unix://")
    on_this_kernel = is_local and response.get("KernelVersion") == platform.release()
    return EngineInfo(
        version=str(response.get("ServerVersion", "?")),
        runtimes=frozenset(response.get("Runtimes") or ()),
        default_runtime=str(response.get("DefaultRuntime", "?")),
        security=security,
        limits=tuple(name for name, key in _LIMIT_KEYS.items() if response.get(key)),
        limits_block_io=not any("bps" in warning for warning in response.get("Warnings") or ()),
        cgroup_version=str(response.get("CgroupVersion", "1")),
        may_have_quota=response.get("Driver") in _QUOTA_DRIVERS or on_xfs,
        directory=_data_directory(response) if is_local else None,
        has_host_uids=on_this_kernel and not _maps_uids(security) and maps_host_uids(),
    )


def _maps_uids(security: Mapping[str, str]) -> bool:
    return "userns" in security or "rootless" in security


def _security_options(response: EngineJson) -> dict[str, str]:
    options = (str(option).partition(",") for option in response.get("SecurityOptions") or ())
    return {name.removeprefix("name="): more for name, _, more in options}


def _data_directory(response: EngineJson) -> Path | None:
    directory = Path(response.get("DockerRootDir") or "/nonexistent")
    # With containerd's storage, which has a driver type, containers are in another directory.
    elsewhere = "driver-type" in dict(response.get("DriverStatus") or ())
    here = response.get("Name") == socket.gethostname() and not elsewhere
    return directory if here and os.access(directory, os.F_OK) else None


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """The disk that holds an engine's data directory."""

    path: str | None
    """The device file, such as /dev/sda; None if reads and writes cannot be limited."""
    why_unlimited: str = ""
    """The reason why reads and writes cannot be limited; empty if they can."""


def block_device(
    engine: EngineInfo, *, numbers_dir: Path = _BLOCK_DEVICES, devices_dir: Path = _DEVICES
) -> BlockDevice:
    """Return the disk that holds an engine's data directory: the whole disk, because the kernel
    cannot limit a partition.

    `numbers_dir` has a link for each device, named by its number. `devices_dir` has the device
    files.
    """
    directory = engine.directory
    if directory is None:
        return BlockDevice(None, "the engine's directory cannot be seen from this host")
    if not engine.limits_block_io:
        return BlockDevice(None, "the engine or its kernel cannot limit block I/O")
    number = directory.stat().st_dev
    found = (numbers_dir / f"{os.major(number)}:{os.minor(number)}").resolve()
    if (found / "partition").exists():
        found = found.parent
    try:
        named = re.search(r"^DEVNAME=(.+)$", (found / "uevent").read_text("utf-8"), re.MULTILINE)
    except FileNotFoundError:
        named = None
    if named is None:  # btrfs, zfs, overlay and tmpfs have device numbers without a block device
        return BlockDevice(None, f"the file system at {directory} names no block device")
    device = devices_dir / named[1]
    if not device.exists():
        return BlockDevice(None, f"{device} is missing")
    return BlockDevice(str(device))


def accepted_escapes(engine: EngineInfo, runtime: str | None) -> dict[str, str]:
    """Return the attempts to escape that succeed in containers, and why that is accepted."""
    if engine.maps_uids or is_runsc(runtime or engine.default_runtime):
        return {}
    why = "at standard all sandboxes share the counters of the host's root"
    return dict.fromkeys(PENDING_SIGNAL_ATTEMPTS, why)


def engine_checks(
    engine: EngineInfo, runtime: str | None, disk_text: str, device: BlockDevice
) -> Iterator[Check]:
    """Yield a check for each part of the isolation.

    `disk_text` is the text that says how disk space is limited; `device` is the disk whose speed
    may be limited.
    """
    name = runtime or engine.default_runtime
    yield _runtime_check(name, engine.runtimes)
    yield _limits_check(engine, disk_text)
    yield Check("docker disk speed", True, _disk_speed_text(engine, device))
    yield Check("docker system calls", "seccomp" in engine.security, _seccomp_text(name, engine))
    yield Check("docker users", True, _users_text(engine))
    yield Check("docker confinement", True, _confinement_text(engine))


def _runtime_check(name: str, known_runtimes: frozenset[str]) -> Check:
    if name not in known_runtimes:
        names = ", ".join(sorted(known_runtimes))
        return Check("docker runtime", False, f"the engine has no {name!r}; it has {names}")
    return Check("docker runtime", True, _kernel_text(name))


def _kernel_text(name: str) -> str:
    if is_runsc(name):
        return f"{name}: each sandbox has a kernel of its own, in user space"
    return (
        f"{name}: sandboxes SHARE THE HOST'S KERNEL, and a kernel vulnerability lets code escape;"
        " for untrusted code install runsc (gVisor) and set sandbox.docker.runtime"
    )


def _limits_check(engine: EngineInfo, disk_text: str) -> Check:
    missing = [name for name in _LIMIT_KEYS if name not in engine.limits]
    detail = f"{', '.join(engine.limits)} by cgroup v{engine.cgroup_version}; {disk_text}"
    if missing:
        detail += f"; NOT LIMITED: {', '.join(missing)}"
    return Check("docker limits", all(name in engine.limits for name in _NEEDED_LIMITS), detail)


def _disk_speed_text(engine: EngineInfo, device: BlockDevice) -> str:
    if device.path is None:
        return f"NOT LIMITED: {device.why_unlimited}"
    limited = f"the speed of each sandbox's reads and writes of {device.path} is limited"
    if engine.cgroup_version == "2":
        return limited
    return f"{limited}, except writes to the page cache, which only cgroup v2 limits"


def _seccomp_text(runtime: str, engine: EngineInfo) -> str:
    if "seccomp" not in engine.security:
        return "the engine has no seccomp: they are not filtered"
    return "handled by runsc's kernel" if is_runsc(runtime) else "filtered by our own profile"


def _users_text(engine: EngineInfo) -> str:
    if "rootless" in engine.security:
        return "the engine runs without root: root inside is an ordinary user of the host"
    if "userns" in engine.security:
        return "userns-remap is on: root inside is nobody on the host"
    return (
        "userns-remap is OFF: root inside is the host's root, less its capabilities, and all"
        f" sandboxes together have {PENDING_SIGNALS} queued signals and timers; isolation level"
        " strict has no root inside"
    )


def _confinement_text(engine: EngineInfo) -> str:
    lsm = [name for name in ("apparmor", "selinux") if name in engine.security]
    return f"no network; no new privileges; {' and '.join(lsm) or 'no AppArmor, no SELinux'}"
