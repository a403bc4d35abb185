import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traced.training.trainer import EPSILON, group_advantages

rewards = st.lists(st.floats(0, 1), min_size=4, max_size=4)


def test_the_deviation_is_the_populations() -> None:
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0], 4)
    sigma = math.sqrt(0.25 * 0.75)
    assert advantages.values.tolist() == pytest.approx([0.75 / (sigma + EPSILON)] + [-0.25 / (sigma + EPSILON)] * 3)


@given(st.lists(rewards, min_size=1, max_size=5))
def test_kept_groups_have_mean_zero_and_about_unit_deviation(groups: list[list[float]]) -> None:
    advantages = group_advantages([r for group in groups for r in group], 4)
    for index, group in enumerate(groups):
        values = advantages.values[4 * index : 4 * index + 4].tolist()
        group_mask = advantages.mask[4 * index : 4 * index + 4].tolist()
        assert group_mask == [max(group) - min(group) > 1e-6] * 4
        if group_mask[0] and max(group) - min(group) > 0.1:
            assert sum(values) == pytest.approx(0, abs=1e-4)
            assert sum(v * v for v in values) / 4 == pytest.approx(1, abs=0.01)
        if not group_mask[0]:
            assert values == [0.0] * 4


def test_identical_and_lost_groups_are_discarded() -> None:
    advantages = group_advantages([0.5, 0.5, 1.0, None, 0.0, 1.0], 2)
    assert advantages.mask.tolist() == [False, False, False, False, True, True]
    assert advantages.values[:4].tolist() == [0.0] * 4
    assert advantages.mixed_groups == 1
