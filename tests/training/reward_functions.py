"""Functions that the tests name as rewards of their own."""

import os
import time
from collections.abc import Mapping
from typing import Any


def same_length(row: Mapping[str, Any], answer: str) -> float:
    """Return 1 if the answer has as many characters as the right one, else a half."""
    return 1 if len(answer) == len(row["ground_truth"]) else 0.5


def too_large(row: Mapping[str, Any], answer: str) -> float:
    return 1.5


def not_a_number(row: Mapping[str, Any], answer: str) -> float:
    return float("nan")


def a_text(row: Mapping[str, Any], answer: str) -> str:
    return "1"


def failing(row: Mapping[str, Any], answer: str) -> float:
    raise KeyError(answer)


def killed(row: Mapping[str, Any], answer: str) -> float:
    os.abort()


def endless(row: Mapping[str, Any], answer: str) -> float:
    while True:
        time.sleep(60)


CONSTANT = 1
