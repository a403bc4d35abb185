"""A conversation as the tokens that the model saw and sampled: it grows by appending, nothing is ever re-tokenised.

Invariants: the next prompt is the previous prompt + the sampled ids + the tokens that the chat template puts around the
new messages; those are found by rendering a fixed dummy conversation with and without the new messages and cutting
after the dummy's last end-of-turn token. ``mask`` is 1 exactly on sampled tokens, ``logprobs`` 0.0 elsewhere.
How it fails: ``TemplateError`` when the template does not end turns with the tokenizer's EOS token or renders earlier
turns differently once later ones follow. Not covered: templates that rewrite history (they cannot be token-exact).
"""

from dataclasses import dataclass, field
from typing import Any

from sandbox.contract import Message, Task
from traced.rollout.errors import TemplateError
from traced.serving.embedded.chat import render

DUMMY: list[Message] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
]


class TurnTemplate:
    """The tokens between a sampled answer and the next one, for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.eos_token_id
        rendered = tokenizer.apply_chat_template(DUMMY, tokenize=True, return_dict=False)
        if self.end not in rendered:
            raise TemplateError(
                f"the chat template does not end a turn with EOS ({tokenizer.eos_token!r}); "
                "token-exact training needs that",
                hint="choose a model with a ChatML-like template",
            )
        self.prefix = rendered[: len(rendered) - rendered[::-1].index(self.end)]
        self.between([{"role": "user", "content": "u"}])

    def opening(self, task: Task) -> list[int]:
        """The first prompt, generation prompt included."""
        return render(self.tokenizer, [{"role": "system", "content": task.system}, *task.messages], task.tools)

    def between(self, messages: list[Message]) -> list[int]:
        """What follows an answer's end-of-turn token: ``messages`` and the next generation prompt."""
        full = render(self.tokenizer, DUMMY + messages, [])
        if full[: len(self.prefix)] != self.prefix:
            raise TemplateError(
                "the chat template renders earlier turns differently once later ones follow; "
                "token-exact training needs a template that only appends",
                hint="choose a model whose template keeps history as it is",
            )
        return full[len(self.prefix) :]


@dataclass
class Conversation:
    """The tokens of one episode. ``prompt_ids`` is the first prompt; the three lists after it have equal length."""

    template: TurnTemplate
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """The prompt of the next completion."""
        return self.prompt_ids + self.ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    def answered(self, ids: list[int], logprobs: list[float]) -> None:
        """Append a sampled completion; ``logprobs`` in nats, one per id."""
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logprobs += logprobs

    def told(self, messages: list[Message]) -> None:
        """Append the environment's messages, closing the answer first when its length limit cut the end-of-turn off."""
        cut = not self.ids or self.ids[-1] != self.template.end
        given = [self.template.end] * cut + self.template.between(messages)
        self.ids += given
        self.mask += [0] * len(given)
        self.logprobs += [0.0] * len(given)
