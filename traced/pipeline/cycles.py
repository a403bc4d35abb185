"""Find the cycle to continue, or make a new one.

The same target, model, seed and settings name the same unfinished cycle, so repeating a command continues it.
"""

import re
from collections.abc import Callable
from datetime import datetime

from sqlmodel import Session

from store.records import Cycle, CycleState
from store.repositories.cycles import list_cycles, save_cycle
from traced.config.settings import Settings, configuration, with_defaults
from traced.llm.connection import check_model
from traced.pipeline.collect import check_conversations
from traced.pipeline.constant_customer import update_constant_customer
from traced.pipeline.predecessor import current_live_system
from traced.targets.conversation_target import conversation_target
from traced.targets.registry import check_seeds, target


def find_cycle(
    session: Session,
    settings: Settings,
    model: str,
    *,
    at: datetime,
    accepts: Callable[[Cycle], bool] | None = None,
    rejects: Callable[[Cycle], bool] = lambda _: False,
) -> Cycle:
    """Return the newest unfinished cycle of this target, model, seed and configuration, else a new one.

    Args:
        accepts: Whether a cycle that has ended is accepted too.
        rejects: Whether an unfinished cycle is not accepted.

    Raises:
        StageError: A new cycle of a recorded target would have too few judged conversations.
    """
    cycle_target = target(settings)
    check_seeds(cycle_target, settings)
    config = configuration(settings)
    earlier_cycles = [
        cycle
        for cycle in list_cycles(session, target=settings.target.name)
        if (cycle.model, cycle.seed) == (model, settings.seed)
    ]
    open_states = (CycleState.RUNNING, CycleState.WAITING, CycleState.INTERRUPTED)
    for cycle in earlier_cycles:
        if with_defaults(cycle.config) == config and (
            (cycle.state in open_states and not rejects(cycle)) or (accepts is not None and accepts(cycle))
        ):
            return cycle
    # Before the cycle is stored: a missing model should fail now, not hours later in a stage.
    check_model(settings)
    if cycle_target.is_recorded:
        # A cycle without enough conversations would stay unfinished, and the service would take it up.
        update_constant_customer(session, conversation_target(settings))
        check_conversations(session, cycle_target.name, current_live_system(session, model, settings))
    cycle_id = (
        f"{settings.target.name}-{re.sub(r'[^A-Za-z0-9._]+', '_', model)}-{settings.seed}-{len(earlier_cycles) + 1}"
    )
    cycle = Cycle(cycle_id, settings.target.name, model, settings.seed, config, CycleState.RUNNING, at)
    save_cycle(session, cycle)
    return cycle
