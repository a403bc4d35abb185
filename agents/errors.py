"""What can go wrong in analysis and synthesis, attributed once.

    AgentsError
    ├── TranscriptError    a recorded message list is not a conversation
    ├── LabelTableError    a labelling table is incomplete, doubled, or speaks of unknown trajectories
    └── SynthesisError     no environment can be written for a capability from the given trajectories

A malformed tool call made by the agent is none of these: it is data, and a detector's business.
"""


class AgentsError(Exception):
    """Analysis or synthesis could not be carried out."""


class TranscriptError(AgentsError):
    """A trajectory's messages cannot be read as a conversation."""


class LabelTableError(AgentsError):
    """A labelling table breaks the rule that each (trajectory, capability, run) cell is filled exactly once."""


class SynthesisError(AgentsError):
    """No environment can be written for a capability from the trajectories that were given."""
