"""The profile of the paper as it is shipped, for tests of its manner."""

from collections.abc import Mapping
from typing import Any

from policies.profile import AgentSettings, Profile
from policies.reference_style import ReferencePrompts
from proxy.profiles import overlaid, shipped


def paper(words: ReferencePrompts = ReferencePrompts()) -> Profile:
    """With these words."""
    return overlaid(
        Profile(agent=AgentSettings(prompts=words)), {**shipped()["paper"], "name": "paper"}
    )


def undescribed(schema: Any) -> Any:
    """A schema without its words, in the same order."""
    if isinstance(schema, dict):
        return {key: undescribed(value) for key, value in schema.items() if key != "description"}
    return schema


def unstreamed(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request without what says that it is streamed: the reference has each turn in one piece."""
    return {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
