"""`megallm completion`: a script that has a shell complete commands and options.

    eval "$(megallm completion bash)"        # in ~/.bashrc; zsh the same way

Made from the parser itself, so it can't fall behind it.
"""

import argparse
from typing import Any, Final, TextIO

SHELLS: Final = ("bash", "zsh", "fish")
EXIT_OK = 0
_UNNAMED: Final = ("help",)
"""Arguments whose default is no value of theirs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run(options: argparse.Namespace, *, parser: argparse.ArgumentParser, stdout: TextIO) -> int:
    """Writes the script; gives the exit code."""
    commands = _commands(parser)
    own = [option for action in _actions(parser) for option in action.option_strings]
    stdout.write(
        _fish(commands, own)
        if options.shell == "fish"
        else _bash(commands, own, is_zsh=options.shell == "zsh")
    )
    return EXIT_OK


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    choices: list[Any] = [action.choices for action in _actions(parser)]  # Any: argparse leaves it open
    return next(each for each in choices if hasattr(each, "keys"))


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # noqa: SLF001 - the same


def _takes_value(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.nargs != 0


def _values(action: argparse.Action) -> list[str]:
    """Gives what an argument may be: its choices, else its default where that is a word."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    return [action.default] if isinstance(action.default, str) and action.dest not in _UNNAMED else []


def _bash(commands: dict[str, argparse.ArgumentParser], own: list[str], *, is_zsh: bool) -> str:
    cases: list[str] = []
    bare: list[str] = []
    for name, command in commands.items():
        words: list[str] = []
        for action in _actions(command):
            after = "|".join(f'"{name} {option}"' for option in action.option_strings)
            if _takes_value(action) and _values(action):
                cases.append(f'        {after}) words="{" ".join(_values(action))}" ;;')
            elif _takes_value(action):
                bare.append(after)
            words += action.option_strings or _values(action)
        cases.append(f'        "{name} "*) words="{" ".join(words)}" ;;')
    if bare:  # with nothing to offer the shell completes files
        cases.insert(0, f"        {'|'.join(bare)}) ;;")
    prelude = "autoload -U +X bashcompinit && bashcompinit\n" if is_zsh else ""
    every_case = "\n".join(cases)
    return f"""{prelude}_megallm() {{
    local words=""
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{every_case}
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join([*commands, *own])}"; fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _megallm megallm
"""


def _fish(commands: dict[str, argparse.ArgumentParser], own: list[str]) -> str:
    at_first = "complete -c megallm -n __fish_use_subcommand"
    lines = [f"{at_first} -f -a '{' '.join([*commands, *own])}'"]
    for name, command in commands.items():
        where = f"complete -c megallm -n '__fish_seen_subcommand_from {name}'"
        for action in _actions(command):
            values = "".join(f" -a '{' '.join(values)}'" for values in [_values(action)] if values)
            needs = f" -r{values}" if _takes_value(action) else ""
            lines += [
                f"{where} -l {option[2:]}{needs}"
                for option in action.option_strings
                if option.startswith("--")
            ]
            if values and not action.option_strings:
                lines.append(f"{where}{values}")
    return "\n".join(lines) + "\n"
