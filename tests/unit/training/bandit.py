"""A two-turn bandit: each answer should begin with a letter from the first half of the alphabet."""

from collections.abc import Callable, Iterator

from sandbox.contract import Message, Score, Task

GOOD = "abcdefghijklm"


class Bandit:
    """Reward is the share of the two answers that begin with a good letter; ``fail`` may raise in a step."""

    def __init__(self, fail: Callable[[int], None] | None = None) -> None:
        self.fail = fail

    def reset(self, seed: int) -> Task:
        self.seed = seed
        self.replies: list[str] = []
        return Task(f"seed {seed}", [{"role": "user", "content": "please say a letter"}], [])

    def step(self, message: Message) -> list[Message]:
        if self.fail is not None:
            self.fail(self.seed)
        self.replies.append(str(message.get("content") or ""))
        return [] if self.done else [{"role": "user", "content": "again"}]

    @property
    def done(self) -> bool:
        return len(self.replies) >= 2

    def score(self) -> Score:
        reward = sum(text[:1].lower() in GOOD and text != "" for text in self.replies) / 2
        return Score(reward, reward == 1.0)

    def oracle(self) -> Iterator[Message]:
        while not self.done:
            yield {"role": "assistant", "content": "a"}
