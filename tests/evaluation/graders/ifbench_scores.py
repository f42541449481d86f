"""Check one text against all problems of IFBench with the benchmark's own functions.

Reads the text from stdin. Writes a JSON object to stdout: for each key of a problem whether the
text follows all instructions, strictly and loosely, or null if a checker lacks data of NLTK.
"""

import json
import random
import sys
from pathlib import Path

import ifbench.evaluation_lib as ifbench

DATA = Path(ifbench.__file__).parent / "data" / "IFBench_test.jsonl"


def main() -> None:
    text = sys.stdin.read()
    problems = ifbench.read_prompt_list(DATA)
    sys.stdout.write("\n" + json.dumps({str(each.key): check(each, text) for each in problems}))


def check(problem: ifbench.InputExample, text: str) -> tuple[bool, bool] | None:
    random.seed(0)  # for the checkers that choose parameters
    responses = {problem.prompt: text}
    try:
        strict = ifbench.test_instruction_following_strict(problem, responses)
        loose = ifbench.test_instruction_following_loose(problem, responses)
    except LookupError:
        return None
    return strict.follow_all_instructions, loose.follow_all_instructions


if __name__ == "__main__":
    main()
