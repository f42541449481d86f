"""The shipped profile of the paper, for tests of its agent style."""

from collections.abc import Mapping
from typing import Any

from policies.paper_prompts import ReferencePrompts
from policies.profile import AgentSettings, Profile
from proxy.profiles import shipped_profiles, with_settings


def paper(words: ReferencePrompts = ReferencePrompts()) -> Profile:
    """Return the profile with these prompts."""
    return with_settings(
        Profile(agent=AgentSettings(prompts=words)),
        {**shipped_profiles()["paper"], "name": "paper"},
    )


def undescribed(schema: Any) -> Any:
    """Return a schema without descriptions, in the same order."""
    if isinstance(schema, dict):
        return {key: undescribed(value) for key, value in schema.items() if key != "description"}
    return schema


def unstreamed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request without its streaming fields: the reference does not stream."""
    return {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
