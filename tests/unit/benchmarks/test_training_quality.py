"""The figures of the ablation of the training's measures."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import training_quality
from benchmarks.training_quality import ending, summary, train_variant
from traced.training.errors import NothingToLearn
from traced.training.job import TrainingJob
from traced.training.metrics import append


def row(variant: str, last: float, best: float, no_gradient: bool = False, capability: str = "dates") -> dict[str, Any]:
    return {
        "variant": variant,
        "capability": capability,
        "mixed_groups": 0.5,
        "iterations_without_gradient": 2,
        "last_environment": last,
        "best_environment": best,
        "last_target": 0.5,
        "best_target": 0.5,
        "no_gradient": no_gradient,
        "curve": {"5": best},
    }


def iteration(number: int, trajectories: int, success: float) -> dict[str, float]:
    return {"iteration": number, "trajectories_kept": trajectories, "success": success, "mixed_groups": 0.5}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(8, 0.5), (0, 0.5), (0, 0.5), (0, 0.5)], True),
        ([(8, 0.5), (0, 0.5), (8, 0.5), (0, 0.5)], False),
        ([(8, 0.5), (0, 1.0), (0, 1.0), (0, 1.0)], False),  # solved
        ([(0, 0.5), (0, 0.5)], False),
    ],
)
def test_a_training_may_end_without_a_gradient(rows: list[tuple[int, float]], expected: bool) -> None:
    metrics = [iteration(number, *values) for number, values in enumerate(rows, 1)]
    count = sum(trajectories == 0 and success < 1 for trajectories, success in rows)
    assert ending(metrics) == {
        "no_gradient": expected,
        "iterations_without_gradient": count,
        "mixed_groups": 0.5,
        "curve": {},
    }


def context_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cycle with one capability, whose trainings and episodes a test replaces."""
    job = TrainingJob("r", "dates", {"target": "t"}, "m", "")
    monkeypatch.setattr(training_quality, "job_in", lambda *_: job)
    monkeypatch.setattr(training_quality, "store_variables", lambda _: {})
    monkeypatch.setattr(training_quality, "get_capability", lambda *_: SimpleNamespace(description=""))
    settings = SimpleNamespace(threads=1)
    return SimpleNamespace(data_dir=tmp_path, cycle_id="c1", settings=settings, read_session=nullcontext)


async def test_a_training_that_finds_nothing_to_learn_from_counts_as_one_without_a_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(job: TrainingJob, *_: object) -> None:
        job.out.mkdir(parents=True)
        # Mixed groups whose gradient was not finite.
        append(job.metrics, iteration(1, 8, 0.5))
        raise NothingToLearn("nothing to learn from")

    async def success(context: object, name: str, adapter: Path | None, environment: str) -> dict[str, float]:
        assert (name, adapter) == ("base", None)
        return {"environment": 0.25, "target": 0.5}

    context = context_of(tmp_path, monkeypatch)
    monkeypatch.setattr(training_quality, "train", fail)
    monkeypatch.setattr(training_quality, "success", success)
    figures = await train_variant(context, "dates", "hash", "fresh")
    assert figures["no_gradient"]
    assert (figures["policy"], figures["iterations"]) == (0, 1)
    assert figures["best_environment"] == figures["last_environment"] == 0.25
    from_disk = await train_variant(context, "dates", "hash", "fresh")
    assert json.dumps(from_disk, sort_keys=True) == json.dumps(figures, sort_keys=True)


async def test_an_answer_to_a_collapse_begins_with_the_best_policy_of_the_collapsed_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    async def train(job: TrainingJob, *_: object) -> SimpleNamespace:
        starts.append((job.start, job.lr, job.iterations))
        job.adapter.mkdir(parents=True)
        append(job.metrics, iteration(1, 8, 0.5))
        return SimpleNamespace(iterations=1, policy=1)

    async def success(*_: object) -> dict[str, float]:
        return {"environment": 0.25, "target": 0.5}

    context = context_of(tmp_path, monkeypatch)
    monkeypatch.setattr(training_quality, "train", train)
    monkeypatch.setattr(training_quality, "success", success)
    for variant in ("after-fast-slow", "after-fast"):
        assert (await train_variant(context, "dates", "hash", variant))["variant"] == variant
    collapsed = str(tmp_path / "variants/fast/dates/adapter")
    assert starts == [("", 1e-2, 30), (collapsed, 5e-3, 10), (collapsed, 1e-2, 10)]


def test_the_validation_is_by_policy() -> None:
    metrics = [iteration(6, 8, 0.5) | {"validation_policy": 5.0, "validation_success": 0.25}]
    assert ending(metrics)["curve"] == {5: 0.25}


@pytest.mark.parametrize(
    ("rows", "meets"),
    [
        ([row("fresh", 0.6, 0.6), row("fresh", 0.8, 0.8), row("recover", 0.7, 0.8)], True),
        ([row("fresh", 0.6, 0.7), row("fresh", 0.8, 0.7), row("recover", 0.5, 0.5)], True),  # in the mean
        ([row("fresh", 0.6, 0.5), row("recover", 0.5, 0.5)], False),
        ([row("fresh", 0.6, 0.6, no_gradient=True), row("recover", 0.5, 0.5)], True),  # without a measure against it
        ([row("fresh", 0.6, 0.6), row("recover", 0.5, 0.5, no_gradient=True)], False),
        ([], False),
    ],
)
def test_the_best_is_compared_with_the_last(rows: list[dict[str, Any]], meets: bool) -> None:
    assert summary(rows, ["fresh", "recover"])["meets"] is meets


def test_figures_are_means_over_the_trainings() -> None:
    rows = [row("fresh", 0.6, 0.6), row("fresh", 0.8, 0.8, capability="tools")]
    figures = summary(rows, ["fresh"])["variants"]["fresh"]
    assert figures["last_environment"] == {"mean": pytest.approx(0.7), "range": [0.6, 0.8]}
    assert figures["validation"] == {5: pytest.approx(0.7)}
    assert figures["iterations_without_gradient"] == 4
    assert {name: part["trainings"] for name, part in figures["capabilities"].items()} == {"dates": 1, "tools": 1}
    assert figures["capabilities"]["tools"]["best_environment"]["mean"] == 0.8


def test_figures_on_record_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []

    async def train_all(settings: int, variant: str, capabilities: list[str]) -> list[dict[str, Any]]:
        runs.append((settings, variant))
        return [row(variant, 0.5, 0.75)]

    monkeypatch.setattr(training_quality, "prepare", lambda seed, *_: seed)
    monkeypatch.setattr(training_quality, "train_all", train_all)

    def run(*options: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["training_quality", f"--into={tmp_path}", "--json", *options])
        assert training_quality.main() == 0
        return dict(json.loads(capsys.readouterr().out))

    run("--seeds=1", "--variants=fresh")
    figures = run("--seeds=2", "--variants=fresh,recover")
    assert runs == [(0, "fresh"), (0, "recover"), (1, "fresh"), (1, "recover")]
    assert figures["variants"]["recover"]["best_target"]["mean"] == row("recover", 0.5, 0.75)["best_target"]
    assert [entry["seed"] for entry in run("--seeds=2", "--variants=fresh")["rows"]] == [0, 1]
    assert len(runs) == 4
    with pytest.raises(SystemExit, match="figures of the settings"):
        run("--seeds=1", "--variants=fresh", "--set=training.lr=0.005")


def test_a_row_is_printed_when_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def train_all(settings: int, variant: str, capabilities: list[str]) -> list[dict[str, Any]]:
        assert ('"variant": "fresh"' in capsys.readouterr().out) == (variant == "recover")
        return [row(variant, 0.5, 0.75)]

    monkeypatch.setattr(training_quality, "prepare", lambda seed, *_: seed)
    monkeypatch.setattr(training_quality, "train_all", train_all)
    monkeypatch.setattr("sys.argv", ["training_quality", f"--into={tmp_path}", "--seeds=1", "--variants=fresh,recover"])
    assert training_quality.main() == 0
