"""What the HTTP surfaces are given to work with."""

from dataclasses import dataclass, field
from functools import partial

from policies.passthrough import PassthroughSetting
from policies.profile import Profile
from policies.sessions import FileLimits
from policies.steps import NarrationSetting, StepsSetting
from proxy.agent.model import Model
from proxy.body_memory import BodyMemory
from proxy.files import FileStore
from proxy.inputs import Inputs
from proxy.keys import ClientKeys, Keyring
from proxy.models.prices import Prices
from proxy.models.tool_support import ToolVerdicts
from proxy.profiles import Profiles
from proxy.runs.runs import Runs
from proxy.store.store import Store
from proxy.wire.terms import OnDisconnect
from proxy.workspaces import Workspaces


@dataclass(frozen=True, slots=True)
class Services:
    """The parts, joined by __main__ or a test."""

    model: Model
    runs: Runs
    workspaces: Workspaces
    files: FileStore
    file_limits: FileLimits
    """What clients may put in."""
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    """What the bodies of all requests may take."""
    inputs: Inputs = field(default_factory=Inputs)
    profiles: Profiles = field(default_factory=partial(Profiles.only, Profile()))
    """What runs are allowed and told."""
    prices: Prices = field(default_factory=Prices)
    tool_verdicts: ToolVerdicts = field(default_factory=ToolVerdicts)
    """Which models are given tools."""
    keyring: Keyring = field(default_factory=Keyring)
    """What clients must send as bearer token."""
    client_keys: ClientKeys | None = None
    """Where clients come with their own keys of the backend, what knows which it accepts."""
    passthrough: PassthroughSetting = "stateless"
    """Which of the backend's other paths are passed on."""
    public_url: str | None = None
    """How clients reach this server, for links; None takes it from each request."""
    steps: StepsSetting = "auto"
    """How steps are shown to clients that do not say."""
    status_wait_s: float = 1.0
    """How long a streamed response waits with its status for the backend's; then it is 200."""
    status_hold_s: float = 10.0
    """The same where attempts to reach the backend fail meanwhile."""
    keep_alive_s: float = 10.0
    """Silence after which a stream says that it is alive; gateways hang up after 50 to 120 s."""
    nonstream_keep_alive_s: float | None = None
    """The same for an answer in one piece, which then begins with blanks; None says nothing."""
    narration: NarrationSetting = "content"
    """How prose before a tool call is streamed."""
    on_disconnect: OnDisconnect = "cancel"
    """What becomes of a run when its client leaves, unless the request says."""

    @property
    def store(self) -> Store:
        """Where all that outlives a request is kept."""
        return self.files.store
