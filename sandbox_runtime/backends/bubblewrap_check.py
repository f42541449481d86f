"""What bubblewrap's walls are worth on this host, tried from inside a sandbox."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from sandbox_runtime.backends.base import Check

PROBE = """
import json, os
def opens(path):
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError:
        return False
    return True
with open("/proc/self/status") as file:
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
with open("/proc/net/dev") as file:
    interfaces = [line.split(":")[0].strip() for line in file if ":" in line]
switches = ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches")
print(json.dumps({
    "capabilities": status["CapEff"],
    "no_new_privileges": status["NoNewPrivs"] == "1",
    "filtered": status["Seccomp"] == "2",
    "interfaces": interfaces,
    "switches": [path for path in switches if opens(path)],
}))
"""
"""A Python program that looks at its own sandbox, opens what must not open and changes nothing."""


class Observed(TypedDict):
    """What PROBE prints."""

    capabilities: str
    no_new_privileges: bool
    filtered: bool
    interfaces: list[str]
    switches: list[str]


def walls(observed: Observed) -> list[Check]:
    """One finding per wall."""
    powerless = int(observed["capabilities"], 16) == 0 and observed["no_new_privileges"]
    alone = observed["interfaces"] == ["lo"]
    switches = observed["switches"]
    return [
        Check(
            "capabilities", powerless, "none, and none to gain" if powerless else "some are left"
        ),
        Check(
            "system calls",
            observed["filtered"],
            "filtered by seccomp" if observed["filtered"] else "not filtered",
        ),
        Check(
            "network",
            alone,
            "absent" if alone else f"interfaces {', '.join(observed['interfaces'])}",
        ),
        Check(
            "host kernel",
            not switches,
            f"opens for writing: {', '.join(switches)}" if switches else "its settings are closed",
        ),
    ]


def hindrance(proc: Path = Path("/proc"), root: Path = Path("/")) -> str:
    """What on this host is known to keep unprivileged sandboxes from starting, and the cure."""
    reasons: Mapping[Path, tuple[str, str]] = {
        proc / "sys/user/max_user_namespaces": ("0", "user namespaces are off: raise {}"),
        proc / "sys/kernel/unprivileged_userns_clone": (
            "0",
            "user namespaces are off: set {} to 1",
        ),
        proc / "sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "AppArmor restricts user namespaces (Ubuntu 23.10 and later): set {} to 0"
            " or give unshare and bwrap a profile that allows userns",
        ),
    }
    for file, (bad, sentence) in reasons.items():
        if file.is_file() and file.read_text(encoding="ascii").strip() == bad:
            return sentence.format(f"sysctl {'.'.join(file.parts[-2:])}")
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return (
            "this is a container, whose own walls forbid it: start it with --security-opt seccomp,"
            " apparmor and systempaths each =unconfined, or use the docker backend"
        )
    return "for no known reason"
