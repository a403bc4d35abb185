"""Options that commands share."""

from pathlib import Path

from traced.cli.options import repeated


def test_a_next_command_has_the_settings_of_this_one() -> None:
    assert repeated("traced analyze", None, None, model=None, seed=None, collect__episodes=None) == "traced analyze"
    command = repeated("traced analyze", Path("my data"), ["llm.model=m"], model="bundled", seed=3, collect__episodes=6)
    assert command == (
        "traced analyze --data-dir 'my data' --set llm.model=m --model bundled --seed 3 --set collect.episodes=6"
    )
