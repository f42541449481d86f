"""What bubblewrap's walls are worth on this host, tried from inside a sandbox."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox_runtime.backends.base import Check

PROBE = """
while read -r name value; do
    case $name in CapEff:|NoNewPrivs:|Seccomp:) echo "$name $value" ;; esac
done < /proc/self/status
while read -r name _; do
    case $name in *:*) echo "interface ${name%%:*}" ;; esac
done < /proc/net/dev
for path in /proc/sys/kernel/core_pattern /proc/sysrq-trigger /proc/sys/vm/drop_caches; do
    (exec 3>> "$path") 2> /dev/null && echo "opens $path"
done
:
"""
"""A shell script that looks at its own sandbox, opens what must not open and changes nothing."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What PROBE saw."""

    capabilities: int
    no_new_privileges: bool
    filtered: bool
    interfaces: tuple[str, ...]
    switches: tuple[str, ...]
    """What opens for writing."""


def observed(printed: bytes) -> Observed:
    """What PROBE printed; what it did not print counts against the wall."""
    seen: dict[str, list[str]] = {}
    for line in printed.decode(errors="replace").splitlines():
        name, _, value = line.partition(" ")
        seen.setdefault(name, []).append(value.strip())
    return Observed(
        capabilities=int(seen.get("CapEff:", ["ffffffff"])[0], 16),
        no_new_privileges=seen.get("NoNewPrivs:") == ["1"],
        filtered=seen.get("Seccomp:") == ["2"],
        interfaces=tuple(seen.get("interface", ())),
        switches=tuple(seen.get("opens", ())),
    )


def walls(observed: Observed) -> list[Check]:
    """One finding per wall."""
    powerless = observed.capabilities == 0 and observed.no_new_privileges
    alone = observed.interfaces == ("lo",)
    switches = observed.switches
    return [
        Check(
            "capabilities", powerless, "none, and none to gain" if powerless else "some are left"
        ),
        Check(
            "system calls",
            observed.filtered,
            "filtered by seccomp" if observed.filtered else "not filtered",
        ),
        Check(
            "network",
            alone,
            "absent" if alone else f"interfaces {', '.join(observed.interfaces)}",
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
