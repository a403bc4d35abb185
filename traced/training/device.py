"""The device of a training: as the service has leased it, or by the settings where there is no service.

The service names the leased device in the variables of the stage's process. They do not hide a GPU from the stage,
whose engine may use another one; only the trainer's process sees nothing but the GPUs of the lease.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from traced.core.gpus import gpu_ids
from traced.training.errors import JobError

# The leading underscore keeps them apart from settings, which the prefix TRACED_ names.
DEVICE_VARIABLE = "_TRACED_TRAINING_DEVICE"
GPUS_VARIABLE = "_TRACED_TRAINING_GPUS"
CPU: Literal["cpu"] = "cpu"


@dataclass(frozen=True)
class TrainingDevice:
    """The kind of device that a training uses, and the UUIDs of its GPUs."""

    kind: Literal["cpu", "cuda"]
    gpus: tuple[str, ...] = ()

    @property
    def stage_variables(self) -> dict[str, str]:
        """Return the variables by which the service names the device to the stage."""
        return {DEVICE_VARIABLE: self.kind, GPUS_VARIABLE: ",".join(self.gpus)}

    @property
    def trainer_variables(self) -> dict[str, str]:
        """Return the variables of the trainer's process, which sees these GPUs and no other."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


ON_CPU = TrainingDevice(CPU)


def training_device(
    train_on: str, count: int, variables: Mapping[str, str], gpus: Callable[[], Sequence[str]] = gpu_ids
) -> TrainingDevice:
    """Return the leased device that ``variables`` name, or else the device of the settings.

    Args:
        train_on: "cpu", "cuda", the UUID of a GPU, or "auto" (GPUs if the machine has as many as needed, else the CPU).
        count: The number of GPUs that the training needs.
        gpus: Returns the UUIDs of the machine's GPUs.

    Raises:
        JobError: The settings name a GPU, and the machine has it not, or has fewer than needed.
    """
    if variables.get(DEVICE_VARIABLE) == "cuda":
        return TrainingDevice("cuda", tuple(variables[GPUS_VARIABLE].split(",")))
    if variables.get(DEVICE_VARIABLE) == CPU or train_on == CPU:
        return ON_CPU
    uuids = tuple(gpus())
    # Engines take the first GPU, so a training takes the last ones.
    selected = uuids[-count:] if train_on in ("auto", "cuda") else tuple(uuid for uuid in uuids if uuid == train_on)
    if len(selected) >= count:
        return TrainingDevice("cuda", selected)
    if train_on == "auto" and not uuids:
        return ON_CPU
    hint = 'nvidia-smi; or set devices.train_on = "auto", which trains on the CPU of a machine without a GPU'
    raise JobError(
        f"devices.train_on is {train_on!r} for {count} GPU(s); this machine has: {', '.join(uuids) or 'no GPU'}",
        hint=f"a lower training.processes, at most {len(selected)}" if selected else hint,
    )
