"""docs/environments.md says what the code says."""

import re
from pathlib import Path

from sandbox import contract
from sandbox.admission.report.model import MEANS
from sandbox.admission.static_analysis import MODULES
from sandbox.contract import Environment
from tests.fixtures.environments.unsound import unsound_names

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/environments.md").read_text("utf-8")


def test_every_check_is_described_as_in_the_report() -> None:
    checks = PAGE.partition("## Checking it")[2]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", checks, re.MULTILINE)) == MEANS


def test_every_method_of_the_contract_is_described() -> None:
    public = {name for name in vars(Environment) if not name.startswith("_")}
    assert {name for name in public if f"`{name}" in PAGE} == public


def test_the_modules_that_may_be_imported_stand_on_the_page_and_in_the_contract() -> None:
    page_modules = PAGE.partition("- **Imports** come from this list: ")[2].partition(";")[0]
    assert re.findall(r"`([\w.]+)`", page_modules) == sorted(MODULES)
    contract_modules = (contract.__doc__ or "").partition("and no others:")[2].partition("and of these")[0]
    assert contract_modules.split() == sorted(MODULES)


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).resolve().exists(), target


def test_the_number_of_fixtures_is_right() -> None:
    sound = list((ROOT / "tests/fixtures/environments/sound").glob("*.py"))
    assert f"{len(sound)} sound ones" in PAGE
    assert f"has {len(unsound_names())} mutations" in PAGE
