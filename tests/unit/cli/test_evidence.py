"""The lines of the evidence behind an adapter that a language model's analysis adds."""

from types import SimpleNamespace

from store.records import Citation
from traced.cli.evidence import _citation_lines


def test_citations_have_their_reasons() -> None:
    citations = [
        Citation("c", "x", 0, "t-1", 7, "the fee was not \x1b[31mchecked", "Check the fee first."),
        Citation("c", "x", 1, "t-2", 9),
    ]
    lines = list(_citation_lines(SimpleNamespace(faults={}, citations=citations)))  # type: ignore[arg-type]
    assert lines[0] == "citations    message 7 of t-1, message 9 of t-2"
    (reason,) = lines[1:]
    assert reason.strip().startswith("message 7: the fee was not")
    assert reason.endswith('; the policy says "Check the fee first."')
    assert "\x1b" not in reason
