from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from traced.training.trainer import EMPTY_TOKENS, empty_row, micro_batches

sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


def padded(rows: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    p, c = max(r[0] for r in rows) + 2, max(r[1] for r in rows) + 1
    batch: dict[str, Any] = {name: torch.zeros(len(rows), p if name.startswith("prompt") else c) for name in NAMES}
    for i, (prompt, completion) in enumerate(rows):
        batch["prompt_mask"][i, p - prompt :] = 1
        batch["completion_mask"][i, :completion] = 1
        batch["prompt_ids"][i, p - prompt :] = i + 1
        batch["completion_ids"][i, :completion] = i + 1
    batch["advantages"] = torch.arange(len(rows), dtype=torch.float32)
    return batch


NAMES = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


@given(rows=sizes, tokens=st.integers(1, 60))
def test_every_row_appears_once_within_the_budget_and_keeps_its_tokens(
    rows: list[tuple[int, int]], tokens: int
) -> None:
    seen_rows = []
    for chunk in micro_batches(padded(rows), lambda: tokens):
        count, width = chunk["prompt_ids"].shape[0], chunk["prompt_ids"].shape[1] + chunk["completion_ids"].shape[1]
        assert count == 1 or count * width <= tokens
        for k, index in enumerate(int(a) for a in chunk["advantages"]):
            assert int(chunk["prompt_mask"][k].sum()) == rows[index][0]
            assert int(chunk["completion_mask"][k].sum()) == rows[index][1]
            assert int((chunk["prompt_ids"][k] == index + 1).sum()) == rows[index][0]
            assert int((chunk["completion_ids"][k] == index + 1).sum()) == rows[index][1]
            seen_rows.append(index)
    assert sorted(seen_rows) == list(range(len(rows)))


def test_an_empty_row_has_all_columns_and_no_token_of_the_policy() -> None:
    batch = padded([(3, 4), (2, 5)]) | {"tool_mask": torch.ones(2, 5), "old_per_token_logps": torch.full((2, 5), -1.0)}
    for rows in (batch, {name: values[:0] for name, values in batch.items()}):
        row = empty_row(rows)
        assert row.keys() == batch.keys()
        assert row["prompt_ids"].shape[1] + row["completion_ids"].shape[1] == EMPTY_TOKENS
        assert all(len(values) == 1 for values in row.values())
        assert int(row["tool_mask"].sum()) == int(row["advantages"].sum()) == 0
        assert int(row["prompt_mask"].sum()) == int(row["completion_mask"].sum()) == 1
