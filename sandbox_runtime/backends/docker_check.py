"""What a Docker engine's walls are worth, told from what it says of itself."""

from collections.abc import Collection, Iterator

from sandbox_runtime.backends.base import Check
from sandbox_runtime.backends.docker_api import Facts
from sandbox_runtime.backends.docker_container import is_runsc
from sandbox_runtime.backends.docker_device import BlockDevice
from sandbox_runtime.backends.limits import PENDING_SIGNALS

_LIMITS = {"memory": "MemoryLimit", "swap": "SwapLimit", "cpu": "CpuCfsQuota", "pids": "PidsLimit"}
_NEEDED = ("memory", "pids")


def findings(engine: Facts, runtime: str | None, disk: str, device: BlockDevice) -> Iterator[Check]:
    """One per wall; `disk` says how the disk is bounded, and `device` is what it lies on."""
    name = runtime or str(engine.get("DefaultRuntime", "?"))
    security = _security(engine)
    yield _runtime(name, engine.get("Runtimes", {}))
    yield _limits(engine, disk)
    yield Check("docker disk speed", True, _disk_speed(engine, device))
    yield Check("docker system calls", "seccomp" in security, _seccomp(name, security))
    yield Check("docker users", True, _users(security))
    yield Check("docker confinement", True, _confinement(security))


def _security(engine: Facts) -> dict[str, str]:
    """The engine's security options: each name with what else is said of it."""
    options = (str(each).partition(",") for each in engine.get("SecurityOptions") or ())
    return {name.removeprefix("name="): more for name, _, more in options}


def _runtime(name: str, known: Collection[str]) -> Check:
    if name not in known:
        there = ", ".join(sorted(known))
        return Check("docker runtime", False, f"the engine has no {name!r}; it has {there}")
    return Check("docker runtime", True, _kernel(name))


def _kernel(name: str) -> str:
    if is_runsc(name):
        return f"{name}: each sandbox has a kernel of its own, in user space"
    return (
        f"{name}: sandboxes SHARE THE HOST'S KERNEL, and a hole in it is a way out; for code that"
        " nobody vouches for install runsc (gVisor) and set sandbox.docker.runtime"
    )


def _limits(engine: Facts, disk: str) -> Check:
    there = [name for name, key in _LIMITS.items() if engine.get(key)]
    missing = [name for name in _LIMITS if name not in there]
    words = f"{', '.join(there)} by cgroup v{engine.get('CgroupVersion', '1')}; {disk}"
    if missing:
        words += f"; NOT LIMITED: {', '.join(missing)}"
    return Check("docker limits", all(name in there for name in _NEEDED), words)


def _disk_speed(engine: Facts, device: BlockDevice) -> str:
    if device.path is None:
        return f"NOT LIMITED: {device.why_not}"
    limited = f"what each sandbox reads from {device.path} and writes to it is limited"
    if engine.get("CgroupVersion") == "2":
        return limited
    return f"{limited}, but for writes that the page cache takes: those only cgroup v2 limits"


def _seccomp(runtime: str, security: dict[str, str]) -> str:
    if "seccomp" not in security:
        return "the engine has no seccomp: nothing filters them"
    return "answered by runsc's kernel" if is_runsc(runtime) else "filtered by our own profile"


def _users(security: dict[str, str]) -> str:
    if "rootless" in security:
        return "the engine runs without root: root inside is an ordinary user of the host"
    if "userns" in security:
        return "userns-remap is on: root inside is nobody on the host"
    return (
        "userns-remap is OFF: root inside is the host's root, less its capabilities, and all"
        f" sandboxes together have {PENDING_SIGNALS} queued signals and timers; isolation level"
        " strict has no root inside"
    )


def _confinement(security: dict[str, str]) -> str:
    lsm = [name for name in ("apparmor", "selinux") if name in security]
    return f"no network; no new privileges; {' and '.join(lsm) or 'no AppArmor, no SELinux'}"
