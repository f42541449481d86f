"""The reference's own words, read from a file of its format: an operator may supply them."""

import posixpath
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from policies.prompts import TOOL_NAMES
from policies.reference_style import NO_CALL, PaperWords
from policies.workspace import ANSWER_FILES, OUTPUT_DIR
from proxy.config import ConfigError

_OUTPUT_DIRS = tuple(posixpath.dirname(path) for path in ANSWER_FILES)


class _File(BaseModel):
    """What is read of it; what else its benchmarks say there is nothing to us."""

    model_config = ConfigDict(frozen=True)

    system_prompt: str
    instance_prompt: str
    output_dir: str = OUTPUT_DIR
    continue_message: str = NO_CALL
    """Not in the reference's files: it is in its code, as the tools are."""
    tools: tuple[dict[str, Any], ...] = ()

    @field_validator("output_dir")
    @classmethod
    def _is_looked_into(cls, path: str) -> str:
        if path not in _OUTPUT_DIRS:
            raise ValueError(f"answers are looked for in {' and '.join(_OUTPUT_DIRS)} only")
        return path

    @field_validator("tools")
    @classmethod
    def _are_all(cls, tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        functions = [tool.get("function") for tool in tools]
        names = [each.get("name") for each in functions if isinstance(each, dict)]
        if tools and names != list(TOOL_NAMES):
            raise ValueError(f"they must be {', '.join(TOOL_NAMES)}, in this order")
        return tools


def read_words(path: Path) -> PaperWords:
    """Raises ConfigError."""
    try:
        file = _File.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        words = PaperWords(
            system=file.system_prompt,
            instance=file.instance_prompt,
            no_call=file.continue_message,
            output_dir=file.output_dir,
            tools=file.tools,
        )
        words.system_prompt()
        words.problem("")
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (LookupError, AttributeError) as error:
        raise ConfigError(
            f"{path}: a prompt has a placeholder {error} that nobody fills; braces that stand for"
            " themselves are written twice"
        ) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    return words
