"""Replays each corpus input of the fuzz targets once, as regression tests."""

import subprocess
from pathlib import Path

import pytest

from tests.sandbox_runtime.fuzz.building import (
    CORPUS,
    ENV,
    TARGETS,
    build,
    kept,
    missing,
    sandboxed,
)

pytestmark = pytest.mark.skipif(bool(missing(fuzzer=False)), reason="gcc or bwrap is missing")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("targets")
    build(directory, fuzzer=False)
    return directory


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_of_the_fuzz_corpus_cause_no_fault(targets: Path, target: str) -> None:
    inputs = [f"/fuzz/kept/{path.name}" for path in kept(target)]
    sandbox = sandboxed(targets, shown={"kept": CORPUS / target}, written={})
    ran = subprocess.run(
        (*sandbox, f"/fuzz/bin/{target}", *inputs), capture_output=True, check=False, text=True
    )
    assert (ran.returncode, ran.stderr.splitlines()) == (0, inputs), ran.stderr


def test_every_fuzz_target_has_small_inputs() -> None:
    for target in TARGETS:
        sizes = [path.stat().st_size for path in kept(target)]
        assert sizes
        assert max(sizes) <= 4096, target
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 1 << 20


def test_fuzz_target_of_the_agent_refuses_to_run_outside_a_sandbox(
    targets: Path, tmp_path: Path
) -> None:
    (tmp_path / "input").write_bytes(b"")
    words = (targets / "session", tmp_path / "input")
    ran = subprocess.run(words, capture_output=True, check=False, env=ENV)
    assert ran.returncode != 0
    assert b"only in a sandbox of its own" in ran.stderr
