"""The whole evaluation with a real model: prepare, run and report."""

from pathlib import Path

import pytest

from evaluation.results import MODES, read_results
from tests.engines.engine import MODEL
from tests.engines.evaluate import evaluate
from tests.evaluation.evaluation_process import rows
from tests.evaluation.grader_packages import grader_packages

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")
pytest.importorskip("reasoning_gym", reason="the extra `evaluation` is not installed")
pytestmark = pytest.mark.engine


async def test_report_on_a_real_model_is_complete(tmp_path: Path) -> None:
    await evaluate(tmp_path, ["reasoning-gym"], limit=2)
    results = read_results(tmp_path)
    assert [result.mode for result in results] == [mode for mode in MODES for _ in range(2)]
    for result in results:
        assert result.status == "answered", result.failures
        assert result.completion_tokens > 0
        assert (result.sandbox is not None) is (result.mode == "sandbox")
    report = (tmp_path / "report.md").read_text("utf-8")
    (domain, plain, sandbox, difference, pairs, _), _ = rows(report, f"## {MODEL}")
    assert (domain, pairs) == ("reasoning-gym", "2")
    assert "-" not in {plain, sandbox, difference}
    apart = rows(report, "### Results without an ordinary grade")
    assert [row[1:4] for row in apart[:2]] == [["plain", "2", "2"], ["sandbox", "2", "2"]]
    speed = rows(report, "## Speed")
    domains = ("reasoning-gym", "all domains")
    wanted = [[MODEL, domain, mode, "2"] for domain in domains for mode in MODES]
    assert [row[:4] for row in speed] == wanted


async def test_real_data_sets_run_with_a_real_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(grader_packages()))
    await evaluate(tmp_path, ["aa-lcr", "ifbench"], limit=1)
    results = read_results(tmp_path)
    found = sorted((each.mode, each.sample.partition("/")[0], each.status) for each in results)
    assert found == [
        ("plain", "aa-lcr", "context_overflow"),
        ("plain", "ifbench", "answered"),
        ("sandbox", "aa-lcr", "answered"),
        ("sandbox", "ifbench", "answered"),
    ]
