"""Reads that belong before writes, in a domain that the analyst has never seen."""

from typing import Any, cast

from agents.analyst.intents import Request
from agents.analyst.preconditions import mine_links
from agents.analyst.tools import ToolKind
from agents.analyst.view import View, views
from store.types import Outcome
from tests.unit.agents.analysis.library import LOAN, agent, calls, talk, user


class Unassigned:
    """Finds one request in each conversation, which the words of no tool point to."""

    def requests(self, view: View) -> list[Request]:
        return [Request(1, "", frozenset({"Emma"}), frozenset(), frozenset({"alter", "emma"}))]


def test_a_refused_request_that_no_tool_serves_belongs_to_no_write() -> None:
    rows = views([talk(user("Alter Emma!"), calls("find_loan", LOAN, loan="L501"), agent("I cannot alter Emma."))])
    kinds = {"find_loan": ToolKind.READ, "renew_loan": ToolKind.WRITE}
    assert mine_links(rows, [Outcome.SUCCESS], kinds, {}, cast(Any, Unassigned())) == []
