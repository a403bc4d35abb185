"""Replays the recorded replies of a language model, so that the llm analyst can be measured without one.

A file of replies is JSON Lines, compressed if its name ends in ``.gz``. The first line describes the recording, each
other line is one reply under the hash of its request (``agents.llm.question.Question.key``):

    {"model": "...", "context": 100000, "runs": 5, "seed": 0, "prompt_price": 3.0, "completion_price": 15.0}
    {"key": "...", "text": "...", "finish_reason": "stop", "prompt_tokens": 1200, "completion_tokens": 80}

``context`` is in tokens, prices are per million tokens. Conversations are analysed in the order of task and trial, on
which the prompts depend. A changed prompt has another hash: then no reply is found, and the benchmark says that the
replies have to be recorded anew instead of asking a server.

The replies in benchmarks/records/analysis are those of three assistants who read the requests in place of a model, each
a third of them, without knowing the ground truth. A reader remembers earlier requests about the same conversations,
so the agreement of the runs is an upper bound.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from agents.analyst.llm.analysis import Analysis, analyse
from agents.errors import AgentsError
from agents.llm.endpoint import Endpoint
from agents.llm.model import Model
from agents.llm.question import Purpose, Question, Reply, Usage
from store.types import Trajectory

NO_SERVER = "http://127.0.0.1:9/v1"  # never contacted: a missing reply is an error


class MissingReply(AgentsError):
    """The recording has no reply to a request: the prompts or the conversations have changed since."""


@dataclass(frozen=True)
class Recording:
    """The description of a file of replies, and its replies by the hash of their request."""

    model: str
    context: int
    runs: int
    seed: int
    prompt_price: float
    completion_price: float
    replies: dict[str, Reply] = field(repr=False)

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint whose replies these are; it cannot be reached."""
        return Endpoint(
            NO_SERVER,
            self.model,
            SecretStr("none"),
            prompt_price=self.prompt_price,
            completion_price=self.completion_price,
            context_tokens=self.context,
        )


class ReplayLedger:
    """A ledger that has the replies of a recording only, and counts those that were used."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._used: dict[str, Reply] = {}

    def find(self, key: str) -> Reply:
        """Return the recorded reply; raise ``MissingReply`` if there is none."""
        if key not in self._recording.replies:
            raise MissingReply(
                f"no recorded reply of {self._recording.model} has the request hash {key[:12]}; the prompts have "
                "changed: record the replies anew"
            )
        self._used[key] = self._recording.replies[key]
        return self._used[key]

    def keep(self, key: str, question: Question, model: str, reply: Reply) -> None:
        """See ``Ledger.keep``: nothing is asked, so there is nothing to keep."""
        raise AssertionError(key)

    def usage(self, purpose: Purpose) -> Usage:
        """Return the usage of the replies that were used, for any purpose."""
        usage = Usage()
        for reply in self._used.values():
            usage = usage.with_reply(reply)
        return usage


def read_recording(path: Path) -> Recording:
    """Return the recording in a file."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    header, *rows = (json.loads(line) for line in text.splitlines())
    prices = header["prompt_price"], header["completion_price"]
    return Recording(**header, replies={row["key"]: _reply(row, *prices) for row in rows})


def _reply(row: dict[str, object], prompt_price: float, completion_price: float) -> Reply:
    prompt, completion = int(str(row["prompt_tokens"])), int(str(row["completion_tokens"]))
    cost = (prompt * prompt_price + completion * completion_price) / 1e6
    return Reply(str(row["text"]), str(row["finish_reason"]), prompt, completion, cost, 0.0)


def in_recorded_order(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Return the trajectories in the order in which a recording analyses them."""
    return sorted(trajectories, key=lambda item: (item.task_id, item.trial))


async def analyse_by_replies(recording: Recording, trajectories: Sequence[Trajectory]) -> tuple[Analysis, Usage]:
    """Return the llm analyst's analysis by recorded replies, and the usage of the replies that it needed.

    Raises:
        MissingReply: A request has no reply.
    """
    purpose, ledger = Purpose("benchmark", "analyze"), ReplayLedger(recording)
    async with Model(recording.endpoint, ledger) as model:
        analysis = await analyse(
            model,
            trajectories,
            purpose=purpose,
            context=recording.context,
            runs=recording.runs,
            seed=recording.seed,
            known_capabilities=[],
            report_progress=lambda *_: None,
        )
    return analysis, ledger.usage(purpose)
