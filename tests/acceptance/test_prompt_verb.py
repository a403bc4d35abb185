"""``traced optimize-prompt`` and ``traced show patch`` as a user runs them: what is missing, what is shown."""

import re
from pathlib import Path
from typing import Any

import pytest

from store.records import PromptPatch
from store.repositories.llm_replies import save_patch
from tests.acceptance.conftest import Traced
from tests.acceptance.prompted import admit, analysed, on_store
from tests.integration.test_routing import ADAPTER, COMPOUND, CYCLE
from tests.unit.store.chain import T0, later
from traced.core.ownership import this_user

TINY: dict[str, Any] = {
    "prompting.minibatch": 2,
    "prompting.validation": 2,
    "training.iterations": 1,
    "training.groups": 3,
    "training.rollouts": 6,
    "gate.seeds": 2,
    "gate.max_rounds": 1,
    "collect.max_turns": 3,
    "engine.start_timeout_s": 300,
}
SETTINGS = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with a cycle of these settings and an environment without an admission."""
    return analysed(tmp_path / "traced-data", TINY)


@pytest.fixture
def admitted_dir(data_dir: Path) -> Path:
    return admit(data_dir)


def test_without_a_cycle_it_says_how_to_begin(traced: Traced) -> None:
    result = traced("optimize-prompt", COMPOUND)
    assert result.code == 1
    assert "has no cycle" in result.err
    assert "Try: traced collect" in result.err


def test_an_unknown_capability_is_told_from_those_that_there_are(traced: Traced, data_dir: Path) -> None:
    result = traced("optimize-prompt", "flying", "--json", *SETTINGS)
    assert result.code == 1
    assert result.json["error"]["message"] == f"'flying' is not a retained capability of cycle {CYCLE}"
    assert result.json["error"]["hint"] == f"one of: {COMPOUND}"


def test_without_an_admitted_environment_it_names_the_verb_that_admits(traced: Traced, data_dir: Path) -> None:
    result = traced("optimize-prompt", COMPOUND, *SETTINGS)
    assert result.code == 1
    assert f"{COMPOUND} has no admitted environment" in result.err
    assert f"Try: traced admit {COMPOUND}" in result.err


def test_without_a_language_model_it_names_the_setting(traced: Traced, admitted_dir: Path) -> None:
    result = traced("optimize-prompt", COMPOUND, *SETTINGS)
    assert result.code == 1
    assert "the setting llm.model is empty" in result.err
    assert "llm.model" in result.err


@pytest.fixture
def patched(data_dir: Path) -> str:
    """The id of a sufficient patch; an older, insufficient one exists too."""
    with on_store(data_dir) as session:
        save_patch(session, PromptPatch(CYCLE, COMPOUND, "Do some of it.", FIGURES | {"enough": "neither"}, T0))
        return save_patch(
            session, PromptPatch(CYCLE, COMPOUND, "Do all of it.\n\nAnd [bold]all[/].", FIGURES, later(9))
        )


def test_a_patch_is_shown_by_the_first_digits_of_its_id_and_named_beside_its_adapter(
    traced: Traced, patched: str
) -> None:
    result = traced("show", "patch", patched[:8])
    assert result.code == 0, result.err
    assert f"{COMPOUND}: a prompt is enough" in result.out
    assert "\nDo all of it.\n\nAnd [bold]all[/].\n" in result.out
    assert "environment: base 40.0 %, prompt 60.0 %, +20.0 points [+10.0, +30.0]" in result.out
    assert "compared     both sides on the same seeds" in result.out
    assert "rollouts (the number of the adapter's training); reward on" in result.out
    assert "append the text to your agent's system prompt" in result.out
    assert traced("show", "patch", patched, "--json").json["enough"] == "a prompt is enough"
    assert f"prompt       a prompt is enough: traced show patch {patched[:12]}" in traced("explain", ADAPTER).out


def test_patches_are_listed_newest_first_and_the_one_that_is_enough_stands_in_the_status(
    traced: Traced, patched: str
) -> None:
    listing = traced("prompts")
    rows = [line for line in listing.out.splitlines() if COMPOUND in line]
    assert [patched[:12] in row for row in rows] == [True, False]
    assert "a prompt is enough" in rows[0]
    assert "40 % to 60 % on 200 seeds" in rows[0]
    assert "neither" in rows[1]
    assert "traced show patch PATCH --into FILE" in listing.out
    assert [row["text"] for row in traced("prompts", COMPOUND, "--json").json["prompts"]][1] == "Do some of it."
    assert "No prompt patches. Next: traced optimize-prompt flying" in traced("prompts", "flying").out
    sentence = f"A prompt is enough for {COMPOUND}: traced show patch {patched[:12]} --into FILE writes its text"
    assert sentence in traced("status").out
    assert [row["id"] for row in traced("status", "--json").json["prompts"]] == [patched]


def test_who_takes_a_prompt_and_why_is_kept_and_told_wherever_the_prompt_is(traced: Traced, patched: str) -> None:
    short_id, signature = patched[:12], f"{this_user()}, on behalf of ann"
    assert f"Then record that: traced approve {short_id}" in traced("show", "patch", short_id).out
    approval = traced("approve", short_id, "--who", "ann", "--reason", "it reads well")
    assert approval.out == (
        f"the prompt {short_id} for {COMPOUND} is approved. Next: "
        f"traced show patch {short_id} --into FILE writes its text\n"
    )
    assert f"A prompt is enough for {COMPOUND}: {short_id}, approved by {signature}" in traced("status").out
    assert [row["decision"] for row in traced("status", "--json").json["prompts"]] == ["approved"]
    output = traced("show", "patch", short_id).out
    assert f"decision     approved by {signature} on 20" in output
    assert ", because it reads well" in output
    assert "record that" not in output
    assert traced("show", "patch", short_id, "--json").json["decision"]["who"] == signature
    assert f"approved by {signature}" in traced("prompts").out
    assert f"traced show patch {short_id}; approved by {signature} on 20" in traced("explain", ADAPTER).out
    [tag] = re.findall("--tag ([0-9a-f]{16})", traced("reject", short_id).err)
    assert traced("reject", short_id, "--tag", tag, "--json").json["decision"]["decision"] == "rejected"
    older = traced("prompts", "--json").json["prompts"][1]["patch"]
    refusal = traced("approve", older)
    assert (refusal.code, "cannot be approved: neither" in refusal.err) == (1, True)
    assert "Try: traced prompts" in traced("approve", "ffff").err
    assert "--policy: can only be used with an adapter" in traced("approve", short_id, "--policy", "canary").err


def test_whoever_decided_and_however_narrow_the_terminal_the_list_names_the_prompt(
    traced: Traced, patched: str
) -> None:
    assert traced("approve", patched, "--who", "ann [/] \x1b[31m", "--reason", "\x1b[2J").code == 0
    listing = traced("prompts", env={"COLUMNS": "80"})
    assert listing.code == 0
    assert patched[:12] in listing.out
    outputs = [traced(*words).out for words in (["status"], ["show", "patch", patched], ["explain", ADAPTER])]
    assert all("ann [/]" in output and "\x1b" not in output for output in outputs)
    assert len(traced("explain", ADAPTER, "--json").json["prompt_decisions"]) == 1


def test_its_text_is_taken_into_a_file_that_was_not_there(traced: Traced, patched: str, tmp_path: Path) -> None:
    file = tmp_path / "patch.txt"
    assert f"Wrote the text to {file}" in traced("show", "patch", patched[:6], "--into", file).out
    assert file.read_text() == "Do all of it.\n\nAnd [bold]all[/].\n"
    file.write_text("mine")
    repeated = traced("show", "patch", patched[:6], "--into", file)
    assert (repeated.code, file.read_text()) == (1, "mine")
    assert "already exists" in repeated.err
    assert "cannot be written" in traced("show", "patch", patched[:6], "--into", tmp_path / "no" / "patch").err


def test_a_patch_that_is_not_there_or_not_one_names_what_lists_them(traced: Traced, patched: str) -> None:
    result = traced("show", "patch", "zz")
    assert result.code == 1
    assert "Try: traced prompts" in result.err
    ambiguous = traced("show", "patch", "")
    assert ambiguous.code == 1
    assert "2 prompt patches have ids that begin with ''" in ambiguous.err
    assert patched[:12] in ambiguous.err


FIGURES: dict[str, Any] = {
    "enough": "a prompt is enough",
    "environment": "e" * 64,
    "evolution": {
        "validation": 0.6,
        "first": 0.4,
        "kept": 2,
        "proposed": 5,
        "rollouts": 60,
        "stopped_by": "rollouts",
        "budget": 64,
        "seeds": 8,
    },
    "spent": {"calls": 5, "prompt_tokens": 5000, "completion_tokens": 500, "cost": 0.25, "seconds": 9.0},
    "gates": {
        "prompt": {
            "adapter": "base+0123456789ab",
            "answer": "pass",
            "rounds": 1,
            "comparisons": [
                {
                    "name": "environment",
                    "seeds": 200,
                    "base": 0.4,
                    "adapter": 0.6,
                    "difference": 0.2,
                    "low": 0.1,
                    "high": 0.3,
                    "level": 0.95,
                    "required": 0.02,
                    "answer": "pass",
                }
            ],
        }
    },
}
