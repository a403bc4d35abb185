"""The environment of several capabilities together, and the trainings in it.

The mixture of the environments of some adapters is admitted because each of them is, and because its oracle solves its
seeds. Merged adapters are gated in it. ``composition.candidates`` may also train adapters in it, each as a version of
the capability ``merged``: ``mixture`` with GRPO on its rewards, for as many iterations as all capabilities together may
have; ``distilled`` from the adapters themselves, each the teacher in its own environment.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from sqlmodel import Session

from agents.synthesizer.mixture import mix
from sandbox.hashing import environment_hash
from store.records import EnvironmentRecord
from store.repositories.adapters import get_adapter, quarantined_adapters
from store.repositories.capabilities import get_capability, list_capabilities, save_capabilities
from store.repositories.cycles import get_cycle
from store.repositories.environments import get_environment, list_admissions, save_admission, save_environment
from store.repositories.promotions import serving_adapters
from store.types import AdmissionReport, Capability, Check
from traced.config.cycle_sections import TrainingSection
from traced.core.errors import CapabilityError
from traced.pipeline.context import Context
from traced.routing.composition import MERGED, capability_of

MIXTURE = "mixture"  # the synthesizer of the environment, its check, and the training with GRPO in it
DISTILLED = "distilled"  # the training by distillation
TRAININGS = (MIXTURE, DISTILLED)
ORACLE_SEEDS = 8


async def mixture(context: Context, adapters: Sequence[str]) -> list[tuple[str, str]]:
    """Return the trainings for several capabilities that the settings ask for, and the environment of each.

    Args:
        adapters: The versions of this cycle that passed their gate.
    """
    names = [name for name in TRAININGS if name in context.settings.composition.candidates]
    members, _ = members_and_live(context, adapters)
    if not names or not adapters or len(members) < 2:
        return []
    if DISTILLED in names and (reason := _undistillable(context, members)):
        context.progress.note(f"no adapter is distilled: {reason}")
        names.remove(DISTILLED)
    if not names:
        return []
    try:
        environment = await store_mixture(context, members)
    except CapabilityError as error:
        context.progress.note(f"no adapter is trained for several capabilities: {error.message}")
        return []
    return [(name, environment) for name in names]


def members_and_live(context: Context, adapters: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the versions that take part in compositions with ``adapters``, and those that answer now.

    In place of a live version in quarantine answers the one that its rollback would restore.
    """
    with context.read_session() as session:
        live = serving_adapters(session, get_cycle(session, context.cycle_id).model)
    adapters, live = sound(context, adapters), sound(context, live)
    new_capabilities = {capability_of(name) for name in adapters}
    # A merge of merges would count a member twice.
    other_versions = [name for name in live if capability_of(name) not in {*new_capabilities, MERGED}]
    return [*adapters, *other_versions], live


def sound(context: Context, names: Iterable[str]) -> list[str]:
    """Return the versions that are not in quarantine."""
    with context.read_session() as session:
        quarantined = quarantined_adapters(session)
    return [name for name in names if name not in quarantined]


async def store_mixture(context: Context, members: Sequence[str]) -> str:
    """Store the capability ``merged`` and the mixture of its members' environments, and return its hash.

    Raises:
        CapabilityError: The environments cannot be mixed, or the mixture's oracle fails.
    """
    with context.read_session() as session:
        versions = [get_adapter(session, name) for name in members]
        sources = [get_environment(session, version.environment_hash).source_code for version in versions]
        titles = [get_capability(session, version.cycle_id, version.capability).title for version in versions]
    try:
        source_code = mix(sources)
    except ValueError as error:
        raise CapabilityError(f"the environments of {', '.join(members)} cannot be mixed: {error}") from error
    needs = ", ".join(titles)
    capability = Capability(
        name=MERGED,
        title="Several capabilities",
        description=f"The task needs one or several of: {needs}.",
        when_needed=f"One of these capabilities is needed: {needs}.",
        exercised="The agent acts where one of them is needed.",
        lacking="The agent fails where one of them is needed.",
    )
    digest, at = environment_hash(source_code), context.now()
    evidence = {"environments": [version.environment_hash for version in versions], "members": [*members]}
    check = Check(MIXTURE, True, evidence, 0.0)
    await _check_oracle(context, source_code)
    record = EnvironmentRecord(digest, source_code, context.cycle_id, MERGED, context.settings.seed, MIXTURE, at)
    with context.write_session() as session:
        # An attempt with other members keeps the texts of the first one: a member may be quarantined in between.
        if MERGED not in {entry.name for entry in list_capabilities(session, context.cycle_id)}:
            save_capabilities(session, context.cycle_id, [capability])
        save_environment(session, record)
        save_admission(session, AdmissionReport(digest, True, [check]), cycle_id=context.cycle_id, at=at)
    return digest


async def _check_oracle(context: Context, source_code: str) -> None:
    """Raise ``CapabilityError`` unless the oracle solves the first seeds in the sandbox."""
    async with context.environment_source(source_code) as source:
        for seed in range(ORACLE_SEEDS):
            play = await source.oracle(seed)
            if not play.score.success:
                raise CapabilityError(f"the oracle of the mixture fails at seed {seed}")


def members_of(session: Session, cycle_id: str, environment: str) -> list[str]:
    """Return the adapter versions whose environments a mixture of this cycle has, in the order of their numbers."""
    for admission in reversed(list_admissions(session, environment, cycle_id=cycle_id)):
        for check in admission.report.checks:
            if check.name == MIXTURE:
                return [str(name) for name in check.evidence["members"]]
    return []


def _undistillable(context: Context, members: Sequence[str]) -> str:
    """Return why these versions cannot be the teachers of one adapter, "" if they can."""
    training = context.settings.training
    if training.shard:
        return "training.shard is set, and teachers need the whole base in each process"
    with context.read_session() as session:
        folders = {name: Path(get_adapter(session, name).path) for name in members}
    # A teacher's matrices are used at the scale of the trained adapter.
    reasons = (shape_mismatch(name, folder, training) for name, folder in folders.items())
    return next(filter(None, reasons), "")


def shape_mismatch(name: str, folder: Path, training: TrainingSection) -> str:
    """Return why the matrices of an adapter do not fit into one of these settings, "" if they do."""
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    for key, title, expected in (
        ("r", "rank", training.lora_r),
        ("lora_alpha", "lora_alpha", training.lora_alpha),
        ("use_rslora", "use_rslora", False),
    ):
        if config.get(key, False) != expected:
            return f"{name} has {title} {config.get(key)}, and the training has {expected}"
    return ""
