"""Helpers for translating other APIs' requests into chat completions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proxy.errors import ProxyError


@dataclass(slots=True)
class ChatMessages:
    """The messages of a chat completion, while a translation appends them."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    param_paths: dict[str, str] = field(default_factory=dict)
    """Paths in `messages`, and the paths of the same values in the client's request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTranslation:
    """A request of another API as a chat completion."""

    keeps_param_suffix: ClassVar[bool] = True
    """True if a path below one of `param_paths` is the same in the client's request."""

    chat: Mapping[str, Any]
    param_paths: Mapping[str, str]
    """Paths in `chat`, and the paths of the same values in the client's request."""
    starts_with_tool: bool = False
    """True if the run must begin with a tool call, also of a tool of the sandbox."""

    def restore_param(self, error: ProxyError) -> ProxyError:
        """Replace the path in `chat` that an error names by the path in the client's request."""
        param = error.param or ""
        for chat_path, path in self.param_paths.items():
            if param == chat_path or param.startswith((f"{chat_path}.", f"{chat_path}[")):
                if self.keeps_param_suffix:
                    error.message = error.message.replace(f"'{chat_path}", f"'{path}")
                    error.param = path + param.removeprefix(chat_path)
                else:
                    error.message = error.message.replace(param, path)
                    error.param = path
                return error
        return error
