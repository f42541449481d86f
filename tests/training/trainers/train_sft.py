"""Train a tiny model with TRL's SFTTrainer on an export in the format `sft`, and print what it did.

python train_sft.py EXPORT, with the environment of TRL: the output is a JSON object with the loss
of each step, the prompt of each row, the texts that are trained on, and a change of the weights.
"""

import json
import sys
import tempfile
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from training.tiny_policy import make_model, make_tokenizer

STEPS = 3
NOT_TRAINED = -100
"""The label of tokens that are not trained on."""


def texts_of(row: dict[str, Any], tokenizer: Any, *, trained: bool) -> list[str]:
    """Return the text of each stretch of tokens that are trained on, or of the others."""
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    stretches = groupby(pairs, lambda pair: pair[1] != NOT_TRAINED)
    return [
        tokenizer.decode([token for token, _ in stretch])
        for is_trained, stretch in stretches
        if is_trained == trained
    ]


def main() -> None:
    file = sys.argv[1]
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    tokenizer = make_tokenizer([json.loads(line)["messages"] for line in lines])
    # The template of the paper's model, whose training variant TRL knows.
    template = files("trl") / "chat_templates" / "qwen3_instruct_2507.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    model = make_model(tokenizer, seed=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with tempfile.TemporaryDirectory() as directory:
        data = load_dataset("json", data_files=file, split="train", cache_dir=directory)
        config = SFTConfig(
            output_dir=directory,
            max_steps=STEPS,
            per_device_train_batch_size=len(lines),
            max_length=None,
            assistant_only_loss=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
        )
        trainer = SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer)
        trainer.train()
    rows = list(trainer.train_dataset)
    found = {
        "loss": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "prompts": [texts_of(row, tokenizer, trained=False)[0] for row in rows],
        "trained": [texts_of(row, tokenizer, trained=True) for row in rows],
        "has_changed": any(
            not torch.equal(one, other)
            for one, other in zip(before, model.parameters(), strict=True)
        ),
    }
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
