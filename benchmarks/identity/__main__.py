"""How well the router recognises conversations: a seeded simulation with real clients that knows the truth.

    python -m benchmarks.identity [--users 1000] [--seed 0] [--short] [--json]

A real ``traced serve`` with SQLite and API keys, in front of a scripted engine that answers equal histories equally
(``engine``). Users (``population``, ``personas``) open conversations with 50 openings by Zipf's law through OpenAI's,
LangChain's and Anthropic's libraries; half of them send an id, half none. A version is on a 5 % canary, its control is
the base model. The router is restarted when half of the users are done. The users are the same for a seed; what depends
on time or on random ids (which requests overlap, the arms) is not.

What is counted, by half and persona, from the exchanges in the store (a library's own retries included):
- follow-up: a request of a conversation with answered requests, that carries messages of it or a compaction of them. A
  first message that is edited or regenerated is none, except where the client names the conversation.
- split: a follow-up in another stored conversation than all earlier answered requests of its true conversation. The
  share is of the decidable follow-ups.
- wrong join: a request by which a true conversation enters a stored conversation that another true conversation of the
  same key began; ``joins_across_keys``: one that a conversation of another key began. Each pair counts once, and once
  more as ``entered_by_others`` for the conversation that was entered.
- undecidable: a follow-up without an id that content cannot decide (``evidence``): another conversation of the key has
  the same history word for word, or nothing of the router is left in it. Its errors are counted apart.
- canary: the true conversations on trial whose first answer came from the canary, against the binomial interval at
  99 %. ``share_by_opening``: the least and the greatest share of an opening.
- feedback on a sample of answers, one in four also with another key, which has to get 404. Wrong: ``refused``;
  ``other_key_accepted``; ``elsewhere`` (stored on another conversation than the answer's exchange); ``mixture`` (the
  trajectory has exchanges of another true conversation; ``undecidable_mixture`` where all came by undecidable
  requests); ``judged_without_feedback`` (a trajectory with an outcome of a conversation without an answer in the
  sample). ``judged_branches``, which are not wrong: the same of another branch of a conversation with one.

A sub-agent's dialogue is a true conversation of its own; a request for a summary belongs to the conversation that it
summarises. Requests that a client gave up before the response began have no exchange id and are not placed. Exit code 1
when an aim is missed. Not covered: several routers, expiry after silence, loss of the store.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.identity.judge import COUNTS, figures
from benchmarks.identity.place import open_place
from benchmarks.identity.population import KEYS, capability_share, population
from benchmarks.identity.simulation import simulate

SHORT_USERS = 60


def measure(users: int, seed: int) -> dict[str, Any]:
    """Run the simulation and return its figures."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ti-") as name, open_place(Path(name), list(KEYS)) as place:
        ledger, feedback = asyncio.run(simulate(place, population(users, seed), seed))
        place.stop_router()
        result = figures(ledger, place.read_traffic(), feedback)
    settings = {"users": users, "seed": seed, "capability_share": capability_share()}
    settings["restart_stop_s"] = place.stop_seconds[0]
    return {**settings, **result, "seconds": time.monotonic() - started}


def table(result: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = []
    for half in ("with_ids", "without_ids"):
        heading = "".join(f"{name.replace('_', ' '):>20}" for name in COUNTS)
        lines.append(f"{half:14}{heading}{'split share':>13}")
        for persona, row in {**result[half]["personas"], "all": result[half]["all"]}.items():
            cells = "".join(f"{row[name]:20}" for name in COUNTS)
            lines.append(f"{persona:14}{cells}{row['split_share']:13.2%}")
        lines.append(f"splits by client: {result[half]['splits_by_client']}")
    for half, canary in result["canary"].items():
        low, high = canary["interval"]
        lines.append(
            f"canary {half}: {canary['canary']} of {canary['on_trial']} conversations on trial "
            f"({canary['share']:.1%}), interval {low} to {high}, by opening {canary['share_by_opening']}"
        )
    lines.append(f"the router stopped within {result['restart_stop_s']:.1f} s")
    lines.append("feedback: " + ", ".join(f"{name} {count}" for name, count in result["feedback"].items()))
    for kind, examples in result["examples"].items():
        for example in examples:
            lines.append(f"{kind}: {example['persona']} ({example['client']}, {example['separators']})")
            lines.append(f"    in {example['stored_id']}, earlier {example['earlier_ids']}")
            lines += [f"    its first request: {example['owner']}"] if "owner" in example else []
            lines += [f"    {line}" for line in example["messages"]]
    lines += [f"{'reached' if is_reached else 'MISSED'}: {aim}" for aim, is_reached in result["aims"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.identity", description="Whose conversation it is.")
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help=f"{SHORT_USERS} users")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    result = measure(SHORT_USERS if options.short else options.users, options.seed)
    print(table(result))
    if options.json:
        print(json.dumps(result))
    return 0 if result["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
