"""The file in a model's answer: whatever stands around it, whatever the model did to it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as some

from agents.synthesizer.llm.answer import extract_file, holds_environment

WHOLE = '''"""A small one."""

import json


class Environment:
    def reset(self, seed):
        return json.dumps(seed)

    def step(self, message):
        return []

    def done(self):
        return True

    def score(self):
        return 0

    def oracle(self):
        yield {}
'''
SKETCH = "class Environment:\n    def reset(self, seed): ...\n"
IN_A_LIST = "1. The file:\n\n" + "\n".join(f"   {line}".rstrip() for line in f"```python\n{WHOLE}```".split("\n"))
WITH_A_FENCE = WHOLE.replace("A small one.", "A small one:\n\n```\nreset, step\n```\n")


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE,
        f"```python\n{WHOLE}```",
        f"```python\n{WHOLE}",  # the closing fence is gone
        f"~~~~ py\n{WHOLE}\n~~~~",
        f"Here it is.\n\n```py title=environment.py\n{WHOLE}```\n\nIt has *one* class.",
        f"First a sketch:\n```python\n{SKETCH}```\nand now the file:\n```python\n{WHOLE}```\nDone.",
        f"```python\n{WHOLE}```\nUsed like this:\n```python\nEnvironment().reset(0)\n```",
        f"```python\n{WHOLE}```\nWhat changed:\n```python\n{SKETCH}```",
        f"```json\n{{}}\n```\n```\n{WHOLE}```",
        f"Sure! Here is the file.\n\n{WHOLE}\nI hope this helps: it is deterministic.\nBye.",
        f"<think>```python\n{SKETCH}```\nHm, no.</think>\n```python\n{WHOLE}```",
        f"```python\r\n{WHOLE}```".replace("\n", "\r\n").replace("\r\r", "\r"),
        f"\ufeff{WHOLE}",
        IN_A_LIST,
    ],
)
def test_the_whole_file_comes_out(answer: str) -> None:
    assert extract_file(answer) == WHOLE


def test_a_file_with_a_fence_in_it_stays_whole() -> None:
    assert extract_file(f"Here:\n```python\n{WITH_A_FENCE}```\nThat is all.") == WITH_A_FENCE


@pytest.mark.parametrize(
    "answer", ["I cannot help with that.", "", "  \n", "```python\nprint(1)\n```", "The class Environment is hard."]
)
def test_what_is_no_file_is_kept_as_it_was_said(answer: str) -> None:
    assert not holds_environment(answer)
    assert extract_file(answer) == f"{answer.strip()}\n"


def test_a_file_that_was_cut_off_is_kept_as_far_as_it_goes() -> None:
    assert extract_file(f"Here:\n```python\n{WHOLE[:150]}") == f"{WHOLE[:150].strip()}\n"
    assert extract_file(f"Here:\n```python\n{WHOLE}    def more(self, ") == f"{WHOLE}    def more(self,\n"


def test_what_no_database_takes_is_replaced() -> None:
    assert (
        extract_file("```\nclass Environment:\n    x = '\ud800\0'\n```")
        == "class Environment:\n    x = '\ufffd\ufffd'\n"
    )


@pytest.mark.parametrize(
    "answer",
    [
        "```\nclass Environment: pass\n" * 40_000,
        "```python\n" * 100_000 + WHOLE,
        "````\n" + "```\n" * 250_000,
        "``` " + " " * 1_000_000 + "`",
        "class Environment:\n" + "x = (\n" * 150_000,
        "import x\n" + "(" * 1_000_000 + "\nclass Environment: pass",
    ],
    ids=["many blocks", "many openings", "many fences", "spaces", "open brackets", "deep"],
)
def test_a_huge_answer_is_read_in_a_moment(answer: str) -> None:
    begun = time.process_time()
    extract_file(answer)
    assert time.process_time() - begun < 10


@given(some.text(alphabet="`~ \nclassEnvironment:def\t\"'()#", max_size=300))
def test_nothing_raises_and_nothing_is_lost_but_the_words_around(answer: str) -> None:
    found = extract_file(answer)
    assert found.endswith("\n")
    assert holds_environment(found) or found == f"{answer.strip()}\n"


@given(some.text(max_size=200))
def test_any_prose_before_and_after_a_fence_leaves_the_file_alone(prose: str) -> None:
    prose = prose.replace("`", "").replace("~", "").replace("</think>", "").replace("class Environment", "")
    assert extract_file(f"{prose}\n```python\n{WHOLE}```\n{prose}") == WHOLE
