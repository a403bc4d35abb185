"""The figures of a cycle: plain types that the table, the plots, the report page and ``--json`` present.

Rates are in 0-1 and come from ``traced.evaluation.intervals``. This module neither reads the store nor draws.
"""

from dataclasses import asdict, dataclass, field

from store.records import Finding
from store.types import GateAnswer, GateResult, Outcome, PairedDifference
from traced.evaluation.intervals import Change, Interval, Rate, RoutingQuality
from traced.evaluation.world_agreement import WorldFigures, agreement_json

FLOOR = "do-nothing"
BASE = "base"
EPISODES, PRODUCTION = "episodes", "production"  # origins of the analysed trajectories
ROUTED = "routed"  # the policy's name in the store: the adapters as they answer together, by a router or not
ON_TARGET = "grpo-on-target"
INCUMBENT = "incumbent"  # the live system with which the cycle began
PREDECESSOR = "predecessor"  # the live system on another base model, from which the cycle's takes over
TITLES = {
    FLOOR: "do nothing",
    INCUMBENT: "live before",
    PREDECESSOR: "live before, on another base model",
    BASE: "base model",
    ROUTED: "composed",
    ON_TARGET: "GRPO on the target itself",
}
CLOSED = "closed: "  # how the reason begins with which a capability ends that needs no adapter
PROMPT = "optimize-prompt"  # the stage at which a capability ends if a prompt is enough


@dataclass(frozen=True)
class AdapterFigures:
    """One adapter version: its gate, the decision about it, and its success rate without routing on the test split."""

    name: str
    capability: str
    gate: GateResult | None
    decision: str  # "approved", "rejected" or "waiting"
    is_promoted: bool
    test_rate: Rate | None


@dataclass(frozen=True)
class CandidateFigures:
    """One way in which the adapters could answer together.

    Attributes:
        success: Its success rate on ``tasks`` validation tasks.
        adapters: The adapters that an engine has to hold for it.
        decisions: When a router decides: "none", "conversation" or "turn".
    """

    name: str
    tasks: int
    success: float
    adapters: int
    decisions: str


@dataclass(frozen=True)
class CompositionFigures:
    """The candidates of a cycle, best first, and the first one against what was live (``incumbent``) on gate seeds.

    ``serving`` is the name of what was tested in the end: by a decision or a gate the best one may not serve.
    """

    candidates: list[CandidateFigures]
    incumbent: str
    gate: PairedDifference | None
    serving: str


@dataclass(frozen=True)
class GainOver:
    """The success of the composition minus that of another policy, on the same test tasks."""

    name: str  # of the other policy
    gain: Interval
    gains: int  # pairs that only the composition solved
    losses: int  # pairs that only the other policy solved


@dataclass(frozen=True)
class LiveStep:
    """What a cycle did to the live system.

    Attributes:
        incumbent: What was live when the cycle began, in words.
        is_first: Whether that is the base model alone.
        initial_success: The success of what was live when the cycle began: on the test split, or, for a target of
            recorded conversations, in those that it had answered and that have an outcome. None if it was not measured.
        success: The success on the test split of what is live after the cycle; None if it was not measured.
        gain: The same minus that of the incumbent, on the same test tasks; None if nothing was promoted.
        closed: The capabilities of live adapters that the analysis does not retain any more, or that a new base model
            has by itself.
        left_aside: The capabilities that are not trained because their last trainings failed, or because a version is
            on trial, with the reason.
        not_residual: Those that are not trained because other live adapters solve their tasks, with the counts.
        is_target_changed: Whether the base model does other than in an earlier cycle on the same tasks.
        fallen: The live versions in whose environments the live system does worse than in an earlier cycle.
        handover: The comparison with the live system on another base model, from which the cycle's takes over.
    """

    incumbent: str
    is_first: bool = True
    initial_success: Rate | None = None
    success: Rate | None = None
    gain: Interval | None = None
    closed: list[str] = field(default_factory=list)
    left_aside: dict[str, str] = field(default_factory=dict)
    not_residual: dict[str, str] = field(default_factory=dict)
    is_target_changed: bool = False
    fallen: list[str] = field(default_factory=list)
    handover: str = ""


@dataclass(frozen=True)
class Ending:
    """A retained capability whose processing ended at ``stage`` of the cycle, and the reason."""

    capability: str
    stage: str
    reason: str


@dataclass(frozen=True)
class PromptFigures:
    """The newest prompt patch of a capability: the remedy that its gates indicate, and those gates by comparison."""

    capability: str
    patch: str  # the first digits of its id
    answer: str  # the remedy in words, such as "a prompt is enough"
    gates: dict[str, GateResult]  # "prompt"; "adapter" and "comparison" as well if there was an adapter
    is_enough: bool
    decision: str = ""  # a person's decision in words; "" while there is none


@dataclass(frozen=True)
class SelfCheck:
    """How many of the first ``tasks`` tasks of a target's split two policies without a model solve.

    Attributes:
        gold: Solved by the target's gold policy; None if it has none.
        nothing: Solved by doing nothing.
        fault: Why the target ended the self-check before all tasks were played; "" if it did not.
    """

    tasks: int
    gold: int | None
    nothing: int
    fault: str = ""

    @property
    def text(self) -> str:
        """Return the figures in words."""
        if self.fault:
            return f"self-check failed: {self.fault}"
        gold = "no gold policy" if self.gold is None else f"gold policy {self.gold}"
        return f"self-check on {self.tasks} tasks: {gold}, doing nothing {self.nothing}"


@dataclass(frozen=True)
class CycleFigures:
    """All figures of one cycle.

    ``rates`` has the success rates by policy name: FLOOR, BASE, adapter versions, ROUTED and ON_TARGET. It is empty
    until the cycle has been evaluated, and if episodes of the target cannot be played (``has_episodes``).
    """

    cycle_id: str
    target: str
    model: str
    seed: int
    has_episodes: bool = True
    collected: dict[Outcome, int] = field(default_factory=dict)  # episodes of the incumbent on the train split
    analysed: dict[str, int] = field(default_factory=dict)  # trajectories by origin; empty until analysed
    findings: list[Finding] = field(default_factory=list)
    adapters: list[AdapterFigures] = field(default_factory=list)
    prompts: list[PromptFigures] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    curves: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # capability -> iterations, in order
    rates: dict[str, Rate] = field(default_factory=dict)
    world: WorldFigures | None = None  # of a recorded target
    self_check: SelfCheck | None = None  # of the target, on the test split; on the train split until then
    gain: Interval | None = None  # composed minus base
    over_single: GainOver | None = None  # over the adapter that is best alone on these tasks
    over_direct: GainOver | None = None  # over GRPO on the target itself
    composition: CompositionFigures | None = None
    step: LiveStep | None = None
    routers: dict[str, RoutingQuality] = field(default_factory=dict)  # every router that picked; the serving one first
    capabilities: dict[str, Change] = field(default_factory=dict)
    rollouts: int = 0  # training rollouts of all adapters
    validation_episodes: int = 0  # of all adapters, beside these rollouts
    seconds: float = 0.0
    peak_rss_bytes: int = 0

    def rate(self, name: str) -> float | None:
        """Return a policy's success rate, None if it was not evaluated."""
        return self.rates[name].rate if name in self.rates else None


def title_of(policy: str) -> str:
    """Return a policy's title in tables and stages; that of an adapter version contains its name."""
    return TITLES.get(policy, f"{policy} alone")


def percent(value: float) -> str:
    """Format a rate in 0-1 as a percentage."""
    return f"{100 * value:.1f} %"


def points(value: float) -> str:
    """Format a difference of rates in percentage points, with its sign."""
    return f"{100 * value:+.1f}"


def gate_remark(comparison: PairedDifference) -> str:
    """Return what a comparison's figures do not say by themselves; "" if there is nothing."""
    margin = 100 * -comparison.required
    if comparison.name == "regression" and (comparison.low > -comparison.required or comparison.high < -margin / 100):
        return f"the adapter changes these tasks by more than {margin:.1f} points"
    if comparison.answer is GateAnswer.UNTESTED:
        return "too few tasks, not required; a canary protects"
    if comparison.required < 0:
        return f"required: no loss of {margin:.1f} points"
    return ""


def verdict(figures: CycleFigures) -> str:
    """Return a sentence on what the cycle gained, or why it gained nothing."""
    gain = figures.gain
    if figures.step and figures.step.handover:
        return f"Handover: {figures.step.handover}."
    if gain is not None:
        end = "" if gain.low > 0 else " The interval contains zero: no gain is shown."
        return (
            f"Composed minus base: {points(gain.difference)} points "
            f"[95 % interval {points(gain.low)} to {points(gain.high)}] on {gain.tasks} untouched test tasks.{end}"
        )
    if not any(finding.retained for finding in figures.findings):
        return _nothing_retained(figures)
    if figures.step and not figures.adapters and not figures.endings:
        untrained = {**figures.step.not_residual, **figures.step.left_aside}
        if untrained:
            texts = "; ".join(f"{name}: {text}" for name, text in untrained.items())
            return f"Nothing was worth training: {texts}."
    fixed = [prompt.capability for prompt in figures.prompts if prompt.is_enough]
    if not figures.adapters and fixed:
        return f"No adapter was trained; a prompt is enough for {', '.join(fixed)}."
    if not figures.adapters:
        endings = [f"{ending.capability} at {ending.stage}: {ending.reason}" for ending in figures.endings]
        reasons = f" ({'; '.join(endings)})" if endings else ""
        return f"No adapter was trained: every retained capability failed at an earlier stage{reasons}."
    live_names = [adapter.name for adapter in figures.adapters if adapter.is_promoted]
    if live_names and not figures.has_episodes:
        return f"{', '.join(live_names)}: promoted on the gate of the environment. {_sentence(TARGET_NOT_TESTED)}"
    return "No adapter was promoted, so no composition was evaluated."


def step_sentence(step: LiveStep) -> str:
    """Return sentences on what a cycle did to a live system that has adapters; "" in a first cycle."""
    if step.is_first:
        return ""
    sentences = [f"Live before: {step.incumbent.removeprefix('the live system ').strip('()')}."]
    if step.gain is not None:
        interval = f"[{points(step.gain.low)} to {points(step.gain.high)}]"
        subject = "The new system" if step.handover else "Live now"
        sentences.append(f"{subject} minus live before: {points(step.gain.difference)} {interval}.")
    elif step.success is not None:
        sentences.append(f"It goes on with {percent(step.success.rate)} on the test tasks.")
    elif step.initial_success is not None:
        initial = step.initial_success
        interval = f"[{percent(initial.low)} to {percent(initial.high)}]"
        sentences.append(f"It solved {percent(initial.rate)} {interval} of {initial.episodes} conversations.")
    if step.closed:
        reason = "the base model has them" if step.handover else "the analysis does not retain them"
        sentences.append(f"Closed, as {reason}: {', '.join(step.closed)}.")
    sentences += [f"Left aside: {name}, {reason}." for name, reason in step.left_aside.items()]
    sentences += [f"Not trained again: {name} ({counts})." for name, counts in step.not_residual.items()]
    if step.is_target_changed:
        sentences.append("The target has changed: the base model does other than before on the same tasks.")
    if step.handover:
        sentences.append(f"Handover: {step.handover}.")
    if step.fallen:
        sentences.append(f"The live system has fallen in the environments of {', '.join(step.fallen)}.")
    return " ".join(sentences)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _nothing_retained(figures: CycleFigures) -> str:
    successes, failures = (figures.collected.get(outcome, 0) for outcome in (Outcome.SUCCESS, Outcome.FAILURE))
    # Production conversations may have the outcome that the episodes lack.
    kind = "collected episodes" if figures.has_episodes else "conversations"
    missing = "" if figures.analysed.get(PRODUCTION) else missing_contrast(successes, failures, kind)
    return (
        f"No adapter was trained: {missing}"
        if missing
        else "No capability was found lacking, so no adapter was trained."
    )


TARGET_NOT_TESTED = "target: not tested, recorded conversations cannot be played; a canary or a shadow tests it"


def missing_contrast(successes: int, failures: int, kind: str) -> str:
    """Return why conversations of one outcome show no capability, and what to do; "" if there are both or none."""
    if failures and not successes:
        return (
            f"none of the {failures} {kind} succeeded, and a capability is found by comparing failures with successes. "
            "Take more of them (collect.episodes), or a stronger model."
        )
    if successes and not failures:
        return f"all {successes} {kind} succeeded, so there are no failures to learn from."
    return ""


def as_json(figures: CycleFigures) -> dict[str, object]:
    """Return the object that ``traced demo --json`` prints; missing figures are null.

    ``verdict`` is a sentence on the result. ``over_best_single`` and ``composition`` are present once compositions were
    compared, ``routing`` once tasks were routed, ``analysed`` if production trajectories were analysed, ``world`` if
    recorded calls were replayed, ``prompts`` if prompt patches were tried, and ``grpo_on_target`` and
    ``over_grpo_on_target`` if that policy was evaluated.
    """
    gain = figures.gain
    payload: dict[str, object] = {
        "verdict": verdict(figures),
        "self_check": asdict(figures.self_check) if figures.self_check else None,
        "floor": figures.rate(FLOOR),
        "base": figures.rate(BASE),
        "composed": figures.rate(ROUTED),
        "gain": gain.difference if gain else None,
        "ci": [gain.low, gain.high] if gain else None,
        "test_seeds": gain.tasks if gain else 0,
        "adapters": [
            {
                "name": adapter.name,
                "capability": adapter.capability,
                "gate": adapter.gate.answer.value if adapter.gate else None,
                "promoted": adapter.is_promoted,
                "alone": adapter.test_rate.rate if adapter.test_rate else None,
            }
            for adapter in figures.adapters
        ],
        "capabilities": {
            name: {"before": change.base, "after": change.routed} for name, change in figures.capabilities.items()
        },
        "rollouts": figures.rollouts,
        "seconds": round(figures.seconds, 1),
        "peak_rss_bytes": figures.peak_rss_bytes,
    }
    if figures.validation_episodes:
        payload["validation_episodes"] = figures.validation_episodes
    if figures.analysed.get(PRODUCTION):
        payload["analysed"] = figures.analysed
    if figures.world:
        agreement = agreement_json(figures.world.agreement)
        payload["world"] = {
            "digest": figures.world.digest,
            "conversations": figures.world.conversations,
            "omitted": [asdict(item) for item in figures.world.omitted],
            **({"functions": asdict(figures.world.functions)} if figures.world.functions else {}),
        } | agreement
    if figures.prompts:
        payload["prompts"] = [
            {
                "capability": prompt.capability,
                "patch": prompt.patch,
                "enough": prompt.answer,
                "decision": prompt.decision,
            }
            for prompt in figures.prompts
        ]
    if figures.over_single:
        payload["over_best_single"] = _over_json(figures.over_single)
    if figures.composition:
        payload["composition"] = asdict(figures.composition)
    if figures.step:
        payload["step"] = _step_json(figures.step)
    if figures.routers:
        payload["routing"] = {name: _routing_json(quality) for name, quality in figures.routers.items()}
    if ON_TARGET in figures.rates:
        payload["grpo_on_target"] = figures.rate(ON_TARGET)
    if figures.over_direct:
        payload["over_grpo_on_target"] = _over_json(figures.over_direct)
    return payload


def _over_json(figures: GainOver) -> dict[str, object]:
    return {
        "name": figures.name,
        "gain": figures.gain.difference,
        "ci": [figures.gain.low, figures.gain.high],
        "gains": figures.gains,
        "losses": figures.losses,
        "pairs": figures.gain.pairs,
    }


def _step_json(step: LiveStep) -> dict[str, object]:
    initial, success, gain = step.initial_success, step.success, step.gain
    return {
        "incumbent": step.incumbent,
        "initial_success": initial.rate if initial else None,
        "initial_ci": [initial.low, initial.high] if initial else None,
        "success": success.rate if success else None,
        "success_ci": [success.low, success.high] if success else None,
        "gain": gain.difference if gain else None,
        "ci": [gain.low, gain.high] if gain else None,
        "closed": step.closed,
        "left_aside": step.left_aside,
        "not_residual": step.not_residual,
        "target_changed": step.is_target_changed,
        "fallen": step.fallen,
        "handover": step.handover,
    }


def _routing_json(quality: RoutingQuality) -> dict[str, object]:
    return {"accuracy": quality.accuracy, **asdict(quality)}
