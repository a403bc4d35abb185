"""What each admission check means, in one line: the same words on every screen and page."""

MEANS = {
    "source": "parses, is small, imports and calls only what an environment needs",
    "runs": "two seeds come through reset, step, score and oracle in two processes",
    "determinism": "the same seed gives the same bytes, also in another process and among other episodes",
    "oracle": "its own oracle ends every probed seed with reward 1 and success",
    "diversity": "seeds differ, and in more than names, ids and numbers",
    "floor": "policies that do not try stay at the floor",
    "exploits": "policies that want reward without work stay below the pass mark",
    "interface": "tools and the form of errors are those of the target, and every call gets its answer",
    "leak": "neither prompt nor answers tell the oracle's calls, and no argument is one that nobody was told",
    "latency": "reset and step are quick",
    "effects": "no file, socket, process or thread was touched, nothing printed",
    "spread": "the base model's rewards leave room to learn, and differ within groups",
}


def means(name: str) -> str:
    """One line; empty for a check that this version does not know."""
    return MEANS.get(name, "")
