"""What the benchmark of whole cycles counts in conversations, and how it measures the memory of processes."""

import subprocess
import sys
from dataclasses import replace

from benchmarks.target_cycles import MemorySampler, conversation_figures
from store.types import Message, Turn
from tests.unit.store.chain import trajectory


def test_calls_answers_and_the_longest_context_are_counted() -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    messages: list[Message] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "sent"},
        {"role": "assistant", "content": "It is sent."},
    ]
    turns = [Turn(1, [1] * 10, [2] * 5, [0.0] * 5, "stop"), Turn(3, [1] * 12, [2], [0.0], "stop")]
    conversations = [replace(trajectory("a"), messages=messages, turns=turns)]
    conversations.append(replace(trajectory("b"), messages=messages[:1], turns=[]))
    assert conversation_figures(conversations) == {
        "turns": 2,
        "tool_calls": 2,
        "tool_answers": 1,
        "longest_context": 15,
        "longest_prompt": 12,
    }
    assert conversation_figures([])["longest_context"] == 0


def test_the_peak_of_each_kind_of_process_is_sampled() -> None:
    # The command line of the child is that of a target's process.
    code = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, "targets/worker.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        sampler = MemorySampler(child.pid)
        sampler.sample()
        child.communicate()
    sampler.sample()
    assert sampler.counts == {"target": 1}
    assert sampler.peaks["target"] == sampler.total > 2**20
