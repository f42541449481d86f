"""The suite `reasoning-gym`: problems of the package reasoning-gym, generated from a seed."""

import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import ModuleType
from typing import Any

from evaluation.samples import Draft

LICENCE = "Apache-2.0"
ANSWER_LINE = (
    "End with one line of the form `Answer: X`, where X is the answer alone, in the form that the"
    " problem asks for."
)


def load_reasoning_gym() -> ModuleType:
    """Import the package reasoning-gym and return it. The import takes seconds.

    Raises ModuleNotFoundError if the extra `evaluation` is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from one of its dependencies
        import reasoning_gym
    module: ModuleType = reasoning_gym
    return module


def suite_origin() -> str:
    """Return the package's name and version."""
    return f"reasoning-gym {version('reasoning-gym')} (PyPI)"


def generate(seed: int, count: int) -> list[Draft]:
    """Return `count` problems, from each family in rotation."""
    package = load_reasoning_gym()
    names = list(FAMILIES)
    size = -(-count // len(names))
    data = {name: package.create_dataset(name, seed=seed, size=size) for name in names}
    return [
        _draft(number, names[number % len(names)], data[names[number % len(names)]], len(names))
        for number in range(count)
    ]


def _draft(number: int, family: str, dataset: Any, family_count: int) -> Draft:
    entry = dataset[number // family_count]
    solve = FAMILIES[family]
    return Draft(
        {
            "id": f"reasoning-gym/{number:04}",
            "domain": "reasoning-gym",
            "kind": family,
            "problem": f"{entry['question'].strip()}\n\n{ANSWER_LINE}",
            "ground_truth": entry["answer"],
            "grader": "reasoning-gym",
            "entry": entry,
            "solution": solve(entry["metadata"]) if solve else None,
        }
    )


def _print_command(expression: str) -> str:
    """Return a shell command that prints the value of a Python expression."""
    return f"python3 - <<'END'\nimport math\nprint({expression})\nEND"


def _count_primes_command(metadata: Mapping[str, Any]) -> str:
    numbers = f"range({max(2, metadata['start'])}, {metadata['end']} + 1)"
    return _print_command(
        f"sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in {numbers})"
    )


def _base_conversion_command(metadata: Mapping[str, Any]) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    base = metadata["target_base"]
    return (
        f"python3 - <<'END'\nn = int({metadata['source_repr']!r}, {metadata['source_base']})\n"
        f"text = ''\nwhile n or not text:\n    text = {digits!r}[n % {base}] + text\n"
        f"    n //= {base}\nprint(text)\nEND"
    )


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], str] | None] = {
    "chain_sum": lambda metadata: _print_command(metadata["expression"]),
    "gcd": lambda metadata: _print_command(f"math.gcd(*{metadata['numbers']!r})"),
    "count_primes": _count_primes_command,
    "spell_backward": lambda metadata: f"echo {metadata['word']} | rev",
    "letter_counting": lambda metadata: _print_command(
        f"{' '.join(metadata['span'])!r}.lower().count({metadata['target_letter']!r})"
    ),
    "base_conversion": _base_conversion_command,
    "prime_factorization": None,
    "calendar_arithmetic": None,
}
"""The families of problems by name. Each has a function that returns a problem's solution, which is
a shell command, from the problem's metadata. The function is None if the problems have no solution.
All answers have one line."""
