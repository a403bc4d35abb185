from typing import Any

import pytest

from sandbox.contract import Task
from tests.unit.training.tiny import tokenizer
from traced.inference.chat_format import ChatFormat, TurnFormat
from traced.inference.errors import TemplateError
from traced.inference.generation import Generation
from traced.training.rollouts import Conversation

TASK = Task("be kind", [{"role": "user", "content": "count 1 2 3"}], [])
MESSAGES = [{"role": "system", "content": TASK.system}, *TASK.messages]


@pytest.fixture(scope="module")
def tok() -> Any:
    return tokenizer()


def test_a_conversation_of_canonical_tokens_equals_the_rendered_one(tok: Any) -> None:
    template = TurnFormat(ChatFormat(tok))
    talk = Conversation(template, template.chat_format.render(MESSAGES, []))
    messages = [*MESSAGES]
    for text, answer in [
        ("1 2", [{"role": "user", "content": "again"}]),
        ("3", [{"role": "tool", "content": "heard"}]),
    ]:
        ids = [*tok.encode(text), tok.eos_token_id]
        talk.append_completion(Generation(ids, [-0.1] * len(ids), "stop"))
        talk.append_messages(answer)
        messages += [{"role": "assistant", "content": text}, *answer]
        assert talk.prompt == template.chat_format.render(messages, [])
    assert tok.decode([i for i, m in zip(talk.ids, talk.mask, strict=True) if m]) == "1 2<|im_end|>3<|im_end|>"
    assert all((lp == -0.1) == bool(m) for m, lp in zip(talk.mask, talk.logprobs, strict=True))


def test_sampled_ids_are_kept_even_where_the_text_would_tokenise_differently(tok: Any) -> None:
    template = TurnFormat(ChatFormat(tok))
    talk = Conversation(template, template.chat_format.render(MESSAGES, []))
    odd = [tok.convert_tokens_to_ids(c) for c in "again"]  # five letters where the tokenizer has longer tokens
    assert tok.encode("again") != odd
    talk.append_completion(Generation([*odd, tok.eos_token_id], [0.0] * 6, "stop"))
    talk.append_messages([{"role": "user", "content": "go"}])
    assert talk.ids[:5] == odd


def test_a_truncated_answer_is_closed_by_a_token_that_the_policy_did_not_sample(tok: Any) -> None:
    template = TurnFormat(ChatFormat(tok))
    talk = Conversation(template, template.chat_format.render(MESSAGES, []))
    talk.append_completion(Generation(tok.encode("1 2"), [-0.1] * len(tok.encode("1 2")), "stop"))
    talk.append_messages([{"role": "user", "content": "go"}])
    limit = len(tok.encode("1 2"))
    assert talk.ids[limit] == tok.eos_token_id
    assert talk.mask[limit] == 0


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}", "does not end a turn"),
        (
            "{% for m in messages %}{{ m.content if loop.last else m.content[:0] }}{{ '<|im_end|>' }}{% endfor %}",
            "renders an answer in another way",
        ),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused(template: str, text: str) -> None:
    tok = tokenizer()
    tok.chat_template = template
    with pytest.raises(TemplateError, match=text):
        TurnFormat(ChatFormat(tok))
