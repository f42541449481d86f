"""The profile of the paper as it is shipped, for tests of its manner."""

from typing import Any

from policies.manner import Manner
from policies.paper_words import PaperWords
from policies.profile import Profile
from proxy.profiles import overlaid, shipped


def paper(words: PaperWords = PaperWords()) -> Profile:
    """With these words."""
    return overlaid(Profile(manner=Manner(words=words)), {**shipped()["paper"], "name": "paper"})


def undescribed(schema: Any) -> Any:
    """A schema without its words, in the same order."""
    if isinstance(schema, dict):
        return {key: undescribed(value) for key, value in schema.items() if key != "description"}
    return schema
