"""Attack a running server and print what held: `python -m tests.attacks [NAME ...]`."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping

from tests.attacks import (
    bodies,
    connections,
    counters,
    frames,
    output_files,
    replies,
    starts,
    tenants,
)
from tests.attacks.report import Finding, render

GROUPS: Mapping[str, Callable[[], AsyncIterator[Finding]]] = {
    "tenants": tenants.attacks,
    "starts": starts.attacks,
    "counters": counters.attacks,
    "bodies": bodies.attacks,
    "frames": frames.attacks,
    "replies": replies.attacks,
    "files": output_files.attacks,
    "connections": connections.attacks,
}


def main() -> int:
    """Run the groups and print their findings. Return 1 if an attack did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="NAME", help=f"of {', '.join(GROUPS)}")
    groups = parser.parse_args().groups or list(GROUPS)
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Use {', '.join(GROUPS)}")
    findings = asyncio.run(_run(groups))
    sys.stdout.write(render(findings))
    return 1 if any(finding.failed for finding in findings) else 0


def _show(finding: Finding) -> None:
    sys.stderr.write(f"{finding.verdict}: {finding.attack}, {finding.backend}: {finding.figures}\n")


async def _run(groups: list[str]) -> list[Finding]:
    findings: list[Finding] = []
    for group in groups:
        async for finding in GROUPS[group]():
            _show(finding)
            findings.append(finding)
    return findings


if __name__ == "__main__":
    sys.exit(main())
