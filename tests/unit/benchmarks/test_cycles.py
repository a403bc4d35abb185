"""The aims of the benchmark of cycles."""

import pytest

from benchmarks.cycles import row, summary


def figures(successes: list[float], direct: float | None = 0.7) -> dict[str, object]:
    step: dict[str, object] = {"gain": None, "ci": None, "closed": [], "left_aside": {}, "not_residual": {}}
    cycles = [{"cycle": f"c{number}", "success": success, **step} for number, success in enumerate(successes)]
    return {"base": 0.5, "cycles": cycles, "grpo_on_target": direct}


@pytest.mark.parametrize(
    ("successes", "direct", "meets"),
    [
        ([[0.7, 0.72, 0.74], [0.7, 0.7, 0.74]], 0.7, True),
        ([[0.7, 0.72, 0.71], [0.7, 0.72, 0.75]], 0.7, True),  # the mean rises
        ([[0.7, 0.75, 0.74]], 0.7, False),
        ([[0.7, 0.71, 0.72]], 0.7, False),
        ([[0.7, 0.72, 0.74]], 0.8, False),
        ([[0.7, 0.72, 0.74]], None, False),
    ],
)
def test_the_aims(successes: list[list[float]], direct: float | None, meets: bool) -> None:
    rows = [row(seed, figures(values, direct)) for seed, values in enumerate(successes)]
    result = summary(rows, 3)
    assert result["meets"] == meets
    assert result["success"][0]["mean"] == pytest.approx(0.7)
