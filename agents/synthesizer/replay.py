"""Write an environment that replays conversations: the builtin synthesizer's runtime, without any new scenario.

Each template is one successful conversation under other identifiers, so an agent that does what was done there solves
it. Held-out conversations make such an environment a test that no training has seen; it is never trained on.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents.synthesizer.builtin import (
    Frame,
    WorldData,
    common_data,
    environment_source,
    extract_all,
    fill,
    is_replayable,
    numbered,
)
from agents.synthesizer.corpus import read_corpus
from agents.synthesizer.renaming import template_of
from agents.synthesizer.scenario_extraction import Template
from agents.transcript import transcripts
from store.types import Outcome, Trajectory

NAME = "replay"  # in the place of a capability


@dataclass(frozen=True)
class Replay:
    """An environment of replayed conversations: its source, and seeds of each task, the id of the target's task."""

    source_code: str
    seeds: Mapping[str, Sequence[int]]


def replay_environment(
    conversations: Sequence[Trajectory],
    further: Sequence[Trajectory],
    *,
    first_seed: int,
    seeds: int,
    target_world: WorldData | None = None,
) -> Replay | None:
    """Return the environment of the successful ones of ``conversations``, None if none of them can be replayed.

    Args:
        further: Other conversations of the target, from which only errors, acknowledgements and the like are learned.
        first_seed: The first seed that may play a task.
        seeds: The seeds of each task.
    """
    successes = sorted((row for row in conversations if row.outcome is Outcome.SUCCESS), key=lambda row: row.id)
    corpus = read_corpus(transcripts([*successes, *further]), {row.id for row in successes})
    frame = Frame(common_data(NAME, corpus), target_world)
    drafts = extract_all(transcripts(successes), corpus)[0]
    drafts = [
        {**draft, "control": False, "reads_first": False}
        for draft in drafts
        if is_replayable(draft, corpus, target_world)
    ]
    templates = fill(drafts, corpus, frame, Counter(), random.Random(NAME))
    if not templates:
        return None
    rows = [{"kind": NAME, "weight": 1.0, "templates": list(range(len(templates)))}]
    data = numbered({**frame.common, "strata": rows, "templates": templates})
    tasks = {row.id: row.task_id for row in successes}
    return Replay(environment_source(data, target_world), _seeds(templates, data, tasks, first_seed, seeds))


def _seeds(
    templates: Sequence[Template], data: dict[str, object], tasks: Mapping[str, str], first_seed: int, seeds: int
) -> dict[str, list[int]]:
    """Return the first ``seeds`` seeds that play each task."""
    task_of_template = [tasks[template["from"][0]] for template in templates]
    seeds_by_task: dict[str, list[int]] = defaultdict(list)
    seed = first_seed
    while any(len(seeds_by_task[task]) < seeds for task in task_of_template):
        task = task_of_template[template_of(data, seed)[0]]
        if len(seeds_by_task[task]) < seeds:
            seeds_by_task[task].append(seed)
        seed += 1
    return dict(sorted(seeds_by_task.items()))
