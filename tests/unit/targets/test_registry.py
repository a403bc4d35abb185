import pytest

from traced.config.settings import load_settings
from traced.core.errors import ConfigError
from traced.targets.registry import check_seeds, target


def test_the_defaults_fit() -> None:
    check_seeds(target("desk"), load_settings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"collect.episodes": 100_001}, "collect.episodes is 100001, but the train split of desk has 100000 seeds"),
        ({"gate.seeds": 20_000, "gate.max_rounds": 3}, "gate.seeds times gate.max_rounds is 60000"),
        ({"test.seeds": 10_000_000}, "the test split of desk has"),
    ],
)
def test_no_split_runs_into_the_next(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_seeds(target("desk"), load_settings(overrides=settings))
