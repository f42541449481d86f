"""Our own way with a model, and what any way decides in the loop."""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from policies.profile import Profile
from policies.prompts import NUDGE, Equipment, system_prompt
from proxy.agent.history import History
from proxy.agent.model import Message
from proxy.agent.paper_manner import PaperManner
from proxy.agent.task import Task
from proxy.agent.tool_calls import Turn, understand


class Manner(Protocol):
    """How a run goes about its turns."""

    @property
    def no_call(self) -> str:
        """What is said to a turn that calls nothing and is no answer."""

    @property
    def prose_ends(self) -> bool:
        """Whether a turn that calls nothing can be the answer."""

    def posed(self, task: Task) -> Task:
        """The task as the model is to be told of it."""

    def words(self, profile: Profile, equipment: Equipment, names: Sequence[str]) -> str:
        """What comes before the client's own words, `names` being those of our tools."""

    def before_turn(self, history: History, turns_left: int) -> None:
        """Say what is to be said before each turn."""

    def understand(self, message: Message, names: Collection[str], new_id: Iterator[str]) -> Turn:
        """What to echo of a reply and which of its calls to run, `names` being all tools there
        are."""


class OwnManner:
    """Ours: every call of a turn is run, and prose may be the answer."""

    no_call = NUDGE
    prose_ends = True

    def posed(self, task: Task) -> Task:
        return task

    def words(self, profile: Profile, equipment: Equipment, names: Sequence[str]) -> str:
        return system_prompt(profile, equipment, names)

    def before_turn(self, history: History, turns_left: int) -> None:
        """Nothing."""

    def understand(self, message: Message, names: Collection[str], new_id: Iterator[str]) -> Turn:
        return understand(message, names, new_id)


def manner_of(profile: Profile) -> Manner:
    """The one that the profile asks for."""
    paper = profile.manner.kind == "paper"
    return PaperManner(profile.manner.words) if paper else OwnManner()
