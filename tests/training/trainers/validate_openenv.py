"""Validate OpenEnv traces, one JSON object in each line of stdin, with OpenEnv's own models.

python validate_openenv.py FOLDER: the folder has the package openenv without its dependencies. Its
`__init__` modules import those, so the packages on the way to the models are made here.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

WAY = ("openenv", "openenv.core", "openenv.core.harness", "openenv.core.harness.capture")

for name in WAY:
    package = ModuleType(name)
    package.__path__ = [str(Path(sys.argv[1], *name.split(".")))]
    sys.modules[name] = package

training = import_module("openenv.core.harness.training")
for line in sys.stdin:
    trace = training.TrainingTrace.model_validate(json.loads(line))
    sys.stdout.write(f"{len(trace.turns)}\n")
