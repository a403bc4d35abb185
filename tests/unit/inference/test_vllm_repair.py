"""The repair of vLLM's kernels for a CPU, on a kernel with the same fault."""

from typing import Any

import torch

from traced.inference.vllm_repair import is_faulty, masked_shrink


def shrink(inputs: Any, weights: Any, output: Any, slots: Any, scaling: float = 1.0) -> None:
    """As vLLM 0.32.0 has it in effect: [rows, in] by [slots, out, in], each row by its slot's weights."""
    output[:] = scaling * torch.einsum("bi,boi->bo", inputs, weights[slots])


def test_only_rows_without_an_adapter_are_masked() -> None:
    torch.manual_seed(0)
    inputs, weights, slots = torch.randn(4, 3), torch.randn(2, 5, 3), torch.tensor([0, -1, 1, -1])
    faulty_output, masked_output = torch.zeros(4, 5), torch.zeros(4, 5)
    shrink(inputs, weights, faulty_output, slots, 0.5)
    masked_shrink(shrink)(inputs, weights, masked_output, slots, 0.5)
    assert torch.equal(masked_output[[0, 2]], faulty_output[[0, 2]])
    assert not masked_output[[1, 3]].any()
    assert faulty_output[[1, 3]].all()


def test_the_fault_is_detected_and_its_repair_is_not() -> None:
    assert is_faulty(shrink)
    assert not is_faulty(masked_shrink(shrink))
