"""The house's size limits: no file over 400 lines, no function over 40, no bare type: ignore."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40
BARE_IGNORE = re.compile(r"#\s*(?:type:\s*ignore|noqa)[^#]*$")
REASON = re.compile(r"#\s*(?:type:\s*ignore\[[\w-]+\]|noqa:\s*[\w, ]+?)\s+(?:-|#)\s+\S")


def main() -> int:
    faults = [fault for path in sources() for fault in faults_of(path)]
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else 0


def sources() -> Iterator[Path]:
    for top in ("policies", "sandbox_runtime", "proxy", "tests", "bench"):
        yield from sorted((ROOT / top).rglob("*.py"))


def faults_of(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    lines = text.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield f"{name}: {len(lines)} lines, {MAX_FILE_LINES} allowed"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines"
    for number, line in enumerate(lines, 1):
        if BARE_IGNORE.search(line) and not REASON.search(line):
            yield f"{name}:{number}: an ignore without a reason beside it"


if __name__ == "__main__":
    sys.exit(main())
