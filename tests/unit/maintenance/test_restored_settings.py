"""Commands that a restored traced.toml names are comments, however the file spells them."""

import re
import tomllib

import pytest

from traced.config.settings import template, valid_keys
from traced.maintenance.restored_settings import DISABLED_KEYS, NOTE, without_commands

SPELLINGS = {
    "inline": '[notify]\ntimeout_s = 3.0\ncommands = [{name = "x", argv = ["/bin/x"]}]\n',
    "several lines": '[notify]\ntimeout_s = 3.0\ncommands = [\n  {name = "x", argv = [\n "/bin/x"]},\n]\n',
    "array of tables": '[notify]\ntimeout_s = 3.0\n\n[[notify.commands]]\nname = "x"\nargv = ["/bin/x"]\n',
    "spaced": '[notify]\ntimeout_s = 3.0\n# me\n[[ notify . "commands" ]] # [\nargv = ["x"]\nname = "x"\n',
    "dotted": 'notify.timeout_s = 3.0\nnotify."commands" = [{name = "x", argv = ["/bin/x"]}]\n',
    "escaped": '[notify]\ntimeout_s = 3.0\n"\\u0063ommands" = [{name = "x", argv = ["/bin/x"]}]\n',
    "in a text": '[notify]\ntimeout_s = 3.0\ncommands = [{name = "x", argv = ["""\n[seed]\n""", \'\'\'\n]\n\'\'\']}]\n',
    "Windows": '[notify]\r\ntimeout_s = 3.0\r\ncommands = [{name = "x", argv = ["/bin/x"]}]\r\n',
    "vLLM": '[engine]\nvllm_python = "/tmp/python"\nvllm_args = ["--middleware=x.y"]\n[notify]\ntimeout_s = 3.0\n',
    "removed": '[api]\noperator_token_file = "/tmp/python"\n[notify]\ntimeout_s = 3.0\n',
    "target": '[target]\nfactory = "/tmp/python"\n[notify]\ntimeout_s = 3.0\n',
    "trusted target": '[target]\ntrusted = true\npython = "/tmp/python"\n[notify]\ntimeout_s = 3.0\n',
    "earlier name": '[serving]\nvllm_python = "/tmp/python"\n[notify]\ntimeout_s = 3.0\n',
}


@pytest.mark.parametrize("text", SPELLINGS.values(), ids=SPELLINGS)
def test_a_command_is_off_and_all_other_settings_stay(text: str) -> None:
    text = f"seed = 5\n# a comment\n{text}[log]\nlevel = 'debug'\n"
    restored, disabled = without_commands(text)
    remaining = {"seed": 5, "log": {"level": "debug"}, "notify": {"timeout_s": 3.0}}
    assert {name: section for name, section in tomllib.loads(restored).items() if section} == remaining
    assert "# a comment\n" in restored
    # What a person has to do to turn it on again.
    turned_on = re.sub(r"^# ", "", restored.replace(f"{NOTE}\n", ""), flags=re.MULTILINE)
    assert tomllib.loads(turned_on.replace("a comment\n", "").replace("me\n", "")) == tomllib.loads(text)
    assert any("/bin/x" in line or "argv" in line or "/tmp/python" in line for line in disabled)
    assert without_commands(restored) == (restored, [])


@pytest.mark.parametrize(
    "text",
    [
        'notify = {commands = [{name = "x", argv = ["x"]}], timeout_s = 3.0}\n',
        "this = is = no TOML [\n",
        'log.file = "a"\nlog.file = "b"\n[notify]\ncommands = [{name = "x", argv = ["x"]}]\n',
    ],
    ids=["one line with others", "invalid", "invalid when whole"],
)
def test_what_cannot_be_separated_is_off_as_a_whole(text: str) -> None:
    restored, disabled = without_commands(f"seed = 5\n{text}")
    assert "notify" not in tomllib.loads(restored)
    assert set(text.splitlines()) <= set(disabled)


def test_a_file_without_commands_is_unchanged() -> None:
    empty = '[notify]\ncommands = []\n[engine]\nvllm_python = ""\n'
    for text in ("", "seed = 5", template(), empty, template().replace("# commands", "commands")):
        assert without_commands(text) == (text, [])


def test_every_setting_that_names_a_program_is_known() -> None:
    keys = {key for key in valid_keys() if re.search(r"command|argv|python|args|module|plugin|script|program", key)}
    assert keys <= set(DISABLED_KEYS)
