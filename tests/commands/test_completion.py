"""`megallm completion`: what the scripts hold, and one run of the first in a real shell."""

import argparse
import io
import shutil
import subprocess

import pytest

from megallm.commands import completion


def script(shell: str) -> str:
    """Gives a shell's script for a command line of two commands."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    completion.add_arguments(commands.add_parser("completion"))
    serve = commands.add_parser("serve")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--model", default="smollm2-135m")
    serve.add_argument("--parser", choices=("hermes", "qwen3"))
    out = io.StringIO()
    assert completion.run(argparse.Namespace(shell=shell), parser=parser, stdout=out) == 0
    return out.getvalue()


@pytest.mark.skipif(shutil.which("bash") is None, reason="runs the script in bash")
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("megallm s", ["serve"]),
        ("megallm serve --po", ["--port"]),
        ("megallm completion f", ["fish"]),
        ("megallm serve --parser ''", ["hermes", "qwen3"]),
        ("megallm serve --model sm", ["smollm2-135m"]),
        ("megallm serve --port ''", []),
        ("megallm serve --port 1 --mo", ["--model"]),
    ],
)
def test_bash_completes_commands_options_and_values(line: str, wanted: list[str]) -> None:
    """A script that bash can't read breaks the shell it is in."""
    words = line.split()
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _megallm; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-c", script("bash") + ask],  # noqa: S607 - the bash that is there
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == wanted


def test_each_shell_s_script_names_every_command_and_option() -> None:
    """Made from the parser, so that none is forgotten."""
    for shell in completion.SHELLS:
        text = script(shell)
        assert "serve" in text
        assert "port" in text
    assert script("zsh").startswith("autoload -U +X bashcompinit")
