"""Score the answers of an evaluation with the reference's own code: its loader of reward functions,
and its judge.

Reads a job as JSON from stdin: the home of the evaluation and the URL of the judge. Writes the
scores to stdout, as a JSON list in the order of the results.
"""

import json
import sys
from pathlib import Path

from llm_in_sandbox.benchmark.physics.judge import judge_single
from llm_in_sandbox.benchmark.runner import load_reward_function

TASKS = {"math": "math", "chemistry": "chem", "instructions": "instruct_follow"}
"""The reference's tasks, by domain. Samples of other domains name the task as their domain."""


def main() -> None:
    job = json.load(sys.stdin)
    home = Path(job["data"])
    samples = {each["id"]: each for each in lines(home / "data" / "synthetic" / "samples.jsonl")}
    config = {"model": "openai/judge", "base_url": job["judge_url"], "api_key": "none"}
    scores = []
    for result in lines(home / "output" / "results.jsonl"):
        sample, answer = samples[result["sample"]], result["answer"]
        if sample["domain"] == "physics":
            vote = {
                "problem_id": sample["id"],
                "question": sample["entry"]["question"],
                "ground_truth": sample["ground_truth"],
                "model_answer": answer,
                "judge_config": config,
            }
            scores.append(judge_single(vote)["score"])
            continue
        task = TASKS.get(sample["domain"], sample["domain"])
        truth = sample["ground_truth"] or json.dumps(sample["entry"])
        scores.append(load_reward_function(task)(answer, truth))
    sys.stdout.write("\n" + json.dumps(scores))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
