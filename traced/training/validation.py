"""Keep the best iterate of a run: episodes on seeds that no rollout uses, every few iterations.

They are greedy, or have the temperature of the evaluations. Where there are fewer seeds than ``validation_seeds``, each
is played several times, at the temperature of the rollouts if they would be greedy: 4 episodes would choose by chance.

The last iterate of GRPO is often not the best one: a policy that has become certain finds no group with different
rewards, and drifts. The adapter of each validated policy stays in ``validated/policy-N`` with its figures; policy N has
been updated N times. The best is the one with the highest success, then the highest reward, then the most updates. An
episode that the infrastructure has lost counts as failed in this comparison, and a validation with less than
``SCORED_SHARE`` of its episodes scored is no result: its policy can be neither published nor gone back to. With
recoveries (``traced.training.recovery``) the untrained policy is validated too, so that there always is one to go back
to.

Invariants: all figures are kept until the run has its result. The weights of a policy are kept for as long as it may be
published or gone back to, also by a run that is resumed from the newest checkpoint (``Validations.prune``).

Not covered: the choice between runs, and stopping early by validation.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from traced.core.files import publish_file, publish_folder
from traced.training.adapter_folder import save_adapter
from traced.training.job import TrainingJob, Validation
from traced.training.recovery import Recoveries
from traced.training.rollouts import Rollout

FIGURES = "validation.json"
SCORED_SHARE = 0.8  # of the episodes of a validation that must be scored


class Validations:
    """The validated policies of a job."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._folder = job.out / "validated"

    def seeds(self, policy: int, *, is_last: bool = False) -> list[int]:
        """Return the seeds of a validation's episodes: every few iterations, and of the last policy; none otherwise.

        A seed is there once for each of its trials.
        """
        is_due = is_last or policy % self._job.validate_every == 0
        is_due = is_due and (policy > 0 or self._job.recoveries > 0)
        return self._job.validation * self._job.validation_trials if is_due else []

    def is_open(self, policy: int) -> bool:
        """Return whether the policy has been trained and has no figures."""
        return policy > 0 and self._figures(policy) is None

    def begin(self, model: Any, policy: int) -> None:
        """Keep the policy's adapter; ``model`` has its weights."""
        earlier = self._figures(policy)

        def fill(staging: Path) -> None:
            save_adapter(model, staging)
            if earlier is not None:
                publish_file(staging / FIGURES, _text(earlier))

        # A run that is resumed validates its policy again, which has the same weights. If it is killed before the end
        # of that, the policy must still have its figures.
        if earlier is None or not self._weights(policy):
            publish_folder(self.adapter(policy), fill)

    def end(self, policy: int, rollouts: Sequence[Rollout]) -> Validation | None:
        """Store the figures of the policy, unless it has some already, and return them.

        Returns:
            None, and no adapter is kept, if too many episodes were lost.
        """
        earlier = self._figures(policy)
        if earlier is not None:
            return earlier
        scored = [rollout for rollout in rollouts if rollout.failure is None and rollout.reward is not None]
        if len(scored) < SCORED_SHARE * len(rollouts):
            shutil.rmtree(self.adapter(policy), ignore_errors=True)
            return None
        result = Validation(
            success=sum(rollout.success for rollout in scored) / len(scored),
            reward=sum(rollout.reward or 0.0 for rollout in scored) / len(scored),
            policy=policy,
            episodes=len(scored),
            attempts=len(rollouts),
        )
        publish_file(self.adapter(policy) / FIGURES, _text(result))
        return result

    def best(self) -> Validation | None:
        """Return the figures of the best policy, None if none was validated."""
        return max(self.all(), key=lambda validation: validation.rank, default=None)

    @property
    def episodes(self) -> int:
        """Return the number of episodes that were scored so far."""
        return sum(validation.episodes for validation in self.all())

    def adapter(self, policy: int) -> Path:
        """Return the folder of a validated policy's adapter."""
        return self._folder / f"policy-{policy}"

    def publish_best(self, target: Path) -> Validation | None:
        """Publish the best policy's adapter; None if no policy was validated."""
        best = self.best()
        if best is None:
            return None
        place = self.adapter(best.policy)

        def fill(staging: Path) -> None:
            shutil.copytree(place, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(FIGURES))

        publish_folder(target, fill)
        return best

    def drop(self) -> None:
        """Remove all policies, once the run has its result."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def prune(self, checkpoint: int, recoveries: Recoveries) -> None:
        """Delete the weights of policies that can be neither published nor gone back to any more; figures stay.

        A policy is never published if a better one is there whenever it is: an earlier one, or one that a run resumed
        from the newest checkpoint has. It is never gone back to if it has been given up, or if such a better one has
        not and is old enough whenever it is itself.

        Args:
            checkpoint: The number of iterations after which the run would be resumed now.
            recoveries: Those of the run; a resumed run forgets the ones after the checkpoint.
        """
        validated, given_up = self.all(), recoveries.given_up()
        given_up_for_good = recoveries.given_up(iterations=checkpoint)
        for validation in validated:
            policy = validation.policy
            better = [other.policy for other in validated if other.rank > validation.rank]
            targets = [
                other
                for other in better
                if other not in given_up and (other < policy or recoveries.is_old(other, checkpoint + 1))
            ]
            may_be_target = self._job.recoveries > 0 and policy not in given_up_for_good and not targets
            may_be_published = all(other > max(policy, checkpoint) for other in better)
            if not may_be_target and not may_be_published:
                for path in self._weights(policy):
                    path.unlink()
        # The validation of a policy that was given up may have been cancelled.
        for policy in given_up:
            if self._figures(policy) is None:
                shutil.rmtree(self.adapter(policy), ignore_errors=True)

    def forget_after(self, policy: int) -> None:
        """Drop policies with more updates: a run that is resumed there makes them anew."""
        for place in self._folder.glob("policy-*"):
            if int(place.name.rpartition("-")[2]) > policy:
                shutil.rmtree(place)

    def all(self) -> list[Validation]:
        """Return the figures of all validated policies."""
        return [_read(path) for path in self._folder.glob(f"policy-*/{FIGURES}")]

    def _weights(self, policy: int) -> list[Path]:
        """Return the files of a policy's adapter."""
        return [path for path in self.adapter(policy).glob("*") if path.name != FIGURES]

    def _figures(self, policy: int) -> Validation | None:
        path = self.adapter(policy) / FIGURES
        return _read(path) if path.exists() else None


def _text(validation: Validation) -> str:
    return json.dumps(asdict(validation)) + "\n"


def _read(path: Path) -> Validation:
    return Validation(**json.loads(path.read_text(encoding="utf-8")))
