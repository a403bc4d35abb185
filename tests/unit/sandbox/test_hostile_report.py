"""Reports whose texts an environment wrote to do harm: to a terminal, a page, a program that reads the data."""

import json
import re
import unicodedata
from html.parser import HTMLParser
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as some

from sandbox.admission.checks import CHECK_NAMES
from sandbox.admission.report import advice, as_data
from sandbox.admission.report.html import page
from sandbox.admission.report.model import examples
from store.types import AdmissionReport, Check
from tests.unit.sandbox.reports import REPORT_TIME, failed, printed, report_of

NASTY = "\x1b[31m[red]boo[/red] \u202eeno\u202c\x07 <script>alert(1)</script>\ud800 & \"'\u200b"
HARMFUL = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


class Elements(HTMLParser):
    """A parser that collects the elements of a page and the resources it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def nasty_report() -> AdmissionReport:
    evidence: dict[str, Any] = {
        NASTY: NASTY,
        "all": [NASTY] * 30,
        "of": {NASTY: {"a": NASTY}},
        "long": NASTY * 400,
        "allowed": {NASTY: 1, "a": 0},
        "refused": [NASTY],
        "events": [NASTY],
        "first": {"seed": NASTY, "text": NASTY},
        "difference": NASTY,
        "where": NASTY,
        "left_out": NASTY,
        "examples": [{"seed": NASTY, "what": NASTY, "transcript": [{"role": NASTY, "content": NASTY}, NASTY]}, NASTY],
    }
    fault = {
        "fault": "EnvironmentFault",
        "text": NASTY,
        "at": NASTY,
        "traceback": f'File "environment.py", line 1, in {NASTY}',
    }
    return report_of(*(failed(name, **fields) for name in [*CHECK_NAMES, NASTY] for fields in (evidence, fault)))


def harmful(text: str, but: str = "\n") -> set[str]:
    return {sign for sign in text if unicodedata.category(sign) in HARMFUL and sign not in but}


def test_hostile_text_is_harmless_on_a_terminal() -> None:
    output = re.sub(r"\x1b\[[0-9;]*m", "", printed(nasty_report(), NASTY))  # the styles of rich itself
    assert harmful(output) == set()
    assert "[red]boo[/red]" in output
    assert "\x1b[31m" not in printed(nasty_report(), NASTY).replace("\x1b[1;31m", "")


def test_hostile_text_is_harmless_on_a_page() -> None:
    html = page(nasty_report(), NASTY, REPORT_TIME)
    html.encode("utf-8")
    assert harmful(html) == set()
    tags = Elements()
    tags.feed(html)
    assert not tags.tags & {"script", "img", "link", "iframe", "red", "a", "object", "base"}
    assert tags.attributes <= {"lang", "charset", "name", "content", "http-equiv", "class"}
    assert tags.open == []
    assert "url(" not in html
    assert "default-src 'none'" in html


def test_hostile_text_is_harmless_as_data() -> None:
    data: Any = as_data(nasty_report())
    text = json.dumps(data)
    assert harmful(text) == set()
    json.dumps(data, ensure_ascii=False).encode("utf-8")
    for check in data["checks"]:
        assert harmful(json.dumps([check["advice"], check["figures"], check["examples"]], ensure_ascii=False)) == set()


JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(some.characters(), max_size=60),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
KNOWN_KEYS = (
    "allowed examples first refused events failed seeds share mean mean_allowed fault mixed mixed_required distinct "
    "distinct_required shapes shapes_required reset_p95 reset_allowed difference where left_out empty text foreign "
    "printed printed_characters loose"
)


@settings(max_examples=50)
@given(
    name=some.sampled_from(CHECK_NAMES),
    evidence=some.dictionaries(some.sampled_from(KNOWN_KEYS.split()) | some.text(max_size=8), JSON, max_size=6),
)
def test_any_evidence_can_be_read(name: str, evidence: dict[str, Any]) -> None:
    report = report_of(Check(name, False, evidence, 0.5))
    assert all(sentence and harmful(sentence, but="") == set() for sentence in advice(report.checks[0]))
    assert isinstance(examples(evidence), list)
    json.dumps(as_data(report), allow_nan=False)
    assert harmful(page(report, "x.py", REPORT_TIME)) == set()
    assert harmful(re.sub(r"\x1b\[[0-9;]*m", "", printed(report))) == set()
