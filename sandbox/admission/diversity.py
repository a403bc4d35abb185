"""Whether seeds make different tasks, or one task in many numbers or many words."""

from collections import Counter

from sandbox.admission.bench import Bench
from sandbox.admission.evidence import Verdict, example
from sandbox.admission.fingerprint import actions, exact, shape
from sandbox.admission.ways import way


async def diversity(bench: Bench) -> Verdict:
    """Different seeds differ in more than names, ids and numbers, and in what has to be done beside the wording."""
    limits = bench.thresholds
    plays = await bench.oracle_plays(limits.diversity_seeds)
    shapes, ways = [shape(one) for one in plays], [way(one) for one in plays]
    distinct = len({exact(one) for one in plays}) / len(plays)
    (most, held_by), (usual, taken_by) = (Counter(found).most_common(1)[0] for found in (shapes, ways))
    evidence = {
        "seeds": len(plays),
        "distinct": round(distinct, 3),
        "distinct_required": limits.distinct,
        "shapes": len(set(shapes)),
        "shape_fraction": round(len(set(shapes)) / len(plays), 3),
        "shapes_required": limits.distinct_shapes,
        "commonest_shape": round(held_by / len(plays), 3),
        "commonest_allowed": limits.commonest_shape,
        "ways": len(set(ways)),
        "ways_required": limits.distinct_ways,
        "usual_way": round(taken_by / len(plays), 3),
        "usual_allowed": limits.usual_way,
        "action_sequences": len({actions(one) for one in plays}),
    }
    varied = distinct >= limits.distinct and len(set(shapes)) >= limits.distinct_shapes
    varied = varied and held_by / len(plays) <= limits.commonest_shape
    if varied and len(set(ways)) >= limits.distinct_ways and taken_by / len(plays) <= limits.usual_way:
        return True, evidence
    what = f"one of the {held_by} of {len(plays)} seeds that are alike once names, ids and numbers are masked"
    alike = [at for at, one in enumerate(shapes) if one == most]
    if varied:
        what = f"one of the {taken_by} of {len(plays)} seeds on which the same has to be done"
        alike = [at for at, one in enumerate(ways) if one == usual]
    seeds = bench.panel(len(plays))
    examples = [example(seeds[at], what, plays[at].task, bench.chat(plays[at])) for at in alike[:2]]
    return False, {**evidence, "examples": examples}
