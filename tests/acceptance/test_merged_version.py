"""A merged adapter from its publication over approval and evidence to the rollback, by the commands that a user has."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from agents.synthesizer.builtin import synthesize
from sandbox.hashing import environment_hash
from store.records import EnvironmentRecord
from store.repositories.adapters import save_adapter, save_training_run
from store.repositories.capabilities import save_capabilities
from store.repositories.environments import save_admission, save_environment
from store.repositories.gates import save_gate
from store.types import AdmissionReport, Check
from tests.acceptance.conftest import Traced
from tests.unit.agents.synthesis.conversations import capability, demonstrations
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import GATE, T0, adapter, training_run
from traced.core.ownership import this_user
from traced.inference.model_files import BUNDLED_MODELS, ModelFiles
from traced.pipeline.context import Context
from traced.pipeline.merged_version import Recipe, merge_members, publish_merge
from traced.registry.publication import publish
from traced.training.adapter_folder import save_adapter as save_weights

BUNDLED = BUNDLED_MODELS["bundled"]
MEMBERS = ("error-recovery", "multi-step-completion")
MERGED = "merged@v1"

pytestmark = pytest.mark.docker


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with ``date-reasoning@v1`` live, and the gated merge of two other adapters."""
    directory = tmp_path / "traced-data"
    with context_with_chain(directory, {}) as chain:
        context = replace(chain, model=ModelFiles("bundled", BUNDLED))
        members = [save_member(context, name, seed) for seed, name in enumerate(MEMBERS)]
        [(method, folder)] = merge_members(context, members, [Recipe("mean", 1.0)]).items()
        assert asyncio.run(publish_merge(context, members, method, folder)) == MERGED
        with context.write_session() as session:
            save_gate(session, replace(GATE, adapter=MERGED), cycle_id="c1", at=T0)
    return directory


def save_member(context: Context, name: str, seed: int) -> str:
    """Store a version with weights of its own and the built-in synthesizer's environment; return its name."""
    trajectories, labels = demonstrations()
    source = synthesize(capability(name), trajectories, labels, seed=seed)
    run = replace(training_run(name), capability=name, environment_hash=environment_hash(source))
    published = publish(write_weights(context.run_dir / name, seed), context.data_dir / "adapters", name, origin=run.id)
    version = replace(
        adapter(),
        name=published.name,
        capability=name,
        path=str(published.path),
        files=published.files,
        training_run_id=run.id,
        environment_hash=run.environment_hash,
    )
    admission = AdmissionReport(run.environment_hash, True, [Check("oracle", True, {}, 0.1)])
    with context.write_session() as session:
        save_capabilities(session, "c1", [capability(name)])
        save_environment(session, EnvironmentRecord(run.environment_hash, source, "c1", name, seed, "builtin", T0))
        save_admission(session, admission, cycle_id="c1", at=T0)
        save_training_run(session, run)
        save_adapter(session, version)
    return version.name


def write_weights(folder: Path, seed: int) -> Path:
    """Write an adapter of the bundled model whose update is not zero."""
    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(BUNDLED), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    for key, weight in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(weight, std=0.01)
    save_weights(model, folder)
    return folder


def test_a_merged_version_is_approved_explained_verified_and_rolled_back(traced: Traced, data_dir: Path) -> None:
    assert traced("status", "--json").json["waiting"] == [MERGED]
    approved = traced("approve", MERGED, "--yes", "--who", "ann", "--json")
    assert approved.code == 0, approved.err
    assert MERGED in approved.json["live"]
    chain = traced("explain", MERGED).out
    for piece in (
        "members      error-recovery@v1, multi-step-completion@v1; traced explain NAME shows",
        "mean merge at scale 1",
        f"approved by {this_user()}, on behalf of ann",
        f"live by {this_user()}, on behalf of ann",
    ):
        assert piece in chain
    assert "rollouts" not in chain
    verified = traced("verify", "--json")
    assert verified.code == 0, verified.out
    undone = traced("rollback", MERGED, "--yes", "--json")
    assert undone.json["rolled_back"] == MERGED
    assert MERGED not in undone.json["live"]
