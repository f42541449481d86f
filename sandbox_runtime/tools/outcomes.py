"""What came of a command, as policies word it and as the loop is told of it."""

from policies.observation import CommandOutcome
from sandbox_runtime.sandbox import ExecResult
from sandbox_runtime.tools.base import Observation


def outcome_of(result: ExecResult, timeout_s: float) -> CommandOutcome:
    """What the words for it are made of."""
    return CommandOutcome(
        exit_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        timeout_s=timeout_s,
        duration_s=result.duration_s,
        timed_out=result.timed_out,
        oom_kills=result.oom_kills,
        pids_refused=result.pids_refused,
        job_id=result.job_id,
        waiting=result.waiting,
    )


def observed(words: str, result: ExecResult) -> Observation:
    """The words, and what the loop counts."""
    return Observation(
        words,
        exit_code=None if result.running else result.exit_code,
        output_lines=result.output_lines,
        cpu_s=result.cpu_s,
        peak_memory_bytes=result.peak_memory_bytes,
    )
