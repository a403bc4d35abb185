"""The replacements of vLLM's LoRA kernels for a CPU, against kernels as vLLM 0.32.0 has them."""

from typing import Any

import pytest
import torch

from traced.inference.vllm_repair import bgmv_expand, bgmv_expand_slice, bgmv_shrink, is_faulty

SLOTS = torch.tensor([0, -1, 1, 1, -1, 0])
WITH_ADAPTER = SLOTS >= 0


def shrink(inputs: Any, weights: Any, output: Any, slots: Any, scaling: float = 1.0) -> None:
    """As vLLM 0.32.0 has it in effect: [rows, in] by [slots, out, in], each row by its slot's weights."""
    output[:] = scaling * torch.einsum("bi,boi->bo", inputs, weights[slots])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 1, 5, 3)])
def test_the_first_product_equals_vllms_but_for_rows_without_an_adapter(shape: tuple[int, ...]) -> None:
    inputs, weights = torch.randn(6, 3), torch.randn(shape)
    expected, output = torch.zeros(6, 5), torch.full((6, 7), 9.0)
    shrink(inputs, weights.reshape(2, 5, 3), expected, SLOTS, 0.5)
    bgmv_shrink(inputs, weights, output, SLOTS, 0.5)
    torch.testing.assert_close(output[WITH_ADAPTER, :5], expected[WITH_ADAPTER])
    assert not output[~WITH_ADAPTER, :5].any()
    assert (output[:, 5:] == 9.0).all()
    assert expected[~WITH_ADAPTER].all()


@pytest.mark.parametrize("add_inputs", [True, False])
def test_the_second_product_is_added_or_set(add_inputs: bool) -> None:
    inputs, weights = torch.randn(6, 3), torch.randn(2, 1, 5, 3)
    product = torch.zeros(6, 5)
    shrink(inputs, weights[:, 0], product, SLOTS)
    product[~WITH_ADAPTER] = 0
    initial = torch.randn(6, 9)
    for apply, columns in (
        (lambda output: bgmv_expand(inputs, weights, output, SLOTS, add_inputs), slice(0, 5)),
        (lambda output: bgmv_expand_slice(inputs, weights, output, SLOTS, 2, 5, add_inputs), slice(2, 7)),
    ):
        output, expected = initial.clone(), initial.clone()
        apply(output)
        expected[:, columns] = product + (initial[:, columns] if add_inputs else 0)
        torch.testing.assert_close(output, expected)


def test_an_output_narrower_than_the_product_gets_its_columns() -> None:
    inputs, weights, output = torch.randn(6, 3), torch.randn(2, 5, 3), torch.zeros(6, 4)
    expected = torch.zeros(6, 5)
    bgmv_expand(inputs, weights, output, SLOTS)
    bgmv_expand(inputs, weights, expected, SLOTS)
    assert torch.equal(output, expected[:, :4])


def test_the_fault_is_detected_and_its_repair_is_not() -> None:
    assert is_faulty(shrink)
    assert not is_faulty(bgmv_shrink)
