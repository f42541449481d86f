"""The checks of `doctor` for bubblewrap: the isolation as seen from inside a sandbox, and a
diagnosis of hosts on which no sandbox starts."""

from collections.abc import Mapping
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
"""A shell script that reports on its own sandbox. It tries to open files that must not open, and
changes nothing."""


def isolation_checks(probe_output: bytes) -> list[Check]:
    """Return a check for each part of the isolation, from the output of PROBE. A check fails if
    its lines are missing, except the check of the host's kernel, which fails only if there is an
    `opens` line."""
    seen: dict[str, list[str]] = {}
    for line in probe_output.decode(errors="replace").splitlines():
        name, _, value = line.partition(" ")
        seen.setdefault(name, []).append(value.strip())
    capabilities = int(seen.get("CapEff:", ["ffffffff"])[0], 16)
    unprivileged = capabilities == 0 and seen.get("NoNewPrivs:") == ["1"]
    filtered = seen.get("Seccomp:") == ["2"]
    interfaces = seen.get("interface", [])
    only_loopback = interfaces == ["lo"]
    writable = seen.get("opens", [])
    return [
        Check(
            "capabilities",
            unprivileged,
            "none, and none can be gained" if unprivileged else "some are left or can be gained",
        ),
        Check("system calls", filtered, "filtered by seccomp" if filtered else "not filtered"),
        Check(
            "network",
            only_loopback,
            "absent" if only_loopback else f"interfaces {', '.join(interfaces)}",
        ),
        Check(
            "host kernel",
            not writable,
            f"opens for writing: {', '.join(writable)}" if writable else "its settings are closed",
        ),
    ]


def start_failure_reason(proc: Path = Path("/proc"), root: Path = Path("/")) -> str:
    """Return a known reason why unprivileged sandboxes do not start on this host, with the remedy,
    or "for no known reason"."""
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
            "this is a container, whose isolation forbids sandboxes: start it with --security-opt"
            " for each of seccomp=unconfined, apparmor=unconfined and systempaths=unconfined, or"
            " use the docker backend"
        )
    return "for no known reason"
