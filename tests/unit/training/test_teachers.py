"""Log-probs under teachers, and the adapters that can be one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.unit.training.tiny import save_model
from traced.training.adapter_folder import save_adapter
from traced.training.errors import JobError
from traced.training.teachers import Teachers

Rows = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"))


def peft_model(base: Path, seed: int, rank: int = 4) -> Any:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=rank, lora_alpha=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"),
    )
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def adapter_folder(base: Path, folder: Path, seed: int, rank: int = 4) -> Path:
    save_adapter(peft_model(base, seed, rank), folder)
    return folder


def token_logprobs(model: Any, rows: Rows) -> torch.Tensor:
    logits = model(input_ids=rows["completion_ids"]).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(-1, rows["completion_ids"][:, 1:, None])[..., 0]


def test_each_row_has_the_log_probs_of_the_teacher_of_its_seed(base: Path, tmp_path: Path) -> None:
    folders = [adapter_folder(base, tmp_path / str(seed), seed) for seed in (1, 2)]
    policy = peft_model(base, 3)
    teachers = Teachers(folders, policy)
    numbers = teachers.column([4, 7, 9, 12])
    assert numbers.tolist() == [0, 1, 1, 0]
    ids = torch.arange(24).reshape(4, 6)
    rows = {"completion_ids": ids, "teacher": numbers, "old_per_token_logps": torch.zeros(4, 5)}
    policy_weights = [parameter.clone() for parameter in policy.parameters()]
    result = teachers.logprobs(policy, rows, lambda chunk: token_logprobs(policy, chunk))
    assert all(map(torch.equal, policy_weights, policy.parameters()))
    assert policy.training
    with torch.no_grad():
        expected = torch.stack(
            [
                token_logprobs(peft_model(base, 1 + int(n)).eval(), {"completion_ids": ids})[i]
                for i, n in enumerate(numbers)
            ]
        )
    assert torch.allclose(result, expected, atol=1e-5)
    assert not result.requires_grad


def test_an_adapter_of_another_rank_is_no_teacher(base: Path, tmp_path: Path) -> None:
    folder = adapter_folder(base, tmp_path / "wide", 1, rank=8)
    with pytest.raises(JobError, match="wide has other layers or another rank"):
        Teachers([folder], peft_model(base, 3))
    with pytest.raises(JobError, match="cannot be read"):
        Teachers([tmp_path / "missing"], peft_model(base, 3))
