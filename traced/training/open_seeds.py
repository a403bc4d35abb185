"""Draw seeds again whose outcome is open: a group whose rewards are all equal has no gradient.

Invariants: what an iteration draws depends on the job's seed, its number and the groups before it, which are on disk
(``groups.jsonl``, a line per iteration): a resumed run draws the same. A share of the groups has fresh seeds always, so
that the training sees more than it has solved half of.

Not covered: the dynamic sampling of DAPO (arXiv 2503.14476), which plays more groups until enough of them are open.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

from traced.core.files import publish_file
from traced.core.seeds import derive_seed
from traced.training.job import TrainingJob
from traced.training.metrics import append, read_metrics
from traced.training.recovery import Recoveries
from traced.training.rollouts import Rollout

GROUPS = "groups.jsonl"
WINDOW = 8  # iterations that a group's outcome counts: the policy changes
EQUAL = 1e-6  # rewards closer than this do not differ


class OpenSeeds:
    """The groups of a job's iterations, and the seeds of the next one."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._file = job.out / GROUPS
        self._recoveries = Recoveries(job)

    def draw(self, iteration: int, fresh: Sequence[int], iterations: int) -> list[int]:
        """Return the seeds of an iteration, counted from 0.

        Args:
            fresh: The seeds that it has without this draw.
            iterations: The number of iterations whose groups count; with overlap the last one is not there yet.
        """
        count = round(self._job.open_share * len(fresh))
        pool = sorted(self._open(iterations) - set(fresh))
        rng = random.Random(derive_seed(self._job.seed, "open", iteration))
        repeated = rng.sample(pool, min(count, len(pool)))
        return [*fresh[: len(fresh) - len(repeated)], *repeated]

    def record(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """Store the groups of an iteration, counted from 0."""
        rewards: dict[int, list[float | None]] = {}
        for rollout in rollouts:
            reward = rollout.reward if rollout.failure is None else None
            rewards.setdefault(rollout.seed, []).append(reward)
        groups = {str(seed): values for seed, values in rewards.items() if None not in values}
        append(self._file, {"iteration": iteration + 1, "groups": groups})

    def forget_after(self, iterations: int) -> None:
        """Drop the iterations after this number of them, which are played again."""
        if self._file.exists():
            rows = [row for row in self._rows() if row["iteration"] <= iterations]
            publish_file(self._file, "".join(json.dumps(row) + "\n" for row in rows))

    def _open(self, iterations: int) -> set[int]:
        last: dict[int, bool] = {}
        # What a collapsed policy could not do says nothing about the one that the run has gone back to.
        given_up = self._recoveries.given_up()
        window = [number for number in range(1, iterations + 1) if number - 1 not in given_up][-WINDOW:]
        for row in self._rows():
            if row["iteration"] in window:
                for seed, rewards in row["groups"].items():
                    last[int(seed)] = max(rewards) - min(rewards) > EQUAL
        return {seed for seed, is_open in last.items() if is_open}

    def _rows(self) -> list[Any]:
        return list(read_metrics(self._file))
