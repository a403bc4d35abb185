"""Verbs that only look: status, explain."""

from typing import TYPE_CHECKING, Any

from traced.commands.decide import Adapter
from traced.commands.options import AsJson, DataDir, Given, read_settings
from traced.commands.output import console, print_json

if TYPE_CHECKING:
    from sqlmodel import Session

CYCLES_SHOWN = 10


def status(data_dir: DataDir = None, given: Given = None, as_json: AsJson = False) -> None:
    """Show the cycles, what waits for a decision, and what is live."""
    from traced.commands.stored import looking

    settings = read_settings(data_dir, given)
    with looking(settings) as opened:
        told = {"data_dir": settings.data_dir, **_standing(opened)}
    if as_json:
        print_json(told)
        return
    _table("Cycles", ["cycle", "target", "model", "state", "last stage"], told["cycles"])
    _table("Adapters", ["adapter", "gate", "decision", "traffic", "conversations"], told["adapters"])
    for name in told["waiting"]:
        console.print(f"Waits for a decision: traced explain {name}, then traced approve {name}", highlight=False)


def explain(adapter: Adapter, data_dir: DataDir = None, given: Given = None, as_json: AsJson = False) -> None:
    """Print the whole chain of evidence behind an adapter."""
    from store.repositories.evidence import evidence_chain
    from traced.commands.chain import chain_lines
    from traced.commands.stored import looking

    with looking(read_settings(data_dir, given)) as opened:
        chain = evidence_chain(opened, adapter)
    if as_json:
        print_json(chain)
        return
    for line in chain_lines(chain):
        console.print(line, highlight=False, markup=False)


def _standing(session: "Session") -> dict[str, Any]:
    from store.repositories.adapters import list_adapters
    from store.repositories.cycles import list_cycles, list_stage_events
    from store.repositories.gates import latest_gate
    from store.repositories.promotions import latest_approval
    from store.repositories.routing import traffic
    from traced.gates.promotion import live, undecided

    cycles = []
    for cycle in list_cycles(session, limit=CYCLES_SHOWN):
        events = list_stage_events(session, cycle.id)
        last = f"{events[-1].stage} {events[-1].state}" if events else ""
        cycles.append(
            {"cycle": cycle.id, "target": cycle.target, "model": cycle.model, "state": cycle.state, "last stage": last}
        )
    names = [version.name for version in list_adapters(session)]
    taking, conversations = live(session), traffic(session)
    adapters = []
    for name in names:
        gate, decided = latest_gate(session, name), latest_approval(session, name)
        adapters.append(
            {
                "adapter": name,
                "gate": gate.result.answer if gate else "none",
                "decision": decided.decision if decided else "none",
                "traffic": "live" if name in taking else "no",
                "conversations": conversations.get(name, 0),
            }
        )
    return {"cycles": cycles, "adapters": adapters, "live": taking, "waiting": undecided(session, names)}


def _table(title: str, columns: list[str], rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)
