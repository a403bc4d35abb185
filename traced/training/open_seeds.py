"""Draw seeds again whose outcome is open: a group whose rewards are all equal has no gradient.

A seed is open or closed by its newest group in the window: open if the rewards differed. A share of the groups has open
seeds. The others have seeds of the iteration's own draw that are not closed, and closed ones only where these run out,
as in a short list of tasks. After the window a closed seed counts as unknown: the policy has changed.

Invariants: what an iteration draws depends on the job's seed, its number and the groups before it, which are on disk
(``groups.jsonl``, a line per iteration): a resumed run draws the same. A share of the groups has seeds of the
iteration's own draw always, so that the training sees more than it has solved half of.

Not covered: the dynamic sampling of DAPO (arXiv 2503.14476), which plays more groups until enough of them are open.
"""

import json
import random
from collections.abc import Sequence
from itertools import islice
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
            fresh: The seeds that it has without this draw, the first ones of ``TrainingJob.seed_draws``.
            iterations: The number of iterations whose groups count; with overlap the last one is not there yet.
        """
        is_open = self._outcomes(iterations)
        own_open = [seed for seed in fresh if is_open.get(seed)]
        count = max(0, self._job.open_groups - len(own_open))
        pool = sorted(seed for seed, outcome in is_open.items() if outcome and seed not in fresh)
        rng = random.Random(derive_seed(self._job.seed, "open", iteration))
        repeated = rng.sample(pool, min(count, len(pool)))
        free = len(fresh) - len(repeated)
        # Unknown seeds give way from the end. Together with the repeated ones the open ones fit into their share.
        unknown = [seed for seed in fresh if seed not in is_open][: free - len(own_open)]
        seeds = [seed for seed in fresh if seed in own_open or seed in unknown]
        closed = {seed for seed, outcome in is_open.items() if not outcome}
        seeds += self._further(iteration, {*closed, *fresh, *repeated}, free - len(seeds))
        seeds += [seed for seed in fresh if seed not in seeds][: free - len(seeds)]
        return [*seeds, *repeated]

    def _further(self, iteration: int, excluded: set[int], count: int) -> list[int]:
        """Return so many seeds of the iteration's draw, fewer where these run out."""
        # Bounded, because drawing every seed of a list takes many draws.
        count = max(0, min(count, self._job.training_seeds - len(excluded)))
        return list(islice((seed for seed in self._job.seed_draws(iteration) if seed not in excluded), count))

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

    def _outcomes(self, iterations: int) -> dict[int, bool]:
        """Return whether each seed of the window is open, by its newest group."""
        last: dict[int, bool] = {}
        # What a collapsed policy could not do says nothing about the one that the run has gone back to.
        given_up = self._recoveries.given_up()
        window = [number for number in range(1, iterations + 1) if number - 1 not in given_up][-WINDOW:]
        for row in self._rows():
            if row["iteration"] in window:
                for seed, rewards in row["groups"].items():
                    last[int(seed)] = max(rewards) - min(rewards) > EQUAL
        return last

    def _rows(self) -> list[Any]:
        return list(read_metrics(self._file))
