"""vLLM's flags, as the settings say."""

import itertools
from pathlib import Path

import pytest

from traced.serving.errors import EngineStartError
from traced.serving.vllm import VllmOptions


def test_the_flags_come_from_the_settings_and_what_is_added_wins() -> None:
    flags = VllmOptions(Path("/m"), 4, 20, 2048, "hermes", ["--dtype=float32", "--max-loras=6"]).flags(8123)
    told = dict(itertools.pairwise(flags))
    assert told["--model"] == "/m"
    assert (told["--served-model-name"], told["--port"], told["--host"]) == ("base", "8123", "127.0.0.1")
    assert (told["--max-loras"], told["--max-lora-rank"], told["--max-model-len"]) == ("4", "32", "2048")
    assert told["--tool-call-parser"] == "hermes"
    assert flags[-2:] == ["--dtype=float32", "--max-loras=6"]
    assert "--tool-call-parser" not in VllmOptions(Path("/m"), 4, 16, 2048).flags(1)


def test_a_rank_that_vllm_cannot_serve_is_refused() -> None:
    with pytest.raises(EngineStartError, match="up to rank 512"):
        VllmOptions(Path("/m"), 4, 513, 2048).flags(1)
