"""The builtin synthesizer: an environment for a capability, lifted from the target's own recorded conversations.

Invariants: reads ``Trajectory.messages``, ``tools`` and ``outcome`` and the labels, nothing else; the same input and
seed give the same bytes; every template's recorded solution reached reward 1 on several seeds before it was written.
Sources are successes in which the capability was exercised (by majority over the labelling runs); failures that lacked
it, here and elsewhere, say which kinds of request come up most. Fails with ``SynthesisError`` when too few
conversations can be lifted.

Not covered: targets whose users must be simulated freely, and tools that compute.

Writes the single file of an environment: its data as JSON, then the runtime's own source.

Invariants: the same data gives the same bytes; the file imports the standard library and ``sandbox.contract`` only, and
defines ``Environment``. Template lines are one each, so that a person can read and compare them.
"""

import inspect
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agents.errors import SynthesisError
from agents.synthesizer import renaming, response_templates, runtime
from agents.synthesizer.composition import compose, is_compound, manner_of
from agents.synthesizer.corpus import Corpus, read_corpus
from agents.synthesizer.counterfactuals import twins
from agents.synthesizer.generalization import generalise
from agents.synthesizer.runtime import TemplateEnvironment
from agents.synthesizer.scenario_extraction import Template, Unliftable, calls_of, lift
from agents.synthesizer.selection import in_turn, strata
from agents.transcript import Transcript, transcripts
from store.types import Capability, Label, Outcome, Trajectory, Verdict

_LOCAL_IMPORT = re.compile(r"^from agents\.synthesizer\.\w+ import [^\n]*\n", re.MULTILINE)


def environment_source(data: dict[str, Any]) -> str:
    """The file's text; ``data`` holds JSON values only."""
    about = (
        f"Synthetic environment for the capability {data['capability']}: {len(data['templates'])} scenario templates."
    )
    return (
        f'"""{about}\n\nWritten by the builtin synthesizer from recorded conversations; the data comes first, then the'
        ' runtime that\nevery such environment shares.\n"""\n\nimport json\n\n'
        f"DATA = json.loads(r'''\n{_json(data)}\n''')\n\n\n"
        f"# --- renaming ---\n{_LOCAL_IMPORT.sub('', inspect.getsource(renaming))}\n\n"
        f"# --- runtime ---\n{_LOCAL_IMPORT.sub('', inspect.getsource(runtime))}\n\n"
        "class Environment(TemplateEnvironment):\n"
        '    """This file\'s environment: the shared runtime over this file\'s data."""\n\n'
        "    def __init__(self) -> None:\n        super().__init__(DATA)\n"
    )


def _json(data: dict[str, Any]) -> str:
    """JSON, one line per field and per entry of a list field; quotes that would end the literal are escaped."""
    rows = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in value)
            rows.append(f"{json.dumps(key)}: [\n{lines}\n]")
        else:
            rows.append(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}")
    return ("{\n" + ",\n".join(rows) + "\n}").replace("'", "\\u0027")


MINIMUM_TEMPLATES = 8
ROOM = 190_000  # bytes of template JSON; admission takes files up to 256 KiB
_COMPOUND_SHARE = 0.6  # above it, the capability is about several requests at once
_PROBES = 6  # seeds on which every template's recorded solution is replayed
_COMPOSITIONS = 150
_CONTROLS = 30
_USUAL = 0.15  # share of the sources that write with a tool


@dataclass(frozen=True)
class _Sources:
    present: list[Transcript]
    lucky: list[Transcript]  # present as well, but another capability was lacking
    unread: list[Transcript]  # succeeded without it
    controls: list[Transcript]
    lacking: list[Transcript]


def synthesize(
    capability: Capability,
    trajectories: Sequence[Trajectory],
    labels: Sequence[Label],
    *,
    seed: int,
    asked: Sequence[str] = (),
) -> str:
    """The source text of a single-file environment for ``capability``.

    ``asked`` are openings of failures that lacked it and are not among ``trajectories``; no word of them is written.
    Raises ``SynthesisError`` when fewer than ``MINIMUM_TEMPLATES`` conversations give a template that can be solved.
    """
    rng = random.Random(f"synthesize:{capability.name}:{seed}")
    kept = sorted((t for t in trajectories if t.outcome.is_judged), key=lambda t: t.id)
    sources = _sources(kept, labels, capability.name)
    corpus = read_corpus(transcripts(kept), {t.trajectory_id for t in [*sources.present, *sources.controls]})
    lifted, refused = _lift_all(sources.present, corpus)
    if len(lifted) < MINIMUM_TEMPLATES:
        lifted += _lift_all(sources.lucky, corpus)[0]
    reads_first = _needs_reads(capability)
    if reads_first:
        lifted += twins(lifted, _lift_all(sources.unread, corpus)[0], corpus, rng)
    compounds = _compose(lifted, sources, corpus, rng)
    controls = _controls(sources, lifted, corpus)
    common = _common(capability, corpus)
    drafts = [{**t, "control": False, "reads_first": reads_first or t["handoff"]} for t in [*lifted, *compounds]]
    drafts += [{**t, "control": True, "reads_first": t["handoff"]} for t in controls]
    chosen = _fill(drafts, corpus, common, refused, rng)
    if sum(not template["control"] for template in chosen) < MINIMUM_TEMPLATES:
        raise SynthesisError(_too_few(capability, sources, chosen, refused))
    openings = [*(t.user[0].text for t in sources.lacking if t.user), *asked]
    rows = [
        {"kind": row.kind, "weight": round(row.weight, 6), "templates": row.templates}
        for row in strata(chosen, openings, balanced=reads_first)
    ]
    return environment_source(_numbered({**common, "strata": rows, "templates": chosen}))


def majority(labels: Iterable[Label], capability: str) -> dict[str, Verdict]:
    """The verdict that most labelling runs gave each trajectory; without a majority it is NA."""
    votes: dict[str, Counter[Verdict]] = defaultdict(Counter)
    for label in labels:
        if label.capability == capability:
            votes[label.trajectory_id][label.verdict] += 1
    found = {}
    for trajectory_id, counts in votes.items():
        verdict, count = counts.most_common(1)[0]
        found[trajectory_id] = verdict if 2 * count > sum(counts.values()) else Verdict.NA
    return found


def is_solvable(template: Template, common: dict[str, Any]) -> bool:
    """The template's recorded solution reaches reward 1 on every probed seed, and doing nothing does not."""
    one = {**common, "strata": [{"kind": "", "weight": 1.0, "templates": [0]}], "templates": [template]}
    environment = TemplateEnvironment(_numbered(one))
    for seed in range(_PROBES):
        environment.reset(seed)
        if environment.score().reward > 0.2:
            return False
        for message in environment.oracle():
            if environment.done:
                return False
            environment.step(message)
        if not (environment.done and environment.score().success):
            return False
    return True


def _sources(trajectories: Sequence[Trajectory], labels: Sequence[Label], capability: str) -> _Sources:
    """Sort by outcome and verdict; successes that lacked another capability are lucky, not exemplary."""
    verdicts = majority(labels, capability)
    others = sorted({label.capability for label in labels} - {capability})
    lucky = {i for name in others for i, v in majority(labels, name).items() if v is Verdict.LACKING}

    def pick(outcome: Outcome, verdict: Verdict) -> list[Trajectory]:
        return [t for t in trajectories if t.outcome is outcome and verdicts.get(t.id) is verdict]

    present = pick(Outcome.SUCCESS, Verdict.PRESENT)
    return _Sources(
        present=transcripts([t for t in present if t.id not in lucky]),
        lucky=transcripts([t for t in present if t.id in lucky]),
        unread=transcripts([t for t in pick(Outcome.SUCCESS, Verdict.LACKING) if t.id not in lucky]),
        controls=transcripts([t for t in pick(Outcome.SUCCESS, Verdict.NA) if t.id not in lucky]),
        lacking=transcripts(pick(Outcome.FAILURE, Verdict.LACKING)),
    )


def _fill(
    drafts: list[Template], corpus: Corpus, common: dict[str, Any], refused: Counter[str], rng: random.Random
) -> list[Template]:
    """Generalised templates that can be solved, of every kind in turn, until the room is used up."""
    chosen: list[Template] = []
    prompts: set[str] = set()  # each is written once
    used = 0
    for draft in in_turn(drafts, rng):
        template = generalise(draft, corpus, rng)
        if not is_solvable(template, common):
            refused["its recorded solution does not replay"] += 1
            continue
        used += len(json.dumps({**template, "system": template["system"] if template["system"] not in prompts else ""}))
        prompts.add(template["system"])
        if used > ROOM:
            break
        chosen.append(template)
    return chosen


def _lift_all(sources: Iterable[Transcript], corpus: Corpus) -> tuple[list[Template], Counter[str]]:
    lifted: list[Template] = []
    refused: Counter[str] = Counter()
    for source in sources:
        found = lift(source, corpus)
        if isinstance(found, Unliftable):
            refused[found.reason] += 1
        else:
            lifted.append(found)
    return lifted, refused


def _compose(lifted: list[Template], sources: _Sources, corpus: Corpus, rng: random.Random) -> list[Template]:
    """Compounds of single-request successes, where the capability's own conversations are mostly compound."""
    openings = [t.user[0].text for t in corpus.transcripts if t.user]
    manner = manner_of(openings, response_templates.farewells(corpus.transcripts))
    compound = [is_compound(t["opening"][0], manner.phrases) for t in lifted]
    if not manner.phrases or sum(compound) < _COMPOUND_SHARE * max(1, len(compound)):
        return []
    singles = [t for t in _lift_all(sources.controls, corpus)[0] if not is_compound(t["opening"][0], manner.phrases)]
    found = []
    for _ in range(6):
        rng.shuffle(singles)
        made = [compose(one, two, manner, rng) for one, two in pairwise(singles)]
        found += [template for template in made if template is not None]
    return found[:_COMPOSITIONS]


def _controls(sources: _Sources, lifted: list[Template], corpus: Corpus) -> list[Template]:
    """Successes that did not need the capability but wrote with tools that are usual where it is needed."""
    used = Counter(tool for template in lifted for tool in _written(template))
    usual = {tool for tool, count in used.items() if count >= _USUAL * len(lifted)}
    found = _lift_all(sources.controls, corpus)[0]
    return [template for template in found if _written(template) and _written(template) <= usual][:_CONTROLS]


def _written(template: Template) -> set[str]:
    return {str(call["tool"]) for call in calls_of(template["steps"]) if call["kind"] == "write"}


def _needs_reads(capability: Capability) -> bool:
    """Whether the capability is to look before acting, so that a write on luck does not count."""
    return any(word in capability.name for word in ("verif", "precondition"))


def _common(capability: Capability, corpus: Corpus) -> dict[str, Any]:
    """Everything of an environment's data but its templates."""
    return {
        "capability": capability.name,
        "tools": corpus.tools,
        "writes": sorted(corpus.writes),
        "free_text": corpus.free_text,
        "prefixes": corpus.prefixes,
        "errors": response_templates.error_patterns(corpus),
        "acks": response_templates.acknowledgements(corpus),
        "usual": response_templates.usual_answers(corpus),
        "farewells": response_templates.farewells(corpus.transcripts),
        "chat": response_templates.small_talk(corpus.transcripts),
        "pools": corpus.pools,
    }


def _numbered(data: dict[str, Any]) -> dict[str, Any]:
    """The data with each distinct system prompt stored once."""
    systems = list(dict.fromkeys(template["system"] for template in data["templates"]))
    templates = [{**t, "system": systems.index(t["system"])} for t in data["templates"]]
    return {**data, "systems": systems, "templates": templates}


def _too_few(capability: Capability, sources: _Sources, solvable: list[Template], refused: Counter[str]) -> str:
    exercised = len(sources.present) + len(sources.lucky)
    reasons = "; ".join(f"{reason}: {count}" for reason, count in refused.most_common() if count)
    return (
        f"{capability.name}: {sum(not t['control'] for t in solvable)} usable scenario templates, "
        f"{MINIMUM_TEMPLATES} are needed. Successful conversations that exercised it: {exercised} "
        f"(left out: {reasons or 'none'}). Collect more episodes of the target with `traced collect`, then run "
        "`traced analyze` and `traced synthesize` again"
    )
