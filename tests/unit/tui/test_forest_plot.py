"""The forest plot: for any figures, each row fits the width and marks where its interval lies."""

from hypothesis import example, given
from hypothesis import strategies as st

from traced.client.approvals import Answer, ComparisonView
from tui.widgets.forest_plot import plot

POINTS = st.floats(-1, 1, allow_nan=False)


def comparison(low: float, middle: float, high: float, required: float, name: str = "target") -> ComparisonView:
    answer: Answer = "pass" if low > required else "fail" if high < required else "inconclusive"
    return ComparisonView(
        name=name,
        seeds=200,
        base=0.4,
        adapter=0.5,
        difference=middle,
        low=low,
        high=high,
        level=0.95,
        required=required,
        answer=answer,
    )


def test_signs_tell_where_the_interval_lies() -> None:
    rows = [
        comparison(0.1, 0.2, 0.3, 0.0),
        comparison(-0.3, -0.2, -0.1, 0.0, "environment"),
        comparison(-0.1, 0.1, 0.3, 0.05),
    ]
    head, *lines, axis, key = plot(rows, 78).plain.splitlines()
    assert head.split() == ["adapter", "−", "base,", "points", "change", "interval", "needs", "seeds"]
    assert [row[0] for row in lines] == ["✓", "✗", "?"]
    passed, failed, open_ = (row[13:45] for row in lines)
    assert passed.index("┃") < passed.index("├") < passed.index("●") < passed.index("┤")
    assert failed.index("┤") < failed.index("┃")
    assert open_.index("├") < open_.index("╂") < open_.index("┤")
    assert "0" in axis
    assert key.strip().startswith("├──●──┤ interval")
    assert lines[0].endswith("+20.0  [+10.0, +30.0]    > 0    200")


def test_a_bound_that_is_cleared_by_less_than_a_character_stands_beside_the_interval() -> None:
    [_, row, *_] = plot([comparison(0.0001, 0.5, 1.0, 0.0)], 60).plain.splitlines()
    assert row.index("┃") < row.index("├")


@example([((0.0, 0.0, 0.0), 1.3e-306)], 60)
@given(
    st.lists(st.tuples(st.tuples(POINTS, POINTS, POINTS), POINTS), min_size=1, max_size=4),
    st.integers(60, 220),
)
def test_any_figures_fit(figures: list[tuple[tuple[float, float, float], float]], width: int) -> None:
    rows = [comparison(min(values), sorted(values)[1], max(values), required) for values, required in figures]
    lines = plot(rows, width).plain.splitlines()
    assert len(lines) == len(rows) + 3
    for row in lines[1:-2]:
        assert "●" in row
        assert len(row) <= max(width, 72)


def test_nothing_compared_is_nothing_shown() -> None:
    assert plot([], 80).plain == ""
