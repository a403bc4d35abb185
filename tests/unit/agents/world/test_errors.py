"""Conditions of errors: learned where the record has no exception, and nowhere else."""

from agents.world.calls import AnsweredCall
from agents.world.errors import ConditionedCall, error_rules
from agents.world.runtime import World
from agents.world.templates import template_of
from agents.world.values import fill, parsed

EMPTY: dict[str, dict[str, object]] = {"links": {}, "calls": {}, "writes": {}}


def calls(*entries: tuple[str, str]) -> list[ConditionedCall]:
    """Return calls with one argument, each of a task of its own; a text that begins with "no" is an error."""
    items = []
    for number, (value, text) in enumerate(entries):
        failed = text.startswith("no")
        call = AnsweredCall(str(number), "pay", {"with": value}, text, parsed(text), failed)
        items.append(ConditionedCall(call, World(EMPTY).conditions("pay", call.arguments)))
    return items


PAYMENTS = [(f"card-{n}", "paid") for n in range(5)]


def test_a_form_of_an_argument_that_always_fails_is_a_condition() -> None:
    rules, unexplained = error_rules(
        calls(*PAYMENTS, ("voucher-1", "no voucher-1 here"), ("voucher-2", "no voucher-2 here"))
    )
    assert unexplained == 0.0
    assert rules == [{"condition": '["argument",["with"],"#voucher-0"]', "template": 'no {{["with"]}} here'}]


def test_one_task_or_one_exception_or_a_text_with_other_values_gives_no_condition() -> None:
    for entries in (
        [("voucher-1", "no voucher-1")],
        [("voucher-1", "no voucher-1"), ("voucher-2", "no voucher-2"), ("voucher-3", "paid")],
        [("voucher-1", "no, 5 missing"), ("voucher-2", "no, 7 missing")],
    ):
        rules, unexplained = error_rules(calls(*PAYMENTS, *entries))
        assert rules == []
        assert unexplained > 0


def test_braces_of_the_target_are_text() -> None:
    mail = "Dear {{first_name}}, {{0}} {{[]}} room R7 is booked."
    assert template_of(mail, {"room": "R7"}) == mail
    assert fill("Dear {{first_name}}", {}) == "Dear {{first_name}}"
