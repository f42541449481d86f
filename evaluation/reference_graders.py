"""The graders of the paper's own implementation, from the installed package llm-in-sandbox.

They are looser than the strict graders: they search any text for the answer. The file of each
grader is loaded by itself, so that the package's dependencies are not needed. The reference's judge
is in evaluation/judge.py.
"""

import importlib.util
import json
import os
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from evaluation.graders import Grade
from evaluation.ifbench_grader import check_instructions, load_ifbench
from evaluation.isolation import UngradableError
from evaluation.samples import Sample

REFERENCE_PACKAGE, REFERENCE_MODULE = "llm-in-sandbox", "llm_in_sandbox"
INSTALL_COMMAND = "pip install --no-deps llm-in-sandbox==0.2.0"
_GRADER_FOLDERS: Mapping[str, str] = {
    "math": "math",
    "choice": "chem",
    "ifbench": "instruct_follow",
    "judge": "physics",
}
"""The package's folder with the reference grader, by the grader of the sample."""
_DOMAIN_FOLDERS: Mapping[str, str] = {"biomedicine": "biomed", "long-context": "long_context"}
"""The package's folder with the reference grader, by the domain of the sample. Takes precedence
over _GRADER_FOLDERS."""


def has_reference_grader(sample: Sample) -> bool:
    """Return True if the package has a grader for the sample."""
    return sample.grader in _GRADER_FOLDERS


def reference_version() -> str | None:
    """Return the version of the installed package, or None if it is not installed."""
    return version(REFERENCE_PACKAGE) if importlib.util.find_spec(REFERENCE_MODULE) else None


def grade_reference(sample: Sample, answer: str) -> Grade:
    """Return the package's score of an answer, in this process. The package has no format failures.

    Raises UngradableError if a package or a data file is missing. In both cases the
    package's own function would score the answer as wrong.
    """
    if sample.grader != "ifbench":
        return _compute_grade(sample, answer, sample.ground_truth)
    entry = sample.entry or {}
    check_instructions(entry, answer)
    # The package imports IFBench's modules by their names in the benchmark's repository.
    os.environ["IFBENCH_PATH"] = str(Path(load_ifbench().__file__ or "").parent)
    return _compute_grade(
        sample,
        answer,
        json.dumps({name: entry[name] for name in ("instruction_id_list", "kwargs")}),
    )


def load_reference_module(sample: Sample, name: str) -> ModuleType:
    """Return the package's module `name` for a sample: `reward` or `judge`. Raises UngradableError
    if the package or the module is not installed."""
    return _load_module(_DOMAIN_FOLDERS.get(sample.domain, _GRADER_FOLDERS[sample.grader]), name)


@cache
def _load_module(folder: str, name: str) -> ModuleType:
    package = importlib.util.find_spec(REFERENCE_MODULE)
    if package is None or not package.submodule_search_locations:
        raise UngradableError(
            f"the package {REFERENCE_PACKAGE} is not installed: {INSTALL_COMMAND}"
        )
    path = Path(package.submodule_search_locations[0], "benchmark", folder, f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"reference_{folder}_{name}", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise UngradableError(
            f"the package {REFERENCE_PACKAGE} has no file {path}: {INSTALL_COMMAND}"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compute_grade(sample: Sample, answer: str, ground_truth: str) -> Grade:
    return Grade(
        Fraction(load_reference_module(sample, "reward").compute_score(answer, ground_truth))
    )
