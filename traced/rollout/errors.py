"""What can go wrong around an episode. Agent mistakes are not here: they are data that the environment answers.

TracedError
└── RolloutError
    ├── SimulatorError    the user simulator broke; an environment raises it, the episode ends as infrastructure
    └── TemplateError     the chat template does not allow token-exact conversations
"""

from traced.errors import TracedError


class RolloutError(TracedError):
    """A rollout failed."""


class SimulatorError(RolloutError):
    """The user simulator of an environment failed."""


class TemplateError(RolloutError):
    """The tokenizer's chat template cannot be continued token by token."""
