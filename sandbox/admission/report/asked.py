"""What each check asks of an environment, with its numbers: for whoever writes one before anything is checked."""

from sandbox.admission.report.meanings import MEANS
from sandbox.admission.report.measured import shown
from sandbox.admission.thresholds import Thresholds


def asked(thresholds: Thresholds) -> dict[str, str]:
    """Check -> its meaning and its bounds, in the order of the checks."""
    one = thresholds
    least, most = shown(one.spread_low), shown(one.spread_high)
    numbers = {
        "oracle": f"on each of {one.seeds} seeds",
        "diversity": (
            f"of {one.diversity_seeds} seeds at least {shown(one.distinct)} give an episode of their own; once names, "
            f"ids and numbers are masked there are at least {one.distinct_shapes} structures, none with more than "
            f"{shown(one.commonest_shape)} of the seeds"
        ),
        "floor": f"mean reward at most {shown(one.floor_reward)}, successes at most {shown(one.floor_success)}",
        "exploits": f"mean reward at most {shown(one.exploit_reward)}, successes at most {shown(one.exploit_success)}",
        "slips": f"each kind of slip at most on {shown(one.slips_paid)} of the seeds it is made on",
        "leak": f"on at most {shown(one.leaking)} of the seeds, and unseen arguments on at most {shown(one.unseen)}",
        "latency": f"95 of 100 resets within {shown(one.reset_seconds)} s, steps within {shown(one.step_seconds)} s",
        "spread": f"mean reward within {least} and {most}, at least {shown(one.spread_mixed)} of the groups mixed",
    }
    return {name: f"{means}{f' ({numbers[name]})' if name in numbers else ''}" for name, means in MEANS.items()}
