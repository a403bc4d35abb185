"""Stock TRL's GRPOTrainer on the service desk, and the same desk for traced's trainer, for ``benchmarks.training``.

TRL's own tool loop has no user: an episode ends with the first answer without a tool call. ``ToolDesk`` ends there too,
and plays only scenarios whose user says nothing after the first message. Both sides render the same prompts with the
same tools, sorted by name, because TRL finds a class's tools in that order.
"""

import inspect
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_template

from sandbox.contract import Message, Score, Task
from traced.targets.desk import Desk
from traced.targets.desk.scenario import scenario
from traced.targets.desk.tools import TOOLS
from traced.training import grpo
from traced.training.job import TrainingJob
from traced.training.lora import lora_config

SORTED_TOOLS = sorted(TOOLS, key=lambda tool: tool["function"]["name"])
STRIDE = 64  # more than enough scenarios in a row that one without a user is among them


def desk_seed(seed: int) -> int:
    """Return the first seed from ``STRIDE * seed`` on whose user says nothing after the first message."""
    seeds = itertools.count(STRIDE * seed)
    return next(s for s in seeds if not any(r.withheld or r.kind == "exchange" for r in scenario(s).requests))


class ToolDesk(Desk):
    """A service desk whose episode ends with the agent's first text; ``seed`` numbers the suitable scenarios."""

    def reset(self, seed: int) -> Task:
        """Begin the scenario."""
        task = super().reset(desk_seed(seed))
        return Task(task.system, task.messages, SORTED_TOOLS)

    def step(self, message: Message) -> list[Message]:
        """Run the tool calls of ``message``, or end the episode."""
        if message.get("tool_calls"):
            return super().step(message)
        self.messages.append(message)
        self.finished = True
        return []


class AlternatingDesk(ToolDesk):
    """A desk whose episodes are worth 0 and 1 in turn, so that every group has different rewards."""

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def reset(self, seed: int) -> Task:
        """Begin the scenario, and take the next number."""
        self.number = next(self._numbers)
        return super().reset(seed)

    def score(self) -> Score:
        """Return 0 or 1, whatever was played."""
        return Score(float(self.number % 2), bool(self.number % 2))


class StockDesk:
    """The desk as TRL's ``environment_factory`` wants it: ``reset``, and a method with types for each tool."""

    def __init__(self, factory: Callable[[], ToolDesk]) -> None:
        self._desk = factory()

    def reset(self, seed: int, **_: Any) -> None:
        """Begin the scenario; the prompt is in the data set."""
        self._desk.reset(seed)

    def _call(self, name: str, arguments: dict[str, str]) -> str:
        function = {"name": name, "arguments": json.dumps(arguments)}
        answers = self._desk.step({"role": "assistant", "tool_calls": [{"id": "", "function": function}]})
        return str(answers[0]["content"])


def _tool_method(schema: dict[str, Any]) -> Callable[..., str]:
    """Return a method with the signature and the docstring from which transformers derives this schema."""
    name, properties = schema["name"], schema["parameters"]["properties"]

    def method(self: StockDesk, **arguments: str) -> str:
        return self._call(name, arguments)

    parameters = [inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str) for p in properties]
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    descriptions = "\n".join(f"    {p}: {value['description']}" for p, value in properties.items())
    method.__name__, method.__doc__ = name, f"{schema['description']}\n\nArgs:\n{descriptions}\n"
    method.__annotations__ = {**dict.fromkeys(properties, str), "return": str}
    # The type of functions does not have it, but ``inspect`` reads it.
    method.__signature__ = inspect.Signature([first, *parameters], return_annotation=str)  # type: ignore[attr-defined]
    return method


for _tool in SORTED_TOOLS:
    setattr(StockDesk, _tool["function"]["name"], _tool_method(_tool["function"]))


def desk_reward(completions: Sequence[list[Message]], environments: Sequence[StockDesk], **_: Any) -> list[float]:
    """Return each episode's reward; the agent's texts are in the completions only."""
    rewards = []
    for messages, environment in zip(completions, environments, strict=True):
        desk = environment._desk
        desk.messages += [message for message in messages if message["role"] == "assistant"]
        desk.finished = True
        rewards.append(desk.score().reward)
    return rewards


@dataclass
class IterationClock(TrainerCallback):
    """Takes wall-clock and processor seconds of every iteration: rollouts, update and optimizer step."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    _began: tuple[float, float] = (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin an iteration."""
        self._began = (time.perf_counter(), time.process_time())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End an iteration."""
        self.seconds.append(time.perf_counter() - self._began[0])
        self.cpu_seconds.append(time.process_time() - self._began[1])


def stock_trainer(job: TrainingJob, factory: Callable[[], ToolDesk], model: Any, tokenizer: Any) -> Any:
    """Return TRL's trainer with its own generation and tools, set like the job's; ``model`` is without an adapter."""
    arguments = grpo._arguments(job)
    # TRL's limit leaves the prompt out, and holds for each turn as well unless generation has its own.
    longest_prompt = max(len(_prompt_ids(tokenizer, seed)) for seed in _seeds(job))
    arguments.max_completion_length = job.max_length - longest_prompt
    arguments.generation_kwargs = {"max_new_tokens": job.max_tokens}
    arguments.max_tool_calling_iterations = job.max_turns - 1
    # TRL does not know the bundled model's template, which writes tool calls as Qwen3's does.
    tokenizer.response_template = qwen3_template
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[desk_reward],
        args=arguments,
        train_dataset=_dataset(job),
        processing_class=tokenizer,
        peft_config=lora_config(job, model),
        environment_factory=lambda: StockDesk(factory),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _seeds(job: TrainingJob) -> list[int]:
    return [seed for iteration in range(job.iterations) for seed in job.group_seeds(iteration)]


def _messages(seed: int) -> list[Message]:
    task = ToolDesk().reset(seed)
    return [{"role": "system", "content": task.system}, *task.messages]


def _prompt_ids(tokenizer: Any, seed: int) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        _messages(seed), tools=SORTED_TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids


def _dataset(job: TrainingJob) -> Any:
    seeds = _seeds(job)
    return Dataset.from_dict({"prompt": [_messages(seed) for seed in seeds], "seed": seeds})
