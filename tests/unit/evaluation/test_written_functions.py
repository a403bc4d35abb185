"""Which functions of a model are used: those that answer unseen calls where the builtin world does not."""

from dataclasses import asdict

from agents.world.agreement import CallAgreement
from agents.world.calls import AnsweredCall, Conversation
from traced.evaluation.written_functions import (
    ComparedConversation,
    FunctionProof,
    WrittenFunctions,
    function_proofs,
    read_functions,
)


def agreement(tool: str, task: str, answer: str) -> CallAgreement:
    """Return the comparison of a call: its answer is "equal", "wrong", "other error" or "" for none."""
    return CallAgreement(
        task,
        tool,
        is_write=False,
        is_answered=bool(answer),
        is_exact=answer == "equal",
        fields=0.0,
        has_error_class=answer != "other error",
        is_error=False,
        shows_state=False,
    )


def comparison(task: str, *rows: tuple[str, str, str]) -> ComparedConversation:
    """Return a conversation of calls: tool, answer of the builtin world, answer with functions; all about one order."""
    calls = [AnsweredCall(task, tool, {"order": task}, "{}", {}, False) for tool, _, _ in rows]
    return ComparedConversation(
        Conversation(task, task, calls),
        [agreement(tool, task, builtin) for tool, builtin, _ in rows],
        [agreement(tool, task, answer) for tool, _, answer in rows],
    )


def proof(rows: list[ComparedConversation], tool: str = "pay", writes: tuple[str, ...] = ("pay",)) -> FunctionProof:
    """Return the proof of one tool's function, whose tool writes according to the builtin world."""
    (result,) = function_proofs(rows, [tool], writes, ["pay"])
    return result


def test_a_function_that_answers_more_calls_equally_is_used() -> None:
    result = proof(
        [comparison(task, ("pay", "", "equal")) for task in "abcdefghi"] + [comparison("j", ("pay", "", "wrong"))]
    )
    assert result == FunctionProof("pay", 10, 0, 0, 10, 9)
    assert result.is_used
    assert "9 of 10 answers equal; without its function 0 of 0" in result.text


def test_a_function_below_the_bounds_is_not_used() -> None:
    wrong = proof(
        [comparison(task, ("pay", "", "equal")) for task in "abcde"] + [comparison("f", ("pay", "", "wrong"))]
    )
    assert wrong.refusal == "5 of its 6 answers are equal"
    assert not wrong.is_used
    assert wrong.refusal in wrong.text


def test_answers_of_the_builtin_world_do_not_hide_wrong_ones_of_a_function() -> None:
    rows = [comparison(str(n), ("pay", "equal", "equal")) for n in range(50)]
    result = proof([*rows, *[comparison(f"x{n}", ("pay", "", "wrong")) for n in range(3)]])
    assert result.refusal == "0 of its 3 answers are equal"


def test_calls_of_one_task_are_too_little_evidence() -> None:
    assert "fewer than 2 tasks" in proof([comparison("a", ("pay", "", "equal"), ("pay", "", "equal"))]).refusal


def test_a_function_that_adds_nothing_is_not_used() -> None:
    rows = [comparison(task, ("pay", "equal", "equal")) for task in "abc"]
    assert proof(rows).refusal == "the builtin world answers as many calls"


def test_a_write_is_used_for_the_reads_that_its_changes_answer() -> None:
    rows = [comparison(task, ("pay", "equal", "equal"), ("order", "", "equal")) for task in "abc"]
    assert proof(rows).is_used


def test_a_write_after_which_reads_are_wrong_is_not_used() -> None:
    rows = [comparison(task, ("pay", "", "equal"), ("order", "", "wrong")) for task in "abc"]
    assert proof(rows).refusal == "0 of 3 reads of what it changes are equal"
    # A read of something else says nothing about it.
    rows = [
        ComparedConversation(
            Conversation(
                "c", task, [item.conversation.calls[0], AnsweredCall(task, "order", {"order": "?"}, "", {}, False)]
            ),
            item.builtin,
            item.with_functions,
        )
        for task, item in zip("abc", rows, strict=True)
    ]
    assert proof(rows).is_used


def test_without_any_answer_only_the_role_of_a_tool_is_used() -> None:
    rows = [comparison(task, ("pay", "", "")) for task in "ab"]
    result = proof(rows, writes=())
    assert result.corrects_role
    assert not result.is_used
    assert not proof(rows).corrects_role
    # No call was replayed, so nothing speaks for it.
    assert not proof([comparison("a", ("order", "", ""))], writes=()).corrects_role


def test_functions_are_read_as_they_were_written() -> None:
    proofs = [proof([comparison(task, ("pay", "", "equal")) for task in "ab"])]
    functions = WrittenFunctions("TOOLS = {}", proofs, ["pay"], "", [None, 2])
    assert functions.tools == ["pay"]
    assert functions.roles == {"pay": True}
    assert read_functions(asdict(functions)) == functions
    assert read_functions(None) is None
    assert WrittenFunctions("", proofs, reason="no").tools == []
