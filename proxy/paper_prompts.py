"""The prompts of the paper's profiles: the project's own, an operator's file, or the wording of the
installed reference package.

`read_prompts` returns the prompts of every domain. `read_prompt_file` reads one file in the format
of the reference, and `read_reference_prompts` reads the files of the package.
"""

import ast
import posixpath
import runpy
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from policies.paper_prompts import DOMAIN_PROMPTS, NO_CALL, Domain, ReferencePrompts
from policies.prompts import TOOL_NAMES
from policies.workspace import ANSWER_FILES, OUTPUT_DIR
from proxy.config import ConfigError, PaperConfig

REFERENCE = "llm-in-sandbox"
"""The reference implementation's name on PyPI."""
REFERENCE_FILES: Mapping[Domain, str] = {
    "general": "config/general.yaml",
    "math": "benchmark/math/config.yaml",
    "physics": "benchmark/physics/config.yaml",
    "chemistry": "benchmark/chem/config.yaml",
    "biomedicine": "benchmark/biomed/config.yaml",
    "long-context": "benchmark/long_context/config.yaml",
    "instructions": "benchmark/instruct_follow/config.yaml",
}
"""The prompt file of each domain in the reference package."""


def read_prompts(config: PaperConfig) -> Mapping[Domain, ReferencePrompts]:
    """Return the prompts of every domain, as the configuration selects them. Raises ConfigError."""
    prompts = dict(DOMAIN_PROMPTS)
    if config.prompts == "reference":
        prompts |= read_reference_prompts()
    if config.prompt_file:
        prompts["general"] = read_prompt_file(config.prompt_file)
    return prompts


_OUTPUT_DIRS = tuple(posixpath.dirname(path) for path in ANSWER_FILES)


class _PromptFile(BaseModel):
    """The fields of a prompt file that are read. Other fields, such as those of the reference's
    benchmarks, are ignored."""

    model_config = ConfigDict(frozen=True)

    system_prompt: str
    instance_prompt: str
    output_dir: str = OUTPUT_DIR
    continue_message: str = NO_CALL
    """The message after a turn without a tool call. In the reference, this message and the tools
    are in the code and not in the prompt files."""
    tools: tuple[dict[str, Any], ...] = ()

    @field_validator("output_dir")
    @classmethod
    def _check_output_dir(cls, path: str) -> str:
        if path not in _OUTPUT_DIRS:
            raise ValueError(f"answers are only read from {' and '.join(_OUTPUT_DIRS)}")
        return path

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        functions = [tool.get("function") for tool in tools]
        names = [each.get("name") for each in functions if isinstance(each, dict)]
        if tools and names != list(TOOL_NAMES):
            raise ValueError(f"the tools must be {', '.join(TOOL_NAMES)}, in this order")
        return tools


def read_prompt_file(path: Path) -> ReferencePrompts:
    """Read the prompts of the reference style from a file in the reference's own format. Raises
    ConfigError."""
    return _parse_prompt_file(path, {})


def read_reference_prompts() -> Mapping[Domain, ReferencePrompts]:
    """Read the prompts of each domain from the installed reference package, with the message after
    a turn without a tool call and the descriptions of the tools. Raises ConfigError.

    The package itself is not imported: it loads litellm, which takes seconds.
    """
    spec = find_spec(REFERENCE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"paper.prompts: 'reference' needs the package {REFERENCE}, which is not installed"
            f" (pip install --no-deps {REFERENCE})"
        )
    package = Path(spec.submodule_search_locations[0])
    try:
        code_fields = {
            "continue_message": _continue_message(package),
            "tools": _tool_descriptions(package),
        }
    except Exception as error:  # the package's module is executed, so any error may occur
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"paper.prompts: {package} is not the {REFERENCE} that is known here (0.2.0): {problem}"
        ) from error
    return {
        domain: _parse_prompt_file(package / name, code_fields)
        for domain, name in REFERENCE_FILES.items()
    }


def _continue_message(package: Path) -> str:
    """Return CONTINUE_MSG of observation.py, which is parsed and not imported, because the module
    loads its whole package."""
    for node in ast.parse((package / "observation.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTINUE_MSG":
            return str(ast.literal_eval(node.value))
    raise LookupError("observation.py has no CONTINUE_MSG")


def _tool_descriptions(package: Path) -> list[Any]:
    """Return the descriptions of the tools. Their module, tools.py, imports nothing, so it can be
    executed without the package."""
    names = runpy.run_path(str(package / "tools.py"))
    return [names[f"{name}_tool"] for name in TOOL_NAMES]


def _parse_prompt_file(path: Path, code_fields: Mapping[str, Any]) -> ReferencePrompts:
    """Read a prompt file. `code_fields` are used in addition to the fields of the file. Raises
    ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: it is not a YAML object")
        file = _PromptFile.model_validate({**content, **code_fields})
        prompts = ReferencePrompts(
            system=file.system_prompt,
            instance=file.instance_prompt,
            no_call=file.continue_message,
            output_dir=file.output_dir,
            tools=file.tools,
        )
        prompts.system_prompt()
        prompts.problem_message("")
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (LookupError, AttributeError) as error:
        raise ConfigError(
            f"{path}: a prompt has an unknown placeholder {error}; write literal braces twice"
        ) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    return prompts
