"""Go back to the best policy when a training has collapsed: it learns nothing more, or its validation has fallen far.

A run learns nothing more if in its last ``PATIENCE`` iterations episodes failed, its policy has become certain
(``metrics.is_certain``), and either no group had a gradient, or at most ``SMALL_SHARE`` of the groups were mixed and
the success was ``SMALL_SHARE`` below the best validation's. The gradient comes from mixed groups alone; the entropy
separates a collapse from a reward that is rare: iterations without a mixed group cost rollouts then, and the run goes
on. The success separates it from a policy that has learned what it can. A run that never had a gradient has not
collapsed; see ``metrics.stall``.

A validation has fallen far if each of the ``FALLEN`` newest ones has at most half of the best success, and is more than
two standard errors of the difference of two proportions below it. Groups may still be mixed then, and the policy
uncertain: a learning rate that is too high does this. One such validation may be chance, and runs recover from it.

The answer: the weights of the best validated policy, optimizer moments of 0, a lower learning rate, and a higher
sampling temperature, each by a factor per recovery; and from the first recovery on a KL term, an entropy bonus and
hints by ``training.recovery_kl``, ``recovery_entropy_bonus`` and ``recovery_hint_share``. ``training.recoveries``
bounds their number.

Invariants: a decision is on disk (``recoveries.jsonl``) before the checkpoint of its iteration, which has the restored
weights. A run that is resumed from an earlier checkpoint forgets it, and decides the same from the same metrics.

Not covered: a collapse in the last iteration, after which nothing would be trained; a validation that falls while the
environment has so few seeds that chance explains it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from traced.core.files import publish_file
from traced.training.job import TrainingJob, Validation
from traced.training.metrics import PATIENCE, Metrics, append, has_signal, is_certain, is_outage, read_metrics

RECOVERIES = "recoveries.jsonl"
SMALL_SHARE = 0.1  # share of the groups, and of the episodes, that counts as few
FALLEN = 2  # validations in a row far below the best one


@dataclass(frozen=True)
class Recovery:
    """After ``iteration`` the run goes on from the policy with ``policy`` updates, at this rate and temperature."""

    iteration: int
    policy: int
    lr: float
    temperature: float
    reason: str

    @property
    def message(self) -> str:
        """Return the decision in a sentence."""
        return (
            f"iteration {self.iteration}: collapsed ({self.reason}); back to policy {self.policy}, "
            f"lr {self.lr:.3g}, temperature {self.temperature:.3g}"
        )

    def applied(self, job: TrainingJob) -> TrainingJob:
        """Return the job as it goes on after this recovery."""
        return replace(
            job,
            lr=self.lr,
            temperature=self.temperature,
            # Validations keep their temperature, so that they can be compared.
            validation_temperature=job.trial_temperature,
            kl=max(job.kl, job.recovery_kl),
            entropy_bonus=max(job.entropy_bonus, job.recovery_entropy_bonus),
            hint_share=max(job.hint_share, job.recovery_hint_share),
        )


class Recoveries:
    """The recoveries of a job's run."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._file = job.out / RECOVERIES

    def all(self) -> list[Recovery]:
        """Return them in order."""
        # A dictionary of figures, iteration included, as every line of such a file.
        return [Recovery(**row) for row in read_metrics(self._file)]  # type: ignore[arg-type]

    @property
    def last_iteration(self) -> int:
        """Return the iteration of the last one; 0 without any."""
        return max((recovery.iteration for recovery in self.all()), default=0)

    def current(self) -> TrainingJob:
        """Return the job as it goes on now."""
        past = self.all()
        return past[-1].applied(self._job) if past else self._job

    def decide(self, validated: Sequence[Validation]) -> Recovery | None:
        """Return the recovery that the newest iteration calls for, and store it; None if there is nothing to do.

        Args:
            validated: The figures of the policies that the run may go back to.
        """
        rows, past = read_metrics(self._job.metrics), self.all()
        iteration = int(rows[-1]["iteration"]) if rows else 0
        candidates = self.targets(validated, iteration)
        if len(past) >= self._job.recoveries or iteration >= self._job.iterations or not candidates:
            return None
        best = max(candidates, key=lambda validation: validation.rank)
        given_up = self.given_up()
        current = [validation for validation in validated if validation.policy not in given_up]
        reason = collapse(rows, best, start=self.last_iteration) or fall(current, best)
        if not reason:
            return None
        job = self.current()
        recovery = Recovery(
            iteration,
            best.policy,
            job.lr * job.recovery_lr,
            job.temperature * job.recovery_temperature,
            reason,
        )
        append(self._file, asdict(recovery))
        return recovery

    def forget_after(self, iterations: int) -> None:
        """Drop those after this number of iterations, which are run again."""
        if self._file.exists():
            remaining = [asdict(recovery) for recovery in self.all() if recovery.iteration <= iterations]
            publish_file(self._file, "".join(json.dumps(row) + "\n" for row in remaining))

    def targets(self, validated: Sequence[Validation], iteration: int) -> list[Validation]:
        """Return the policies among the validated ones that the run may go back to after an iteration."""
        given_up = self.given_up()
        return [v for v in validated if self.is_old(v.policy, iteration) and v.policy not in given_up]

    def is_old(self, policy: int, iteration: int) -> bool:
        """Return whether a policy is older than those that have collapsed if the run has, after an iteration."""
        # The policies of the last iterations are those that have collapsed, whatever their validation says.
        return policy < iteration - PATIENCE - self._job.overlap

    def given_up(self, *, iterations: int | None = None) -> set[int]:
        """Return the policies that the run has gone back behind; policy N has sampled iteration N + 1.

        Args:
            iterations: Only recoveries in so many first iterations count; None: all.
        """
        return {
            policy
            for recovery in self.all()
            if iterations is None or recovery.iteration <= iterations
            for policy in range(recovery.policy + 1, recovery.iteration)
        }


def collapse(rows: Sequence[Metrics], best: Validation, *, start: int = 0) -> str:
    """Return how a run has ceased to learn, "" if it has not; only iterations above ``start`` count.

    Source: the module's docstring.
    """
    last = [row for row in rows if row["iteration"] > start][-PATIENCE:]
    if len(last) < PATIENCE or not any(has_signal(row) for row in rows[:-PATIENCE]):
        return ""
    if any(row["success"] == 1.0 or is_outage(row) for row in last) or not is_certain(rows):
        return ""
    mixed_share, success, entropy = (
        sum(row[name] for row in last) / PATIENCE for name in ("mixed_groups", "success", "entropy")
    )
    is_below = mixed_share <= SMALL_SHARE and success <= best.success - SMALL_SHARE
    if any(has_signal(row) for row in last) and not is_below:
        return ""
    groups = f"mixed groups {mixed_share:.0%}" if mixed_share else "no mixed group"
    return f"{groups} in {PATIENCE} iterations, entropy {entropy:.2f}, success {success:.2f}"


def fall(validated: Sequence[Validation], best: Validation) -> str:
    """Return how far the newest validations are below the best one, "" if they are not.

    Args:
        validated: Those of the policies that were not given up, in any order, ``best`` among them.
        best: The one that the run would go back to.

    Source: the module's docstring.
    """
    last = sorted(validated, key=lambda validation: validation.policy)[-FALLEN:]
    if len(last) < FALLEN or not all(_is_far_below(validation, best) for validation in last):
        return ""
    figures = " and ".join(f"{validation.success:.2f}" for validation in last)
    return f"validation success {figures}, that of policy {best.policy} was {best.success:.2f}"


def _is_far_below(validation: Validation, best: Validation) -> bool:
    """Return whether a success is at most half of the best one, by more than chance."""
    episodes = validation.episodes + best.episodes
    pooled = (validation.success * validation.episodes + best.success * best.episodes) / episodes
    error = math.sqrt(pooled * (1 - pooled) * (1 / validation.episodes + 1 / best.episodes))
    return validation.success <= best.success / 2 and best.success - validation.success > 2 * error
