"""The two plots of a cycle as PNG bytes: training curves, and success by capability before and after.

Invariants: drawn without a display (Agg) and without pyplot's global state; the same figures give the same picture.
Not covered: interactive plots.
"""

import io
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from traced.evaluation import Change

BEFORE, AFTER = "#9aa5b1", "#2364aa"


def training_curves(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> bytes:
    """Mean reward of the rollouts per iteration, one line per capability."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for name, iterations in curves.items():
        axes.plot([i["iteration"] for i in iterations], [i["reward"] for i in iterations], marker=".", label=name)
    axes.set(xlabel="iteration", ylabel="mean reward of the rollouts", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(frameon=False, fontsize="small")
    return _png(figure)


def capability_bars(changes: Mapping[str, Change]) -> bytes:
    """Success on the test tasks that need each capability: base beside routed."""
    figure = Figure(figsize=(7.2, 1.0 + 0.55 * max(len(changes), 1)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(changes))
    values = list(changes.values())
    axes.barh([p - 0.2 for p in places], [c.before for c in values], height=0.36, color=BEFORE, label="base")
    axes.barh([p + 0.2 for p in places], [c.after for c in values], height=0.36, color=AFTER, label="routed")
    axes.set_yticks(list(places), [f"{name} ({c.tasks})" for name, c in changes.items()])
    axes.invert_yaxis()
    axes.set(xlabel="success on test tasks that need it", xlim=(0, 1))
    axes.grid(axis="x", alpha=0.3)
    figure.legend(frameon=False, fontsize="small", loc="outside upper right", ncols=2)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120, metadata={"Software": None})
    return out.getvalue()
