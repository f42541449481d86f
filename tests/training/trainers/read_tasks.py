"""Read converted tasks with the data sets of verl and Agent Lightning, and print the rows.

python read_tasks.py FOLDER FILE, with the environment of TRL: the folder has the packages verl and
agentlightning without their dependencies. Their `__init__` modules import ray and OpenTelemetry, so
the packages that contain the data sets are made here. The output is a JSON object with the rows of
each data set, and a batch of verl's.
"""

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
from torch.utils.data import DataLoader

from training.tiny_policy import make_tokenizer

PACKAGES = ("verl", "verl.utils", "verl.utils.dataset", "agentlightning", "agentlightning.verl")
MAX_PROMPT_TOKENS = 4096


def make_packages(folder: Path) -> None:
    """Make the packages importable from the folder without their `__init__` modules."""
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    types: Any = ModuleType("agentlightning.types")
    types.Dataset = object  # only an annotation there
    sys.modules["agentlightning.types"] = types
    sys.path.append(str(folder))


def main() -> None:
    folder, file = Path(sys.argv[1]), sys.argv[2]
    make_packages(folder)
    with tempfile.TemporaryDirectory() as directory:
        datasets.config.HF_DATASETS_CACHE = directory
        verl = import_module("verl.utils.dataset.rl_dataset")
        agentlightning = import_module("agentlightning.verl.dataset")
        prompts = [
            json.loads(line)["prompt"] for line in Path(file).read_text("utf-8").splitlines()
        ]
        tokenizer = make_tokenizer(prompts)
        config = import_module("omegaconf").OmegaConf.create(
            {"max_prompt_length": MAX_PROMPT_TOKENS, "cache_dir": directory}
        )
        rows = verl.RLHFDataset(file, tokenizer, config)
        loader = DataLoader(rows, batch_size=len(rows), collate_fn=verl.collate_fn)
        (batch,) = loader
        found = {
            "verl": [without_tensors(rows[number]) for number in range(len(rows))],
            "verl batch": {name: list(values) for name, values in without_tensors(batch).items()},
        }
        rows = agentlightning.AgentDataset(file, tokenizer, config)
        found["agentlightning"] = [without_tensors(rows[number]) for number in range(len(rows))]
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def without_tensors(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that are not tensors, which only fill a batch."""
    return {
        name: value
        for name, value in row.items()
        if not hasattr(value, "dtype") or value.dtype == object
    }


if __name__ == "__main__":
    main()
