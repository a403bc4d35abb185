"""The command attribute: why the live system failed, and which retained capabilities are trained."""

from typing import Any

from rich.table import Table

from store.repositories.cycles import WATCH, list_stage_events
from store.types import JsonObject
from traced.cli.current_cycle import on_cycle
from traced.cli.options import AsJson, DataDir, Model, Overrides, Seed, Threads, read_settings
from traced.cli.output import console, print_json
from traced.core.errors import TracedError
from traced.pipeline.analyze import stored_findings
from traced.pipeline.attribute import attribute as attribute_stage
from traced.pipeline.attribution import ATTRIBUTE, Kind
from traced.pipeline.context import Context


def attribute(
    *,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Play failed tasks again with each live adapter, and decide which retained capabilities are trained."""
    settings = read_settings(data_dir, overrides, model__spec=model, seed=seed, engine__threads=threads)
    to_train, detail = on_cycle(settings, _attribute)
    if as_json:
        print_json({"train": to_train, **{key: detail.get(key, []) for key in ("kinds", "closed", "misrouted", WATCH)}})
        return
    if not detail:
        console.print("The base model alone is live: all retained capabilities are trained.", highlight=False)
    else:
        console.print(_table(detail["kinds"]))
    texts = [
        *(f"Closed: {row['capability']}, whose adapter {row['adapter']} is live" for row in detail.get("closed", [])),
        *(f"Not trained again: {name} ({text})" for name, text in detail.get("not_residual", {}).items()),
        *(f"Left aside: {name}, {text}" for name, text in detail.get("left_aside", {}).items()),
        f"To train: {', '.join(to_train) or 'nothing'}",
    ]
    for text in texts:
        console.print(text, highlight=False, markup=False)
    if to_train:
        console.print("Next: traced synthesize", highlight=False)


async def _attribute(context: Context) -> tuple[list[str], JsonObject]:
    findings = stored_findings(context)
    if not findings:
        raise TracedError(f"cycle {context.cycle_id} was not analysed yet", hint="traced analyze")
    to_train = await attribute_stage(context, [finding.capability for finding in findings if finding.retained])
    with context.read_session() as session:
        events = [event for event in list_stage_events(session, context.cycle_id) if event.stage == ATTRIBUTE]
    return to_train, events[-1].detail if events else {}


def _table(kinds: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="Failures by the capability that they lacked", title_justify="left")
    table.add_column("capability")
    for kind in Kind:
        table.add_column(kind.value, justify="right")
    for name, counts in kinds.items():
        table.add_row(name, *(str(counts.get(kind.value, "")) for kind in Kind))
    return table
