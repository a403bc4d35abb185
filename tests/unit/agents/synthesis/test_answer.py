"""The file in a model's answer: whatever stands around it, whatever the model did to it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as some

from agents.synthesizer.llm.answer import extract_file, holds_environment

FULL_FILE = '''"""A small one."""

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
IN_A_LIST = "1. The file:\n\n" + "\n".join(f"   {line}".rstrip() for line in f"```python\n{FULL_FILE}```".split("\n"))
WITH_A_FENCE = FULL_FILE.replace("A small one.", "A small one:\n\n```\nreset, step\n```\n")


@pytest.mark.parametrize(
    "answer",
    [
        FULL_FILE,
        f"```python\n{FULL_FILE}```",
        f"```python\n{FULL_FILE}",  # the closing fence is gone
        f"~~~~ py\n{FULL_FILE}\n~~~~",
        f"Here it is.\n\n```py title=environment.py\n{FULL_FILE}```\n\nIt has *one* class.",
        f"First a sketch:\n```python\n{SKETCH}```\nand now the file:\n```python\n{FULL_FILE}```\nDone.",
        f"```python\n{FULL_FILE}```\nUsed like this:\n```python\nEnvironment().reset(0)\n```",
        f"```python\n{FULL_FILE}```\nWhat changed:\n```python\n{SKETCH}```",
        f"```json\n{{}}\n```\n```\n{FULL_FILE}```",
        f"Sure! Here is the file.\n\n{FULL_FILE}\nI hope this helps: it is deterministic.\nBye.",
        f"<think>```python\n{SKETCH}```\nHm, no.</think>\n```python\n{FULL_FILE}```",
        f"```python\r\n{FULL_FILE}```".replace("\n", "\r\n").replace("\r\r", "\r"),
        f"\ufeff{FULL_FILE}",
        IN_A_LIST,
    ],
)
def test_the_whole_file_comes_out(answer: str) -> None:
    assert extract_file(answer) == FULL_FILE


def test_a_file_with_a_fence_in_it_stays_whole() -> None:
    assert extract_file(f"Here:\n```python\n{WITH_A_FENCE}```\nThat is all.") == WITH_A_FENCE


@pytest.mark.parametrize(
    "answer", ["I cannot help with that.", "", "  \n", "```python\nprint(1)\n```", "The class Environment is hard."]
)
def test_an_answer_without_a_file_is_unchanged(answer: str) -> None:
    assert not holds_environment(answer)
    assert extract_file(answer) == f"{answer.strip()}\n"


def test_a_file_that_was_cut_off_is_kept_as_far_as_it_goes() -> None:
    assert extract_file(f"Here:\n```python\n{FULL_FILE[:150]}") == f"{FULL_FILE[:150].strip()}\n"
    assert extract_file(f"Here:\n```python\n{FULL_FILE}    def more(self, ") == f"{FULL_FILE}    def more(self,\n"


def test_characters_a_database_rejects_are_replaced() -> None:
    assert (
        extract_file("```\nclass Environment:\n    x = '\ud800\0'\n```")
        == "class Environment:\n    x = '\ufffd\ufffd'\n"
    )


@pytest.mark.parametrize(
    "answer",
    [
        "```\nclass Environment: pass\n" * 40_000,
        "```python\n" * 100_000 + FULL_FILE,
        "````\n" + "```\n" * 250_000,
        "``` " + " " * 1_000_000 + "`",
        "class Environment:\n" + "x = (\n" * 150_000,
        "import x\n" + "(" * 1_000_000 + "\nclass Environment: pass",
    ],
    ids=["many blocks", "many openings", "many fences", "spaces", "open brackets", "deep"],
)
def test_a_huge_answer_is_read_in_a_moment(answer: str) -> None:
    started = time.process_time()
    extract_file(answer)
    assert time.process_time() - started < 10


@given(some.text(alphabet="`~ \nclassEnvironment:def\t\"'()#", max_size=300))
def test_nothing_raises_and_nothing_is_lost_but_the_words_around(answer: str) -> None:
    result = extract_file(answer)
    assert result.endswith("\n")
    assert holds_environment(result) or result == f"{answer.strip()}\n"


@given(some.text(max_size=200))
def test_any_prose_before_and_after_a_fence_leaves_the_file_alone(prose: str) -> None:
    prose = prose.replace("`", "").replace("~", "").replace("</think>", "").replace("class Environment", "")
    assert extract_file(f"{prose}\n```python\n{FULL_FILE}```\n{prose}") == FULL_FILE
