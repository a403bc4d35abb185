"""Cases of each family's documented form: texts and their meaning, conversations and the end of their rendered text.

``tests/data/chat_formats`` was written from the families' documentation before the parsers ran on it.
``chat_formats_blind`` was written by somebody who had seen neither the parsers nor those cases. Left out of it: cases
with more than one right reading, and conversations whose thinking the template for training keeps. For eight broken
calls it has the visible text without control tokens, which is this project's rule.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from sandbox.contract import Message
from tests.unit.inference import families
from traced.inference.chat_format import ChatFormat

FILES = sorted((Path(__file__).parents[2] / "data" / "chat_formats").glob("*.json"))
CASES: dict[str, dict[str, Any]] = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in FILES}
BLIND = {
    file.stem: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((Path(__file__).parents[2] / "data" / "chat_formats_blind").glob("*.json"))
}
BLIND_TEMPLATES = [(stem, template) for stem, cases in BLIND.items() for template in cases["templates"]]
# Splits a control token that the model wrote as plain text.
MARK = "\ue000"
TEMPLATES = [(stem, template) for stem, cases in CASES.items() for template in cases["templates"]]
# transformers strips the white space of a parameter.
STRIPPED = {"string of several lines", "leading spaces in a string"}


def meaning(message: Message) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {
        "content": message["content"],
        "calls": [[call["name"], call["arguments"]] for call in calls],
        "reasoning": message.get("reasoning_content", ""),
    }


def expected(case: dict[str, Any]) -> dict[str, Any]:
    # As JSON text, because 1 == True.
    calls = [[name, json.dumps(arguments, ensure_ascii=False)] for name, arguments in case["calls"]]
    return {"content": case["content"], "calls": calls, "reasoning": case["reasoning"]}


@pytest.mark.parametrize(("stem", "template"), TEMPLATES)
def test_a_turn_is_read_as_its_family_documents_it(stem: str, template: str) -> None:
    form, cases = ChatFormat(families.tokenizer(template)), CASES[stem]
    results = {
        case["name"]: meaning(form.parse(form.tokenizer.encode(case["text"]), tools=cases["tools"]))
        for case in cases["parse"]
    }
    assert results == {case["name"]: expected(case) for case in cases["parse"]}


@pytest.mark.parametrize(("stem", "template"), TEMPLATES)
def test_a_conversation_is_rendered_as_its_family_documents_it(stem: str, template: str) -> None:
    form, cases = ChatFormat(families.tokenizer(template)), CASES[stem]["render"]
    texts = {case["name"]: form.tokenizer.decode(form.render(case["messages"], case["tools"])) for case in cases}
    ends = {case["name"]: texts[case["name"]][-len(case["tail"]) :] for case in cases}
    assert ends == {case["name"]: case["tail"] for case in cases}


@pytest.mark.parametrize(("stem", "template"), BLIND_TEMPLATES)
def test_a_turn_is_read_as_somebody_else_reads_it(stem: str, template: str) -> None:
    form, cases = ChatFormat(families.tokenizer(template)), BLIND[stem]
    results = {
        case["name"]: meaning(form.parse(form.encode(case["text"], MARK), tools=cases["tools"]))
        for case in cases["parse"]
    }
    # No text at all is None beside calls, and may be empty alone.
    assert {name: {**result, "content": result["content"] or ""} for name, result in results.items()} == {
        case["name"]: {**expected(case), "content": case["content"] or ""} for case in cases["parse"]
    }


@pytest.mark.parametrize(("stem", "template"), BLIND_TEMPLATES)
def test_a_conversation_is_rendered_as_somebody_else_writes_it(stem: str, template: str) -> None:
    form = ChatFormat(families.tokenizer(template))
    cases = [case for case in BLIND[stem]["render"] if template in case.get("templates", [template])]
    assert cases
    texts = {case["name"]: form.tokenizer.decode(form.render(case["messages"], case["tools"])) for case in cases}
    ends = {case["name"]: texts[case["name"]][-len(case["tail"]) :] for case in cases}
    assert ends == {case["name"]: case["tail"] for case in cases}


# Slow because TRL takes seconds to import.
@pytest.mark.slow
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_6", "llama3_1", "gptoss"])
def test_trl_reads_well_formed_turns_in_the_same_way(template: str) -> None:
    from trl.chat_template_utils import add_response_schema, parse_response

    tokenizer = add_response_schema(families.tokenizer(template))
    form = ChatFormat(families.tokenizer(template))
    prefix = form.render([{"role": "user", "content": "u"}], [])
    cases = next(cases for cases in CASES.values() if template in cases["templates"])
    for case in cases["parse"]:
        if "canonical" not in case or ("qwen3_6" in template and case["name"] in STRIPPED):
            continue
        parsed = parse_response(tokenizer, tokenizer.encode(case["text"]), prefix=prefix, tools=cases["tools"])
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in parsed.get("tool_calls", [])]
        thinking = parsed.get("reasoning_content") or parsed.get("thinking") or ""
        assert (parsed["content"], calls, thinking) == (case["content"] or "", case["calls"], case["reasoning"])
