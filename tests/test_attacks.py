"""`python -m tests.attacks` needs root and a quarter of an hour, so only its start is tested."""

import subprocess
import sys


def test_help_of_the_attack_program_lists_its_groups_of_attacks() -> None:
    command = [sys.executable, "-m", "tests.attacks", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "bodies" in shown
    assert "connections" in shown
