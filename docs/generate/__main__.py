"""Write the reference pages, or compare them with `--check`."""

import argparse
import sys

import docs.generate
from docs.generate import HERE, generate


def main() -> int:
    parser = argparse.ArgumentParser(description=docs.generate.__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    is_check = parser.parse_args().check
    pages = generate()
    if is_check:
        differing = [
            path
            for path, text in pages.items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        for path in differing:
            sys.stderr.write(f"{path}: differs from the code: run `make reference`\n")
        return bool(differing)
    HERE.mkdir(exist_ok=True)
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
