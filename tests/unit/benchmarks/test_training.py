import json
import math
import random
from typing import Any

import pytest
from transformers.utils import get_json_schema

from benchmarks.stock_trl import SORTED_TOOLS, AlternatingDesk, StockDesk, ToolDesk, desk_reward, desk_seed
from benchmarks.training import Interval, RecordedLoad, Run, comparison, overlap_share, verdict
from traced.targets.desk.environment import demonstrator
from traced.targets.desk.scenario import scenario


def test_the_share_of_waiting_that_is_worked() -> None:
    assert overlap_share([(1.0, 2.0), (3.0, 5.0)], [(0.0, 4.0)]) == 0.5
    assert overlap_share([(0.0, 10.0)], [(1.0, 2.0), (4.0, 6.0)]) == 1.0
    assert overlap_share([(2.0, 3.0)], [(0.0, 1.0), (5.0, 6.0)]) == 0.0
    assert overlap_share([], [(0.0, 1.0)]) == 0.0
    assert math.isnan(overlap_share([(0.0, 1.0)], []))


def intervals(rng: random.Random) -> list[Interval]:
    points = sorted(rng.sample(range(60), 2 * rng.randrange(1, 8)))
    return [(float(a), float(b)) for a, b in zip(points[::2], points[1::2], strict=True)]


def test_the_share_agrees_with_counting_single_seconds() -> None:
    rng = random.Random(0)
    for _ in range(300):
        work, waiting = intervals(rng), intervals(rng)

        def contains(busy_times: list[Interval], second: int) -> bool:
            return any(start <= second < end for start, end in busy_times)

        seconds = [second for second in range(60) if contains(waiting, second)]
        assert overlap_share(work, waiting) == pytest.approx(sum(contains(work, s) for s in seconds) / len(seconds))


def test_waiting_episodes_are_one_interval() -> None:
    load = RecordedLoad()
    with load.waiting():
        with load.waiting():
            assert load.intervals == []
        assert load.intervals == []
    with load.waiting():
        pass
    assert len(load.intervals) == 2
    assert load.intervals[0][1] <= load.intervals[1][0]


def test_ratios_are_taken_within_a_repetition() -> None:
    # The second repetition ran while the machine was three times as slow.
    pairs = [
        (Run([2.0, 2.0], [1.0, 1.0], [10.0, 12.0]), Run([4.0, 4.0], [3.0, 3.0], [11.0, 11.0])),
        (Run([6.0, 6.0], [1.0, 1.0], [11.0, 11.0]), Run([18.0, 18.0], [2.0, 2.0], [11.0, 11.0])),
        (Run([2.0, 2.0], [1.0, 1.0], [11.0, 11.0]), Run([5.0, 5.0], [3.0, 3.0], [11.0, 11.0])),
    ]
    figures = comparison(pairs, 12)
    assert (figures["ratio"], figures["ratio_range"]) == (2.5, [2.0, 3.0])
    assert (figures["cpu_ratio"], figures["cpu_ratio_range"]) == (3.0, [2.0, 3.0])
    assert figures["traced"]["trajectories_per_s"] == 6.0
    assert figures["traced"]["trajectories_per_s_range"] == [2.0, 6.0]
    assert figures["stock"]["tokens_per_trajectory"] == 11.0


@pytest.mark.parametrize(
    ("ratio", "free", "rounds", "meets"),
    [(1.5, 0.95, 0.5, True), (1.4, 0.95, 0.5, False), (1.5, 0.94, 0.5, False), (1.5, 0.96, 0.95, False)],
)
def test_a_lock_step_engine_must_miss_the_aim(ratio: float, free: float, rounds: float, meets: bool) -> None:
    busy = {"free_running": {"busy_share": free}, "lock_step": {"busy_share": rounds}}
    assert verdict({"stock_trl": {"ratio": ratio}, "busy": busy})["meets"] is meets


def test_the_scenarios_need_no_user() -> None:
    seeds = [desk_seed(seed) for seed in range(100)]
    assert len(set(seeds)) == 100
    assert not any(r.withheld or r.kind == "exchange" for seed in seeds for r in scenario(seed).requests)


def test_both_sides_offer_the_same_tools() -> None:
    # As TRL does: the methods of an instance, in the order of their names.
    names = sorted(name for name in vars(StockDesk) if not name.startswith("_") and name != "reset")
    schemas = [get_json_schema(getattr(StockDesk(ToolDesk), name))["function"] for name in names]
    tools = [tool["function"] for tool in SORTED_TOOLS]
    assert [schema["name"] for schema in schemas] == [tool["name"] for tool in tools]
    for schema, tool in zip(schemas, tools, strict=True):
        assert list(schema["parameters"]["properties"]) == list(tool["parameters"]["properties"])
        assert schema["description"] == tool["description"]


def demonstrated(seed: int) -> list[dict[str, Any]]:
    desk = ToolDesk()
    desk.reset(seed)
    messages = []
    for message in demonstrator(desk, faults={}, rng_seed=0):
        messages.append(message)
        desk.step(message)
    assert desk.score().reward == 1.0
    return messages


def test_stock_episodes_earn_what_ours_do() -> None:
    for seed in range(5):
        messages, environment = demonstrated(seed), StockDesk(ToolDesk)
        environment.reset(seed=seed)
        for call in [call for message in messages for call in message.get("tool_calls") or []]:
            environment._call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        assert desk_reward([messages], [environment]) == [1.0]
        unheard = [{**message, "content": "Goodbye."} for message in messages]
        environment.reset(seed=seed)
        assert desk_reward([unheard], [environment]) == [0.0]


def test_alternating_rewards_differ_within_every_pair() -> None:
    desks = [AlternatingDesk() for _ in range(4)]
    for desk in desks:
        desk.reset(1)
    rewards = [desk.score().reward for desk in desks]
    assert rewards[0] != rewards[1]
    assert rewards == rewards[:2] * 2
