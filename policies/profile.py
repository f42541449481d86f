"""What a run is allowed and told: every policy that holds for it, as one value."""

from dataclasses import dataclass
from typing import Literal

from policies.artifacts import ArtifactLimits
from policies.audit import Audit
from policies.budgets import DailyBudget
from policies.isolation import Isolation
from policies.limits import Limits
from policies.manner import Manner
from policies.observation import ObservationLimits
from policies.redaction import Redaction
from policies.watch import Watch
from policies.workspace import InputLimits

Computer = Literal["always", "auto", "never"]
PromptStyle = Literal["strict", "neutral", "none"]


@dataclass(frozen=True, slots=True)
class Profile:
    """A named bundle of policies."""

    name: str = "default"
    about: str = ""
    """What it is for, in a paragraph."""
    computer: Computer = "auto"
    """Who gets one. always: every request, from its start; auto: whoever may use it, from the first
    tool call; never: nobody."""
    weak_models: tuple[str, ...] = ()
    """auto: models, by name or pattern (`*`), that answer better without (in the paper Qwen3-4B
    loses 13 points in mathematics)."""
    prompt: PromptStyle = "neutral"
    """What the model is told to do with its computer. strict: derive every answer by computing;
    neutral: use it where it helps; none: nothing, the tools' own descriptions must do."""
    limits: Limits = Limits()
    isolation: Isolation = Isolation()
    inputs: InputLimits = InputLimits()
    observation: ObservationLimits = ObservationLimits()
    artifacts: ArtifactLimits = ArtifactLimits()
    manner: Manner = Manner()
    per_day: DailyBudget = DailyBudget()
    """Of all runs of one key together."""
    watch: Watch = Watch()
    audit: Audit = Audit()
    redact: Redaction = Redaction()
