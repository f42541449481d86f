"""Refused connections in the audit log: many of them make a bounded number of lines."""

import json
from pathlib import Path

from proxy.agent.guard import MAX_EMITTED, PERIOD_S, EgressWatch
from proxy.audit.audit import AuditLogs
from sandbox_runtime.egress.decision import Decision
from tests.fakes.tasks import make_task
from tests.proxy.agent.runs import USER, MemoryArtifactStore

MANY = 100_000
PERIODS = 3
REFUSED = Decision("evil.example", 443, "denied", "host evil.example is not allowed", 0, 0, 0)


async def test_refused_connections_make_a_bounded_number_of_audit_lines(tmp_path: Path) -> None:
    task = make_task("r", MemoryArtifactStore(), "m", [USER])
    logs = AuditLogs(tmp_path, keep_days=90)
    log = logs.create_run_log(task, "owner", "fingerprint")
    now = 0.0
    await log.begin()
    watch = EgressWatch(task, log.on_event, lambda: now)
    for number in range(MANY):
        now = PERIODS * PERIOD_S * number / MANY
        await watch.on_decision(REFUSED)
    await watch.flush()
    await log.on_error(TimeoutError())
    await logs.aclose()
    (path,) = tmp_path.glob("*/r.jsonl")
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    egress = [line for line in lines if line["kind"] == "egress"]
    refused = [line for line in egress if line["host"] == REFUSED.host]
    summaries = [line["reason"] for line in egress if line["host"] == ""]
    assert len(egress) == len(refused) + len(summaries) == PERIODS * (MAX_EMITTED + 1)
    suppressed = sum(int(reason.split()[1]) for reason in summaries)
    assert len(refused) + suppressed == MANY
