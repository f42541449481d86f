"""Retention of audit logs."""

import math
from pathlib import Path

import pytest

from proxy.agent.task import AgentTask
from proxy.audit.audit import AuditLogs
from tests.fakes.results import SUBMITTED
from tests.fakes.tasks import make_task
from tests.proxy.agent.runs import USER, MemoryArtifactStore
from tests.proxy.audit.logs import NOW, found, states, write

A_DAY_S = 86_400.0


async def log_run(logs: AuditLogs, task: AgentTask) -> None:
    """Write the log of a run without events."""
    log = logs.create_run_log(task, "owner", "fingerprint")
    await log.begin()
    await log.on_result(SUBMITTED)
    await logs.aclose()


@pytest.mark.parametrize("keep_days", [1_000_000, math.inf])
async def test_logs_are_not_removed_if_the_retention_time_is_endless(
    keep_days: float, tmp_path: Path
) -> None:
    write(tmp_path, "first", now=0.0)
    audit_logs = AuditLogs(tmp_path, keep_days=keep_days, now=lambda: NOW)
    task = make_task("last", MemoryArtifactStore(), "m", [USER])
    await log_run(audit_logs, task)
    assert [each.state for each in found(tmp_path, keep_days=keep_days)] == ["ok"] * 4


async def test_expired_logs_are_removed_when_a_new_day_begins(tmp_path: Path) -> None:
    for ago in (3, 2, 1):
        write(tmp_path, f"r{ago}", now=NOW - ago * A_DAY_S)
    audit_logs = AuditLogs(tmp_path, keep_days=1, now=lambda: NOW)
    task = make_task("r0", MemoryArtifactStore(), "m", [USER])
    await log_run(audit_logs, task)
    assert [log.stem for log in sorted(tmp_path.glob("*/r*.jsonl"))] == ["r1", "r0"]
    assert states(tmp_path, "r1", "r0") == ["ok", "ok"]
