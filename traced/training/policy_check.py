"""Recompute the log-probs of sampled tokens under the weights that may have sampled them, for ``drift``.

Invariants: the adapter's weights are the same bits after a measurement as before, and no random number is drawn, so
training is the same with and without it. Works on sharded weights too, if all processes measure the same rows.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from traced.training.drift import EXPLANATIONS, EngineTokens, Values, choose_rows

Weights = list[Tensor]
Batch = dict[str, Tensor]
LogProbs = Callable[[Batch], Iterable[tuple[Batch, Tensor]]]


class PolicyHistory:
    """The adapter's weights at the beginning of the last iterations, counted from 0, in host memory."""

    def __init__(self, length: int) -> None:
        self._weights: deque[tuple[int, Weights]] = deque(maxlen=length)

    def record(self, iteration: int, model: Any) -> None:
        """Keep a copy of the weights that ``model`` has at the beginning of an iteration."""
        self._weights.append((iteration, _in_host_memory(_adapter_parameters(model))))

    def weights(self, iteration: int) -> Weights | None:
        """Return the weights of an iteration; None if they are not kept, as after a resume."""
        return next((weights for number, weights in self._weights if number == iteration), None)


@contextlib.contextmanager
def with_weights(model: Any, weights: Weights) -> Iterator[None]:
    """Give the adapter other weights during the block."""
    parameters = _adapter_parameters(model)
    current = _in_host_memory(parameters)
    _set(parameters, weights)
    try:
        yield
    finally:
        _set(parameters, current)


@dataclass(frozen=True)
class MeasuredRows:
    """Rows of a batch, the engine of each token, and the iteration whose adapter should have sampled them.

    Args:
        rows: The columns of the batch, and ``engine_ids`` [n, c]: positions in ``engines``, -1 for other tokens.
    """

    rows: Batch
    engines: list[str]
    policy: int


def select_rows(batch: Batch, servers: Sequence[Sequence[str]], policy: int, tokens: int) -> MeasuredRows:
    """Return complete rows of every engine with about ``tokens`` tokens each; other places in other iterations.

    Args:
        servers: Per row, per completion token, the engine that sampled it.
        policy: The iteration whose adapter should have sampled.
    """
    if "is_off_policy" in batch:
        # Their log-probs are not those of the sampling policy.
        own_rows = (~batch["is_off_policy"]).nonzero().flatten().tolist()
        batch, servers = {name: values[own_rows] for name, values in batch.items()}, [servers[row] for row in own_rows]
    is_sampled = (batch["completion_mask"] * batch["tool_mask"]).bool()
    lengths = (batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)).tolist()
    places = [row.nonzero().flatten().tolist() for row in is_sampled]
    of_row = [[row[place] for place in row_places] for row, row_places in zip(servers, places, strict=True)]
    engines = sorted({server for row in of_row for server in row})
    engine_ids = torch.full(is_sampled.shape, -1, device=is_sampled.device)
    for row, (row_places, row_servers) in enumerate(zip(places, of_row, strict=True)):
        numbers = [engines.index(server) for server in row_servers]
        engine_ids[row, row_places] = torch.tensor(numbers, device=engine_ids.device, dtype=engine_ids.dtype)
    rows = choose_rows(of_row, lengths, tokens, seed=policy)
    columns = {name: values[rows] for name, values in (batch | {"engine_ids": engine_ids}).items()}
    return MeasuredRows(columns, engines, policy)


def measure(
    peft_model: Any, history: PolicyHistory, measured_rows: MeasuredRows, logprobs: LogProbs
) -> list[EngineTokens]:
    """Recompute the rows' log-probs under the adapter, the adapter before it and the base; return them by engine.

    Args:
        logprobs: Runs the model, as it is then, on rows in chunks; yields each chunk with the log-probs [n, c] of its
            sampled tokens, 0 elsewhere.
    """

    def columns(name: str) -> dict[str, Values]:
        values: dict[str, list[Tensor]] = {"engine_ids": [], "old_per_token_logps": [], name: []}
        for chunk, chunk_logprobs in logprobs(measured_rows.rows):
            mask = chunk["engine_ids"] >= 0
            for key, tensors in values.items():
                tensors.append((chunk_logprobs if key == name else chunk[key])[mask])
        return {key: torch.cat(tensors).double().cpu().numpy() for key, tensors in values.items()}

    if not measured_rows.engines:
        return []
    table: dict[str, Values] = {}
    # Dropout would draw random numbers.
    peft_model.eval()
    try:
        with torch.no_grad():
            for name, iteration in (("adapter", measured_rows.policy), ("previous", measured_rows.policy - 1)):
                weights = history.weights(iteration)
                if weights is not None:
                    with with_weights(peft_model, weights):
                        table |= columns(name)
            with peft_model.disable_adapter():
                table |= columns("base")
    finally:
        peft_model.train()
    return _by_engine(table, measured_rows.engines)


def _by_engine(table: dict[str, Values], engines: Sequence[str]) -> list[EngineTokens]:
    tokens = []
    for number, url in enumerate(engines):
        at = table["engine_ids"] == number
        alternatives = {name: table[name][at] for name in EXPLANATIONS if name in table}
        tokens.append(EngineTokens(url, table["old_per_token_logps"][at], table["adapter"][at], alternatives))
    return [engine for engine in tokens if len(engine.sampled)]


def _adapter_parameters(model: Any) -> Weights:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _in_host_memory(parameters: Weights) -> Weights:
    # The adapter of a mixture of experts has gigabytes, which a GPU needs for its passes.
    return [parameter.detach().to("cpu", copy=True) for parameter in parameters]


@torch.no_grad()
def _set(parameters: Weights, weights: Weights) -> None:
    for parameter, value in zip(parameters, weights, strict=True):
        parameter.copy_(value)
