"""Teachers of an on-policy distillation: adapters whose log-probs of the policy's own tokens are its targets.

The policy samples; each sampled token has the advantage log p_teacher - log p_policy, in the clipped loss of the
trainer. In expectation that is the gradient of the reverse KL divergence of each token's distribution, with the
conversation before it as given (K. Lu, "On-Policy Distillation", Thinking Machines Lab 2025; R. Agarwal et al., "On-
Policy Distillation of Language Models", arXiv 2306.13649). The teacher of a row is the one with its seed's number.

Invariants: the policy's weights are the same bits after a look-up as before. Teachers have the layers and the rank of
the policy. Not covered: teachers with another base, a base that is sharded.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from traced.training.errors import JobError
from traced.training.lora import ADAPTER
from traced.training.policy_check import Weights, with_weights

Batch = dict[str, Tensor]
COLUMN = "teacher"  # of a batch: the number of each row's teacher


class Teachers:
    """The teachers of a job, for a model that has an adapter of their shape; raises ``JobError``."""

    def __init__(self, folders: Sequence[Path], model: Any) -> None:
        self._weights = [adapter_weights(folder, model) for folder in folders]

    def column(self, seeds: Sequence[int]) -> Tensor:
        """Return the number of the teacher of each of these seeds' rows."""
        return torch.tensor([seed % len(self._weights) for seed in seeds])

    def logprobs(self, model: Any, chunk: Batch, measure: Callable[[Batch], Tensor]) -> Tensor:
        """Return the log-probs [n, c] of each row under its teacher, without gradient.

        Args:
            measure: Returns the log-probs [n, c] of the sampled tokens of rows under the model as it is then.
        """
        result = torch.zeros_like(chunk["old_per_token_logps"])
        # Dropout would draw random numbers.
        model.eval()
        try:
            for number, weights in enumerate(self._weights):
                rows = chunk[COLUMN] == number
                if rows.any():
                    with torch.no_grad(), with_weights(model, weights):
                        result[rows] = measure({name: values[rows] for name, values in chunk.items()}).to(result.dtype)
        finally:
            model.train()
        return result


def begin_with(model: Any, folder: Path) -> None:
    """Give the trained parameters of a model the weights of an adapter; raises ``JobError``."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter, weights in zip(parameters, adapter_weights(folder, model), strict=True):
            parameter.copy_(weights)


def adapter_weights(folder: Path, model: Any) -> Weights:
    """Return the weights of an adapter's folder in the order of the model's trained parameters.

    Raises:
        JobError: The file cannot be read, or the adapter has other layers or another rank than the model's.
    """
    file = folder / SAFETENSORS_WEIGHTS_NAME
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise JobError(f"{file} cannot be read: {error}", hint="traced doctor") from error
    parameters = {
        name.replace(f".{ADAPTER}", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
        raise JobError(
            f"the adapter {folder.name} has other layers or another rank than one of this job",
            hint="train all adapters with the same training.lora_r",
        )
    return [tensors[name] for name in parameters]
