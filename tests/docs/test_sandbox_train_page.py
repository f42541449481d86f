"""The commands of docs/research/sandbox-train.md run in order, and print what the page shows."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, fences

PAGE = ROOT / "docs/research/sandbox-train.md"


def test_commands_of_the_sandbox_train_page_print_the_output_shown_there(tmp_path: Path) -> None:
    pytest.importorskip("rouge_score", reason="the extra `training` is not installed")
    program = tmp_path / ".venv/bin/sandbox-train"
    program.parent.mkdir(parents=True)
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT}:$PYTHONPATH" exec {sys.executable} -m training "$@"\n',
        "utf-8",
    )
    program.chmod(0o755)
    blocks = [*fences(PAGE), None]
    ran = 0
    for block, following in pairwise(blocks):
        if block is None or block.language != "sh" or "/pip " in block.text:
            continue
        ended = subprocess.run(
            ["bash", "-e", "-c", block.text],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        if following is not None and following.language == "text":
            assert ended.stdout == following.text, block.id
        ran += 1
    assert ran == 5
