"""What each admission check and each of its figures means, in one line: the same words on every screen and page."""

MEANS = {
    "source": "parses, is small, imports and calls only what an environment needs",
    "runs": "two seeds come through reset, step, score and oracle in two processes",
    "determinism": "the same seed gives the same bytes, also in another process and among other episodes",
    "oracle": "its own oracle ends every probed seed with reward 1 and success",
    "diversity": "seeds differ, and in more than names, ids and numbers",
    "floor": "policies that do not try stay at the floor",
    "exploits": "policies that want reward without work stay below the pass mark",
    "slips": "the oracle's play with one slip in it, a call left out or an argument changed, is not paid in full",
    "interface": "tools and the form of errors are those of the target, and every call gets its answer",
    "leak": "neither prompt nor answers tell the oracle's calls, and no argument is one that nobody was told",
    "latency": "reset and step are quick",
    "effects": "no file, socket, process or thread was touched, nothing printed",
    "spread": "the base model's rewards leave room to learn, and differ within groups",
}


def means(name: str) -> str:
    """One line; empty for a check that this version does not know."""
    return MEANS.get(name, "")


NOTES = {  # of the figures whose names do not say it all
    "scripts": "series of messages that were played in every way",
    "worn_by": "episodes played before the last comparison",
    "failed": "seeds that the oracle does not solve",
    "unearned": "seeds on which an agent that does as the oracle is not paid",
    "mean_turns": "messages that the oracle needs",
    "distinct": "share of seeds with an episode of their own",
    "shapes": "structures, once names, ids and numbers are masked",
    "shape_fraction": "structures by seeds",
    "commonest_shape": "share of seeds that have the commonest structure",
    "ways": "forms of what has to be done, wording apart",
    "usual_way": "share of seeds that have the commonest of these forms",
    "action_sequences": "orders in which the oracle uses the tools",
    "reward": "mean",
    "success": "share of episodes",
    "faults": "share of episodes that broke the environment",
    "solved": "share of episodes that did just what was asked; not counted as rewarded",
    "more_seeds": "on which policies over a bound were played again, and are judged",
    "paid": "greatest share of seeds on which one kind of slip is paid in full",
    "slips": "that were played",
    "kinds": "of slips that were made on seeds enough to judge them",
    "too_rare": "kinds that were not",
    "junk_seeds": "played by a clumsy agent",
    "share": "of seeds on which the oracle's calls are told too early",
    "unseen": "share of seeds on which the oracle uses a code that nobody was told",
    "worked_out": "share of seeds with a number or word that an agent must work out, or that is hidden",
    "reset_p95": "seconds, 95th percentile",
    "step_p95": "seconds, 95th percentile",
    "played": "times, until quick enough; of each call the quickest counts",
    "groups": "seeds that the base model played",
    "rollouts": "K, its episodes on each of these seeds",
    "mean": "its mean reward",
    "mixed": "share of groups whose rewards differ: no others teach",
    "all_success": "share of groups in which every episode has reward 1",
    "all_zero": "share of groups in which every episode has reward 0",
}
