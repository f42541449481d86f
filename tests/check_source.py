"""Checks the source for what ruff has no rule for.

Each `noqa` and `type: ignore` has a reason beside it, docstrings do not open with a riddle ("What
is left of it."), test names name their subject, and identifiers use the vocabulary of the field.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOPS = ("policies", "sandbox_runtime", "proxy", "tests", "bench", "evaluation", "training")
BARE_IGNORE = re.compile(r"#\s*(?:type:\s*ignore|noqa)[^#]*$")
REASON = re.compile(r"#\s*(?:type:\s*ignore\[[\w-]+\]|noqa:\s*[\w, ]+?)\s+(?:-|#)\s+\S")
RIDDLE = re.compile(r"(?:What|How|Of|Who|Whose|The same|Those|Where|Such)\b")
UNNAMED_TEST = re.compile(r"test_(?:it|they|these|those|one|what|who|nobody|somebody)_")
BANNED_WORDS = frozenset(
    (
        *("seat", "seats", "witness", "witnesses", "outbox", "way_of", "told_again", "heard_out"),
        *("way_out", "let_out", "handed_back", "handed_over", "think_aloud", "ask_again"),
        *("said_before", "stand_in", "last_words", "hindrance", "ways", "told", "nobody"),
    )
)
"""Identifiers that have a standard term instead, such as lease, observer or retry."""


def main() -> int:
    faults = [fault for path in sources() for fault in faults_of(path)]
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else 0


def sources() -> Iterator[Path]:
    for top in TOPS:
        yield from sorted((ROOT / top).rglob("*.py"))


def faults_of(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT)
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if BARE_IGNORE.search(line) and not REASON.search(line):
            yield f"{name}:{number}: an ignore without a reason beside it"
    for node in ast.walk(ast.parse(text)):
        for number, fault in node_faults(node):
            yield f"{name}:{number}: {fault}"


def node_faults(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line number and the message of each fault of a node itself."""
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))) if opening := RIDDLE.match(text):
            yield node.lineno, f"a docstring that begins with {opening[0]!r}"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            if UNNAMED_TEST.match(name):
                yield node.lineno, f"{name} does not name its subject"
            if name.strip("_") in BANNED_WORDS:
                yield node.lineno, f"the name {name} (see BANNED_WORDS)"
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            if name.strip("_") in BANNED_WORDS:
                yield node.lineno, f"the name {name} (see BANNED_WORDS)"


if __name__ == "__main__":
    sys.exit(main())
