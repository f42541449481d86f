"""Small audit logs and the findings of the verifier."""

from collections.abc import Sequence
from pathlib import Path

from proxy.audit.audit_log import LAST_LINE_FIELD, AuditLogWriter, Finding, day_of, verify

NOW = 4_000_000_000.0
"""In the year 2096, so that no earlier day exceeds the retention time."""
DAY = day_of(NOW)


def write(
    root: Path, *run_ids: str, key: bytes | None = None, now: float = NOW, lines: int = 3
) -> list[Path]:
    """Write finished logs; return their paths."""
    return [_written(root / day_of(now), run_id, key, now, lines) for run_id in run_ids]


def _written(directory: Path, run_id: str, key: bytes | None, now: float, lines: int) -> Path:
    writer = AuditLogWriter(directory, run_id, key, lambda: now)
    writer.begin()
    for number in range(1, lines):
        writer.append(writer.next_line({"kind": "call", "step": number, "é": "\ud800"}))
    writer.append(writer.next_line({"kind": "failure", LAST_LINE_FIELD: True, "error": "none"}))
    writer.finish()
    writer.close()
    return directory / f"{run_id}.jsonl"


def found(
    root: Path, *names: str, key: bytes | None = None, keep_days: float = 90
) -> list[Finding]:
    """Return the verifier's findings."""
    return list(verify(root, key, names, keep_days))


def states(root: Path, *names: str, key: bytes | None = None) -> list[str]:
    """Return the state of each log, the index first."""
    return [finding.state for finding in found(root, *names, key=key)]


def errors(root: Path, key: bytes | None = None) -> Sequence[str]:
    """Return the errors as text."""
    findings = found(root, key=key)
    return [f"{each.name}: {each.detail}" for each in findings if each.state == "WRONG"]
