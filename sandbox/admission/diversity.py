"""Whether seeds make different tasks, or one task in many numbers."""

from collections import Counter

from sandbox.admission.bench import Bench
from sandbox.admission.evidence import Verdict, example
from sandbox.admission.fingerprint import actions, exact, shape


async def diversity(bench: Bench) -> Verdict:
    """Different seeds differ, and in more than names, ids and numbers."""
    limits = bench.thresholds
    plays = await bench.oracle_plays(limits.diversity_seeds)
    found = [shape(one) for one in plays]
    shapes = Counter(found)
    distinct = len({exact(one) for one in plays}) / len(plays)
    most, held_by = shapes.most_common(1)[0]
    commonest = held_by / len(plays)
    evidence = {
        "seeds": len(plays),
        "distinct": round(distinct, 3),
        "distinct_required": limits.distinct,
        "shapes": len(shapes),
        "shape_fraction": round(len(shapes) / len(plays), 3),
        "shapes_required": limits.distinct_shapes,
        "commonest_shape": round(commonest, 3),
        "commonest_allowed": limits.commonest_shape,
        "action_sequences": len({actions(one) for one in plays}),
    }
    passed = distinct >= limits.distinct and len(shapes) >= limits.distinct_shapes
    if passed and commonest <= limits.commonest_shape:
        return True, evidence
    what = f"one of the {held_by} of {len(plays)} seeds that are alike once names, ids and numbers are masked"
    alike = [at for at, one in enumerate(found) if one == most][:2]
    seeds = bench.panel(len(plays))
    examples = [example(seeds[at], what, plays[at].task, bench.chat(plays[at])) for at in alike]
    return False, {**evidence, "examples": examples}
