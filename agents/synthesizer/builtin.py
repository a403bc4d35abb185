"""The builtin synthesizer: writes an environment for a capability from the target's recorded conversations.

Templates come from successes in which the capability was exercised (by majority over the labelling runs). Failures that
lacked it decide which kinds of request occur most. Only messages, tools, outcomes and labels are read, and the same
input and seed give the same bytes. A template is written only if its recorded solution reaches reward 1 on several
seeds. Raises ``SynthesisError`` if too few conversations give a template. Targets whose users need free simulation, and
tools that compute, are not covered.
"""

import base64
import inspect
import json
import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agents.errors import SynthesisError
from agents.synthesizer import renaming, response_templates, runtime
from agents.synthesizer.composition import compose, is_compound, speech_style
from agents.synthesizer.corpus import Corpus, read_corpus
from agents.synthesizer.counterfactuals import counterfactual_templates
from agents.synthesizer.generalization import generalise
from agents.synthesizer.renaming import Scenario
from agents.synthesizer.runtime import TemplateEnvironment
from agents.synthesizer.scenario_extraction import NoTemplate, Template, calls_of, extract_template
from agents.synthesizer.selection import in_turn, strata
from agents.synthesizer.shared_openings import PAIR, share_openings
from agents.transcript import Transcript, transcripts
from agents.world.functions import FUNCTIONS, functions_source, runtime_source
from agents.world.runtime import World
from store.types import Capability, Label, Outcome, Trajectory, Verdict

_LOCAL_IMPORT = re.compile(r"^from agents\.synthesizer\.\w+ import [^\n]*\n", re.MULTILINE)
POLICY_ADHERENCE = "policy-adherence"  # the builtin capability to act or refuse by a record's state
MINIMUM_TEMPLATES = 6  # whether they differ enough is what admission's check of diversity decides
# With fewer templates, those of less exemplary successes are added.
ENOUGH_TEMPLATES = 24
# Limit for the JSON of all templates; admission accepts files up to 256 KiB.
MAX_TEMPLATE_BYTES = 190_000
# From this share of compound openings on, the capability is about several requests at once.
_COMPOUND_SHARE = 0.6
# Seeds on which every template's recorded solution is replayed.
_PROBE_SEEDS = 6
# Seeds whose scenarios show whether a template varies.
_VARIETY_SEEDS = 16
# Limit for the compressed data of a world, so that room for templates is left.
MAX_WORLD_BYTES = 90_000
_MAX_COMPOUNDS = 150
_MAX_CONTROLS = 30
# A write tool is usual if at least this share of the templates call it.
_USUAL_SHARE = 0.15
# Characters of a line of compressed data.
_LINE = 110


@dataclass(frozen=True)
class WorldData:
    """The world that an environment stands on: the hash of the world's source, and its data (``agents.world``).

    Attributes:
        module: The functions of tools that a model wrote; they run in containers only.
    """

    digest: str
    data: dict[str, Any]
    module: str = ""

    @property
    def functions_source(self) -> str:
        """The function that makes the tools' functions, "" without a module."""
        return f"{functions_source(self.module)}\n\n" if self.module else ""

    @property
    def arguments(self) -> str:
        """What a file passes to its ``World`` after the data."""
        return f", {FUNCTIONS}" if self.module else ""

    @property
    def omitted(self) -> list[str]:
        """The tools that the world does not answer, in alphabetical order."""
        return list(self.data.get("omitted", []))

    @property
    def has_records(self) -> bool:
        """Whether a read of the world has an answer before any write."""
        reads = [calls for tool, calls in self.data["calls"].items() if tool not in self.data["writes"]]
        return any(
            not history and not failed
            for calls in reads
            for entries in calls.values()
            for history, _, failed in entries
        )

    def encoded(self) -> str:
        """Return the data without the tools' schemas, compressed, as text."""
        data = {key: value for key, value in self.data.items() if key != "tools"}
        return base64.b85encode(zlib.compress(json.dumps(data).encode(), 9)).decode()


def environment_source(data: dict[str, Any], target_world: WorldData | None = None) -> str:
    """Return the text of an environment file: ``data`` as JSON, then the source of the renaming and the runtime.

    The file imports only the standard library and ``sandbox.contract``. With a world it has the world's data,
    compressed, the source of the world's runtime, and the constants ``WORLD``, the hash of the world, and
    ``WORLD_OMITS``, the tools that the world does not answer.
    """
    arguments = f"DATA, World(WORLD_DATA{target_world.arguments})" if target_world else "DATA"
    summary = (
        f"Synthetic environment for the capability {data['capability']}: {len(data['templates'])} scenario templates."
    )
    return (
        f'"""{summary}\n\nWritten by the builtin synthesizer from recorded conversations; the data comes first, then'
        ' the runtime that\nevery such environment shares.\n"""\n\nimport json\n\n'
        f"DATA = json.loads(r'''\n{_json(data)}\n''')\n\n\n"
        f"{_world_source(target_world)}"
        f"# --- renaming ---\n{_LOCAL_IMPORT.sub('', inspect.getsource(renaming))}\n\n"
        f"# --- runtime ---\n{_LOCAL_IMPORT.sub('', inspect.getsource(runtime))}\n\n"
        "class Environment(TemplateEnvironment):\n"
        '    """This file\'s environment: the shared runtime over this file\'s data."""\n\n'
        f"    def __init__(self) -> None:\n        super().__init__({arguments})\n"
    )


def _world_source(target_world: WorldData | None) -> str:
    if target_world is None:
        return ""
    encoded = target_world.encoded()
    lines = [encoded[start : start + _LINE] for start in range(0, len(encoded), _LINE)]
    text = "\n".join(f"    {json.dumps(line)}" for line in lines)
    return (
        f"# --- world ---\nimport base64\nimport zlib\n\nWORLD = {json.dumps(target_world.digest)}\n"
        f"WORLD_OMITS = {json.dumps(target_world.omitted)}\n"
        f"WORLD_DATA = json.loads(zlib.decompress(base64.b85decode(\n{text}\n)))\n\n"
        f"{runtime_source()}\n\n{target_world.functions_source}"
    )


def _json(data: dict[str, Any]) -> str:
    """Return JSON with one line per field and per entry of a list field, so that templates can be read and compared."""
    rows = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in value)
            rows.append(f"{json.dumps(key)}: [\n{lines}\n]")
        else:
            rows.append(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}")
    # Three single quotes would end the string literal that holds the JSON.
    return ("{\n" + ",\n".join(rows) + "\n}").replace("'", "\\u0027")


@dataclass(frozen=True)
class Frame:
    """What all templates of an environment share: its data except templates and strata, and the target's world."""

    common: Mapping[str, object]
    target_world: WorldData | None


@dataclass(frozen=True)
class _Sources:
    exemplary: list[Transcript]
    # Successes that exercised the capability but lacked others, none of which explains failures.
    sound: list[Transcript]
    # Successes that exercised the capability but lacked another one.
    lucky: list[Transcript]
    # Successes that lacked the capability.
    unread: list[Transcript]
    controls: list[Transcript]
    lacking_failures: list[Transcript]


def synthesize(
    capability: Capability,
    trajectories: Sequence[Trajectory],
    labels: Sequence[Label],
    *,
    seed: int,
    extra_openings: Sequence[str] = (),
    target_world: WorldData | None = None,
    unretained: Collection[str] = (),
) -> str:
    """Return the source of a single-file environment for ``capability``.

    Args:
        extra_openings: openings of failures that lacked the capability and are not among ``trajectories``; they affect
            only the weights of the strata, and no word of them is written into the file.
        target_world: The target's world, which answers the calls that the scenarios themselves do not. A scenario that
            calls a tool that it omits is left out unless its recorded answers can be replayed exactly
            (``is_replayable``); if fewer than ``MINIMUM_TEMPLATES`` remain, the environment is written without the
            world.
        unretained: Capabilities of the labels that do not explain failures: if templates are few, successes that lack
            only such ones are examples too.

    Raises:
        SynthesisError: fewer than ``MINIMUM_TEMPLATES`` different solvable templates.
    """
    rng = random.Random(f"synthesize:{capability.name}:{seed}")
    sorted_trajectories = sorted((item for item in trajectories if item.outcome.is_judged), key=lambda item: item.id)
    sources = _sources(sorted_trajectories, labels, capability.name, unretained)
    corpus = read_corpus(
        transcripts(sorted_trajectories),
        {transcript.trajectory_id for transcript in [*sources.exemplary, *sources.controls]},
    )
    templates, rejections = extract_all(sources.exemplary, corpus)
    templates = distinct_templates(templates)
    for further, required in ((sources.sound, ENOUGH_TEMPLATES), (sources.lucky, MINIMUM_TEMPLATES)):
        if sum(is_replayable(template, corpus, target_world) for template in templates) < required:
            templates = distinct_templates([*templates, *extract_all(further, corpus)[0]])
    reads_first = _needs_reads(capability)
    recorded_templates = list(templates)
    if reads_first:
        templates += counterfactual_templates(templates, extract_all(sources.unread, corpus)[0], corpus, rng)
        unpaired, pairs = share_openings(templates, rng, target_world.omitted if target_world else ())
        templates = [*unpaired, *pairs]
    compounds = _compose(templates, sources, corpus, rng)
    controls = _controls(sources, templates, corpus)
    recorded_templates += controls
    common = common_data(capability.name, corpus)
    drafts = [
        {**template, "control": False, "reads_first": reads_first or template["handoff"]}
        for template in [*templates, *compounds]
    ]
    drafts += [{**template, "control": True, "reads_first": template["handoff"]} for template in controls]
    selection: list[Template] = []
    if target_world is not None:
        # What an omitted tool answers in a conversation that nobody had is not known.
        origins = zip(drafts, [*templates, *compounds, *controls], strict=True)
        replayable = [
            draft
            for draft, origin in origins
            if is_replayable(draft, corpus, target_world, is_recorded=any(origin is row for row in recorded_templates))
        ]
        selection = fill(replayable, corpus, Frame(common, target_world), Counter(), rng)
    if not _is_enough(selection):
        # Too little of the world is left to carry the scenarios: they answer by themselves.
        target_world = None
        selection = fill(drafts, corpus, Frame(common, None), rejections, rng)
    if not _is_enough(selection):
        raise SynthesisError(_too_few(capability, sources, selection, rejections))
    openings = [
        *(transcript.user[0].text for transcript in sources.lacking_failures if transcript.user),
        *extra_openings,
    ]
    rows = [
        {"kind": row.kind, "weight": round(row.weight, 6), "templates": row.templates}
        for row in strata(selection, openings, balanced=reads_first, fixed=_fixed(selection, common))
    ]
    return environment_source(numbered({**common, "strata": rows, "templates": selection}), target_world)


def majority(labels: Iterable[Label], capability: str) -> dict[str, Verdict]:
    """Return for each trajectory the verdict of more than half of the labelling runs, NA if no verdict has that."""
    votes: dict[str, Counter[Verdict]] = defaultdict(Counter)
    for label in labels:
        if label.capability == capability:
            votes[label.trajectory_id][label.verdict] += 1
    verdicts = {}
    for trajectory_id, counts in votes.items():
        verdict, count = counts.most_common(1)[0]
        verdicts[trajectory_id] = verdict if 2 * count > sum(counts.values()) else Verdict.NA
    return verdicts


def distinct_templates(templates: Sequence[Template]) -> list[Template]:
    """Return templates without repetitions: trials of a task often say and do the same."""
    merged: dict[str, Template] = {}
    for template in templates:
        key = json.dumps({name: value for name, value in template.items() if name != "from"}, sort_keys=True)
        first = merged.setdefault(key, template)
        if first is not template:
            merged[key] = {**first, "from": [*first["from"], *template["from"]]}
    return list(merged.values())


def _is_enough(selection: Sequence[Template]) -> bool:
    return sum(not template["control"] for template in selection) >= MINIMUM_TEMPLATES


def _fixed(templates: Sequence[Template], common: Mapping[str, object]) -> set[int]:
    """Return the positions of the templates of which most seeds make the same few scenarios."""
    fixed = set()
    for position, template in enumerate(templates):
        data = numbered(_single(template, common))
        scenarios = [Scenario(data, seed) for seed in range(_VARIETY_SEEDS)]
        if 2 * len({json.dumps([scenario.opening, scenario.steps]) for scenario in scenarios}) <= _VARIETY_SEEDS:
            fixed.add(position)
    return fixed


def _single(template: Template, common: Mapping[str, object]) -> dict[str, Any]:
    """Return the data of an environment of one template."""
    return {**common, "strata": [{"kind": "", "weight": 1.0, "templates": [0]}], "templates": [template]}


def is_solvable(template: Template, common: Mapping[str, object], world: World | None = None) -> bool:
    """Return whether, on every probe seed, the recorded solution reaches reward 1 and doing nothing at most 0.2.

    The tools that the world omits have to answer it as recorded.
    """
    environment = TemplateEnvironment(numbered(_single(template, common)), world)
    for seed in range(_PROBE_SEEDS):
        environment.reset(seed)
        if environment.score().reward > 0.2:
            return False
        for step, message in zip(environment.scenario.steps, environment.oracle(), strict=True):
            if environment.done:
                return False
            replies = environment.step(message)
            for call, reply in zip(step["calls"], replies, strict=False):
                if call["tool"] in environment.omitted and reply["content"] != call["result"]:
                    return False
        if not (environment.done and environment.score().success):
            return False
    return True


def _sources(
    trajectories: Sequence[Trajectory], labels: Sequence[Label], capability: str, unretained: Collection[str]
) -> _Sources:
    """Return the judged trajectories by outcome and verdict; a success that lacked another capability is ``lucky``."""
    verdicts = majority(labels, capability)
    lacking_names: dict[str, set[str]] = defaultdict(set)
    for name in {label.capability for label in labels} - {capability}:
        for trajectory_id, verdict in majority(labels, name).items():
            if verdict is Verdict.LACKING:
                lacking_names[trajectory_id].add(name)

    def pick(outcome: Outcome, verdict: Verdict) -> list[Trajectory]:
        return [t for t in trajectories if t.outcome is outcome and verdicts.get(t.id) is verdict]

    def complete(rows: list[Trajectory]) -> list[Transcript]:
        return transcripts([trajectory for trajectory in rows if not lacking_names[trajectory.id]])

    exercised_successes = pick(Outcome.SUCCESS, Verdict.PRESENT)
    incomplete = [trajectory for trajectory in exercised_successes if lacking_names[trajectory.id]]
    return _Sources(
        exemplary=complete(exercised_successes),
        sound=transcripts([trajectory for trajectory in incomplete if lacking_names[trajectory.id] <= set(unretained)]),
        lucky=transcripts(
            [trajectory for trajectory in incomplete if not lacking_names[trajectory.id] <= set(unretained)]
        ),
        unread=complete(pick(Outcome.SUCCESS, Verdict.LACKING)),
        controls=complete(pick(Outcome.SUCCESS, Verdict.NA)),
        lacking_failures=transcripts(pick(Outcome.FAILURE, Verdict.LACKING)),
    )


def fill(
    drafts: list[Template], corpus: Corpus, frame: Frame, rejections: Counter[str], rng: random.Random
) -> list[Template]:
    """Return generalised, solvable templates of every kind in turn, until ``MAX_TEMPLATE_BYTES`` is used up.

    Templates that are not solvable are counted in ``rejections``.
    """
    selection: list[Template] = []
    # System prompts counted so far: each is written once, so it counts once.
    prompts: set[str] = set()
    used = len(_world_source(frame.target_world))
    world = World(frame.target_world.data) if frame.target_world else None
    omitted = frame.target_world.omitted if frame.target_world else []
    for draft in in_turn(drafts, rng):
        template = generalise({key: value for key, value in draft.items() if key != PAIR}, corpus, rng, omitted)
        if not is_solvable(template, frame.common, world):
            rejections["its recorded solution does not replay"] += 1
            continue
        used += len(json.dumps({**template, "system": template["system"] if template["system"] not in prompts else ""}))
        prompts.add(template["system"])
        if used > MAX_TEMPLATE_BYTES:
            break
        selection.append(template)
    return selection


def extract_all(sources: Iterable[Transcript], corpus: Corpus) -> tuple[list[Template], Counter[str]]:
    """Return the templates of conversations, and the number of those that give none, by reason."""
    templates: list[Template] = []
    rejections: Counter[str] = Counter()
    for source in sources:
        template = extract_template(source, corpus)
        if isinstance(template, NoTemplate):
            rejections[template.reason] += 1
        else:
            templates.append(template)
    return templates, rejections


def _compose(templates: list[Template], sources: _Sources, corpus: Corpus, rng: random.Random) -> list[Template]:
    """Return compounds of single-request successes, if most of the capability's templates are compound; else none."""
    openings = [transcript.user[0].text for transcript in corpus.transcripts if transcript.user]
    style = speech_style(openings, response_templates.farewells(corpus.transcripts))
    compound = [is_compound(template["opening"][0], style.phrases) for template in templates]
    if not style.phrases or sum(compound) < _COMPOUND_SHARE * max(1, len(compound)):
        return []
    singles = [
        template
        for template in extract_all(sources.controls, corpus)[0]
        if not is_compound(template["opening"][0], style.phrases)
    ]
    compounds = []
    for _ in range(6):
        rng.shuffle(singles)
        pairs_composed = [compose(first, second, style, rng) for first, second in pairwise(singles)]
        compounds += [template for template in pairs_composed if template is not None]
    return compounds[:_MAX_COMPOUNDS]


def _controls(sources: _Sources, templates: list[Template], corpus: Corpus) -> list[Template]:
    """Return templates of successes that did not need the capability but wrote with tools usual where it is needed."""
    used = Counter(tool for template in templates for tool in _write_tools(template))
    usual = {tool for tool, count in used.items() if count >= _USUAL_SHARE * len(templates)}
    candidates = distinct_templates(extract_all(sources.controls, corpus)[0])
    return [template for template in candidates if _write_tools(template) and _write_tools(template) <= usual][
        :_MAX_CONTROLS
    ]


def tools_of(template: Template) -> set[str]:
    """Return the tools that a template's solution calls."""
    return {str(call["tool"]) for call in calls_of(template["steps"])}


def is_replayable(
    template: Template, corpus: Corpus, target_world: WorldData | None, *, is_recorded: bool = True
) -> bool:
    """Return whether the tools that a world omits can answer a template's calls: as recorded, or there are none.

    Their answers are known for the recorded arguments after the recorded writes only. No agent repeats another one's
    prose, so neither their calls nor the writes before them may hold some.

    Args:
        is_recorded: Whether the template is one recorded conversation, not composed or changed.
    """
    if target_world is None or tools_of(template).isdisjoint(target_world.omitted):
        return True
    writes = {*corpus.writes, *target_world.data["writes"]}
    has_prose = False
    for call in calls_of(template["steps"]):
        holds_prose = not set(call["args"]).isdisjoint(corpus.free_text.get(call["tool"], []))
        if call["tool"] in target_world.omitted and (holds_prose or has_prose):
            return False
        has_prose = has_prose or (holds_prose and call["tool"] in writes and call["kind"] != "error")
    return is_recorded


def _write_tools(template: Template) -> set[str]:
    return {str(call["tool"]) for call in calls_of(template["steps"]) if call["kind"] == "write"}


def _needs_reads(capability: Capability) -> bool:
    """Return whether the capability is to read before acting, so that a write without a read does not count."""
    return capability.name == POLICY_ADHERENCE or any(word in capability.name for word in ("verif", "precondition"))


def common_data(capability: str, corpus: Corpus) -> dict[str, object]:
    """Return the data of an environment except its templates and strata."""
    return {
        "capability": capability,
        "tools": corpus.tools,
        "writes": sorted(corpus.writes),
        "free_text": corpus.free_text,
        "name_arguments": corpus.name_arguments,
        "incidental": corpus.incidental,
        "prefixes": corpus.prefixes,
        "errors": response_templates.error_patterns(corpus),
        "acks": response_templates.acknowledgements(corpus),
        "usual": response_templates.usual_answers(corpus),
        "farewells": response_templates.farewells(corpus.transcripts),
        "chat": response_templates.small_talk(corpus.transcripts),
        "pools": corpus.pools,
    }


def numbered(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data with each distinct system prompt stored once in ``systems``; templates hold its position."""
    systems = list(dict.fromkeys(template["system"] for template in data["templates"]))
    templates = [{**t, "system": systems.index(t["system"])} for t in data["templates"]]
    return {**data, "systems": systems, "templates": templates}


def _too_few(capability: Capability, sources: _Sources, solvable: list[Template], rejections: Counter[str]) -> str:
    exercised_count = len(sources.exemplary) + len(sources.sound) + len(sources.lucky)
    reasons = "; ".join(f"{reason}: {count}" for reason, count in rejections.most_common() if count)
    return (
        f"{capability.name}: {sum(not template['control'] for template in solvable)} usable scenario templates, "
        f"{MINIMUM_TEMPLATES} are needed. Successful conversations that exercised it: {exercised_count} "
        f"(left out: {reasons or 'none'})"
    )
