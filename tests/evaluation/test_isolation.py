"""The server of gradings: the main script of its caller, and the ends of both."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evaluation.isolation import run_isolated
from tests.evaluation.evaluation_process import TIMEOUT_S, with_packages
from tests.processes import all_end

SCRIPT_WITHOUT_GUARD = """
from tests.training.made_rows import made_row
from training.rewards import Attempt, reward

print("begun")
attempt = Attempt(id="made/1", answer="B", submitted=True)
print(reward(made_row("B", "mcq1"), attempt).value)
print(reward(made_row("B", "mcq1"), attempt, function="own_rewards:half").value)
"""
OWN_REWARDS = """
import pathlib
import sys

def half(row, answer):
    assert pathlib.Path("own_rewards.py").exists()
    return float(sys.argv[1])
"""


def script(folder: Path, text: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python script in a folder, which also has the modules that it imports."""
    (folder / "script.py").write_text(text, "utf-8")
    return subprocess.Popen(
        [sys.executable, "script.py", *arguments],
        cwd=folder,
        env=with_packages(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_script_without_a_main_guard_gets_rewards_and_runs_once(tmp_path: Path) -> None:
    (tmp_path / "own_rewards.py").write_text(OWN_REWARDS, "utf-8")
    with script(tmp_path, SCRIPT_WITHOUT_GUARD, "0.5") as started:
        output = started.communicate(timeout=TIMEOUT_S)
    assert (started.returncode, *output) == (0, "begun\n1.0\n0.5\n", "")


def test_grading_function_defined_in_the_main_script_raises_a_grader_error(tmp_path: Path) -> None:
    text = """
from evaluation.isolation import GraderError, run_isolated

def grade():
    return 1

try:
    run_isolated(grade)
except GraderError as error:
    print(error)
"""
    with script(tmp_path, text) as started:
        output, _ = started.communicate(timeout=TIMEOUT_S)
    assert output.startswith("grader failure: AttributeError: Can't get attribute 'grade' on")


ENDLESS_GRADING = """
import os
import time

def grade():
    os.write(1, f"{os.getpgrp()} {os.getpid()}\\n".encode())  # the server leads the group
    time.sleep(600)
"""


def test_grading_server_and_its_gradings_end_when_the_caller_is_killed(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS_GRADING, "utf-8")
    text = "import endless, evaluation.isolation as i; i.run_isolated(endless.grade, timeout_s=600)"
    with script(tmp_path, text) as started:
        assert started.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in started.stdout.readline().split()]
        started.kill()
        assert len(pidfds) == 2
        assert all_end(pidfds)
        # All processes that have inherited the script's output have ended too.
        assert started.communicate(timeout=TIMEOUT_S) == ("", "")


def end_server() -> None:
    os.kill(os.getpgrp(), signal.SIGKILL)


def test_grading_after_the_end_of_the_server_starts_another_server() -> None:
    first = run_isolated(os.getpgrp)
    pidfd = os.pidfd_open(first)
    run_isolated(end_server)
    assert all_end([pidfd])
    second = run_isolated(os.getpgrp)
    assert first != second == run_isolated(os.getpgrp)


def test_gradings_of_several_threads_share_one_server() -> None:
    with ThreadPoolExecutor(8) as threads:
        work = [threads.submit(run_isolated, pow, number, 2) for number in range(24)]
        servers = {threads.submit(run_isolated, os.getpgrp).result() for _ in range(8)}
    assert [each.result() for each in work] == [number**2 for number in range(24)]
    assert len(servers) == 1
