"""A layer's output is PEFT's, whatever adapters the rows of a pass have."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from traced.inference.embedded import lora
from traced.inference.embedded.lora import BASE, RowAdapters, use_in

CONFIGS: dict[str, dict[str, Any]] = {
    "small": {"r": 2, "lora_alpha": 8},
    "large": {"r": 6, "lora_alpha": 6},
    "stable": {"r": 4, "lora_alpha": 8, "use_rslora": True},
    "bias": {"r": 4, "lora_alpha": 8, "lora_bias": True},
}
PLAIN_LORA = ("small", "large", "stable")


class ServedLayer:
    """A linear layer [5 -> 7] with these adapters, and how PEFT itself runs it."""

    def __init__(self, *names: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        configs = {name: LoraConfig(target_modules=["0"], init_lora_weights=False, **CONFIGS[name]) for name in names}
        self.model: Any = get_peft_model(nn.Sequential(nn.Linear(5, 7).to(dtype)), configs[names[0]], names[0])
        for name in names[1:]:
            self.model.add_adapter(name, configs[name])
        self.layer: Any = self.model.eval().base_model.model[0]
        self.of_peft = self.layer.forward
        self.rows = RowAdapters([])
        use_in(self.layer, lambda: self.rows)

    def run(self, x: Tensor, rows: list[str]) -> Tensor:
        self.rows = RowAdapters(rows)
        with torch.inference_mode():
            result: Tensor = self.layer(x)
        return result


@pytest.fixture
def our_passes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs that did not go to PEFT."""
    inputs: list[Tensor] = []
    with_lora = lora._with_lora

    def record(layer: Any, selected: RowAdapters, x: Tensor) -> Tensor:
        inputs.append(x)
        return with_lora(layer, selected, x)

    monkeypatch.setattr(lora, "_with_lora", record)
    return inputs


ROWS = [
    ["small", "small", "small", "small"],
    ["small", BASE, "small", BASE],
    [BASE, BASE, BASE, BASE],
    ["large", "small", BASE, "stable"],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_several_adapters(rows: list[str], dtype: torch.dtype, our_passes: list[Tensor]) -> None:
    target = ServedLayer(*PLAIN_LORA, dtype=dtype)
    x = torch.randn(4, 3, 5, dtype=dtype)
    with torch.no_grad():
        expected = target.of_peft(x, adapter_names=rows)
    result = target.run(x, rows)
    assert result.dtype == dtype
    # In bfloat16 PEFT rounds the product before it adds it.
    torch.testing.assert_close(result, expected, **({} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.01}))
    assert len(our_passes) == 1


def test_a_row_has_the_same_result_beside_other_adapters() -> None:
    target = ServedLayer(*PLAIN_LORA)
    x = torch.randn(4, 3, 5)
    single_results = [target.run(x, [name] * 4)[row] for row, name in enumerate(ROWS[-1])]
    torch.testing.assert_close(target.run(x, ROWS[-1]), torch.stack(single_results))


def test_a_layer_that_an_adapter_does_not_reach() -> None:
    target, x = ServedLayer("small"), torch.randn(2, 3, 5)
    result = target.run(x, ["of another layer", "small"])
    torch.testing.assert_close(result, target.of_peft(x, adapter_names=[BASE, "small"]))


def test_peft_keeps_what_is_not_plain_lora_and_passes_with_a_gradient(our_passes: list[Tensor]) -> None:
    target, x = ServedLayer("bias", "small"), torch.randn(2, 3, 5)
    rows = ["small", "bias"]
    expected = target.of_peft(x, adapter_names=rows)
    torch.testing.assert_close(target.run(x, rows), expected.detach())
    target.rows = RowAdapters(["small", "small"])
    target.model.set_adapter("small")
    target.layer(x).sum().backward()
    assert target.layer.lora_A["small"].weight.grad is not None
    assert our_passes == []


def test_an_adapter_that_overflows_spoils_no_other_row() -> None:
    target, x = ServedLayer("small", "large"), torch.ones(2, 3, 5)
    with torch.no_grad():
        target.layer.lora_A["small"].weight.fill_(3e38)
    outputs = target.run(x, ["small", "large"])
    assert not outputs[0].isfinite().any()
    torch.testing.assert_close(outputs[1], target.run(x, ["large", "large"])[1])
