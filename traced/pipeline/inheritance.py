"""What a cycle takes over from its predecessor: the capabilities of its versions, and their environments.

Environments outlive base models. A capability of the predecessor is trained again whether or not the analysis retains
it, and its first environment is the one of the predecessor's version. Admission calibrates it with the new base model:
one that the base model solves closes the capability; one that is refused for another reason is written anew from the
cycle's own episodes.
"""

from collections.abc import Sequence

from agents.analyst.builtin import DETECTORS, label
from agents.analyst.llm.prompting import ProgressCallback
from store.records import EnvironmentRecord
from store.repositories.adapters import get_adapter
from store.repositories.capabilities import get_capability, list_capabilities, save_capabilities, save_labels
from store.repositories.environments import get_environment, list_environments, save_environment
from store.repositories.evidence import INHERITED
from store.types import AdmissionReport, Capability
from traced.config.settings import Settings
from traced.evaluation.figures import CLOSED, percent
from traced.pipeline.analyze import analysis_context, question_progress, to_analyze
from traced.pipeline.attribution import ATTRIBUTE, MISROUTED
from traced.pipeline.context import Context
from traced.pipeline.findings import label_capability
from traced.pipeline.predecessor import Predecessor, predecessor_of

CALIBRATION = "spread"  # the name of the check


async def inherit(context: Context, predecessor: Predecessor, retained: Sequence[str]) -> list[str]:
    """Return the capabilities to train: the predecessor's, then the others that the analysis retains.

    The others are left out for a recorded target: its conversations are not those of the new base model.
    """
    with context.stage(ATTRIBUTE, f"Take over the capabilities of {predecessor.model}") as stage:
        other_names = (
            [] if context.target.is_recorded else [name for name in retained if name not in predecessor.versions]
        )
        with context.read_session() as session:
            stored_names = {capability.name for capability in list_capabilities(session, context.cycle_id)}
            missing = [
                get_capability(session, get_adapter(session, version).cycle_id, capability)
                for capability, version in predecessor.versions.items()
                if capability not in stored_names
            ]
        for capability in missing:
            await _store(context, capability, question_progress(stage))
        names = [*predecessor.versions, *other_names]
        stage.detail = {
            "train": names,
            "closed": [],
            "left_aside": {},
            "not_residual": {},
            "kinds": {},
            MISROUTED: [],
            "attributions": [],
            INHERITED: dict(predecessor.versions),
        }
        stage.figure = f"train: {', '.join(names)}"
    return names


async def _store(context: Context, capability: Capability, on_progress: ProgressCallback) -> None:
    """Store a capability that the analysis has not named, with its labels: routers and gates read them."""
    trajectories = to_analyze(context)
    if capability.name in DETECTORS:
        labels = label(trajectories, [capability], run=0, seed=context.settings.seed)
    else:
        labels = await label_capability(analysis_context(context), trajectories, capability, ATTRIBUTE, on_progress)
    with context.write_session() as session:
        save_capabilities(session, context.cycle_id, [capability])
        save_labels(session, context.cycle_id, labels)


def inherited_version(context: Context, capability: str) -> str:
    """Return the predecessor's version of a capability, "" without one."""
    predecessor = predecessor_of(context)
    return predecessor.versions.get(capability, "") if predecessor else ""


def take_over_environment(context: Context, version: str) -> EnvironmentRecord:
    """Store the environment of the predecessor's version as one of this cycle, and return it."""
    with context.read_session() as session:
        adapter = get_adapter(session, version)
        source = get_environment(session, adapter.environment_hash)
    record = EnvironmentRecord(
        source.hash, source.source_code, context.cycle_id, adapter.capability, source.seed, INHERITED, context.now()
    )
    with context.write_session() as session:
        save_environment(session, record)
    return record


def is_inherited(context: Context, environment: str) -> bool:
    """Return whether the cycle has taken over an environment."""
    with context.read_session() as session:
        records = list_environments(session, context.cycle_id)
    return any(record.hash == environment and record.synthesizer == INHERITED for record in records)


def solved_by_base(report: AdmissionReport, model: str) -> str:
    """Return why an inherited environment is not needed: the new base model solves it; "" if it does not."""
    for check in report.checks:
        if check.name == CALIBRATION and not check.passed and "mean" in check.evidence:
            mean, (_, highest) = check.evidence["mean"], check.evidence["mean_allowed"]
            if mean > highest:
                return (
                    f"{CLOSED}{model} has it without an adapter: mean reward {percent(mean)} in "
                    f"env:{report.environment_hash[:12]}, over {percent(highest)}"
                )
    return ""


def attempts_of(settings: Settings) -> int:
    """Return the maximum number of environments per capability; one that is taken over is not written."""
    return settings.synthesis.max_environments + bool(settings.model.predecessor)
