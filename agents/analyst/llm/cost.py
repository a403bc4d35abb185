"""Estimates the requests, tokens and money of an analysis before it starts, from the texts that it would send.

Prompts are counted at the full price: most servers discount a repeated prefix, but few report it. The lower figure
holds if the runs agree after the first sample, the upper one if every conversation is labelled in all runs. Answers
that have to be corrected are not included.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from agents.analyst.llm.labelling import SAMPLE
from agents.analyst.llm.packs import Packs
from agents.analyst.llm.prompting import instructions, system_message
from agents.llm.endpoint import Endpoint, estimated_tokens

# Means of the replies in benchmarks/records, rounded up: tokens of a critique of one failure, and of the labels of one
# conversation; tokens of ten capabilities with their texts.
CRITIQUE_TOKENS, ROW_TOKENS, CAPABILITIES_TOKENS = 250, 200, 1000
# Tokens of one failure's steps in the question that names the capabilities.
STEPS_TOKENS = 200


@dataclass(frozen=True)
class CostEstimate:
    """What an analysis sends and receives; the figures of ``most_`` hold if the runs do not agree.

    Costs are in the currency of the endpoint's prices, 0 without prices.
    """

    conversations: int
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    most_requests: int
    most_cost: float

    @property
    def text(self) -> str:
        """The estimate in one line."""
        prices = "in the currency of llm.prompt_price and llm.completion_price"
        cost = f", about {self.cost:.2f} (at most {self.most_cost:.2f}) {prices}" if self.cost else ""
        return (
            f"{self.conversations} conversations, about {self.requests} requests (at most {self.most_requests}), "
            f"{self.prompt_tokens} prompt and {self.completion_tokens} answer tokens{cost}"
        )

    def as_json(self) -> dict[str, object]:
        """Return the fields for the event of the stage."""
        return asdict(self)


@dataclass
class _Total:
    requests: int = 0
    prompt: int = 0
    completion: int = 0

    def add(self, prompt: int, completion: int) -> None:
        self.requests += 1
        self.prompt += prompt
        self.completion += completion


def estimate_cost(
    packs: Packs, runs: int, endpoint: Endpoint, count_tokens: Callable[[str], int] = estimated_tokens
) -> CostEstimate:
    """Return the estimate for some packs, with the endpoint's prices."""
    fixed = {kind: count_tokens(instructions(kind)) for kind in ("critique", "aggregate", "label")}
    system = count_tokens(system_message())
    total, maximum, sampled = _Total(), _Total(), 0
    failures = 0
    for pack in packs.critiques:
        failed = len(pack.failed_subjects)
        failures += failed
        for count in (total, maximum):
            count.add(system + count_tokens(pack.text) + fixed["critique"], failed * CRITIQUE_TOKENS)
    for pack in packs.labels:
        rows = len(pack.subjects)
        label = (system + count_tokens(pack.text) + fixed["label"] + CAPABILITIES_TOKENS, rows * ROW_TOKENS)
        expected = min(runs, 2 if sampled < SAMPLE else 1)
        sampled += rows
        for count, of_runs in ((total, expected), (maximum, runs)):
            for _ in range(of_runs):
                count.add(*label)
    for count in (total, maximum):
        if failures:
            count.add(system + fixed["aggregate"] + failures * STEPS_TOKENS, CAPABILITIES_TOKENS)
    return CostEstimate(
        sum(len(pack.subjects) for pack in packs.labels),
        total.requests,
        total.prompt,
        total.completion,
        endpoint.cost(total.prompt, total.completion),
        maximum.requests,
        endpoint.cost(maximum.prompt, maximum.completion),
    )
