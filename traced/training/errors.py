"""Errors that stop a training run.

TracedError
└── TrainingError
    ├── JobError             the job file, or what it names, cannot be used
    ├── JobChangedError      the output folder belongs to a different job
    ├── EnvironmentFailed    every group of an iteration was lost to infrastructure failures
    ├── NothingToLearn       no iteration had a gradient, in more groups than chance explains
    ├── DeviceFull           one rollout does not fit into the memory of the device
    ├── EngineLost           no engine served the requests of an iteration, or loaded its adapter
    ├── WrongPolicy          rollouts were sampled from other weights than those of the trained adapter
    ├── MergeError           adapters that cannot be merged
    ├── TrainingPaused       paused on request: the same command continues from the checkpoint
    └── TrainerDied          the training process ended without a result; carries its last log lines
"""

from traced.core.errors import TracedError


class TrainingError(TracedError):
    """Training stopped."""


class JobError(TrainingError):
    """The job file, or what it names, cannot be used."""


class JobChangedError(TrainingError):
    """The output folder holds another job's checkpoints."""


class EnvironmentFailed(TrainingError):
    """Every group of an iteration was lost to infrastructure failures, or the environment could not be started."""


class NothingToLearn(TrainingError):
    """No iteration had a gradient: more groups had equal rewards than chance explains, or mixed ones gave none."""


class DeviceFull(TrainingError):
    """One rollout does not fit into the memory of the device."""


class EngineLost(TrainingError):
    """No engine served the requests of an iteration, or loaded its adapter."""


class WrongPolicy(TrainingError):
    """Rollouts were, or would be, sampled from other weights than those of the trained adapter."""


class MergeError(TrainingError):
    """Adapters that cannot be merged."""


class TrainingPaused(TrainingError):
    """Training was paused on request, after a checkpoint."""


class TrainerDied(TrainingError):
    """The training process ended without a result."""


def no_room_beside_engine() -> EngineLost:
    """Return the error of a trainer that found the engine awake on its GPU where both take turns."""
    return EngineLost(
        "the GPU has no room for the base model: the engine on it is awake, although it sleeps for this training",
        hint="traced serve without the service wakes it: use traced up with serving.with_service = true; or another "
        "engine.gpu_share",
    )
