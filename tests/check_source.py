"""Checks the source for what ruff has no rule for: each `noqa` and `type: ignore` has a reason."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
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
    name = path.relative_to(ROOT)
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if BARE_IGNORE.search(line) and not REASON.search(line):
            yield f"{name}:{number}: an ignore without a reason beside it"


if __name__ == "__main__":
    sys.exit(main())
