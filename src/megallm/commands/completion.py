"""`megallm completion`: a script that has a shell complete commands and options.

    eval "$(megallm completion bash)"        # in ~/.bashrc; zsh the same way

Made from the parser itself, so it can't fall behind it.
"""

import argparse
from typing import Any, Final, TextIO

SHELLS: Final = ("bash", "zsh", "fish")
EXIT_OK = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run(options: argparse.Namespace, *, parser: argparse.ArgumentParser, stdout: TextIO) -> int:
    """Writes the script; gives the exit code."""
    words = _words(parser)
    stdout.write(_fish(words) if options.shell == "fish" else _bash(words, is_zsh=options.shell == "zsh"))
    return EXIT_OK


def _words(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Gives every command's options, and under "" the commands."""
    choices: list[Any] = [action.choices for action in _actions(parser)]  # Any: argparse leaves it open
    commands: dict[str, argparse.ArgumentParser] = next(each for each in choices if hasattr(each, "keys"))
    words: dict[str, list[str]] = {"": list(commands)}
    for name, command in commands.items():
        options = [option for action in _actions(command) for option in action.option_strings]
        words[name] = options + [choice for action in _actions(command) for choice in _choices(action)]
    return words


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # noqa: SLF001 - the same


def _choices(action: argparse.Action) -> list[str]:
    return [] if action.option_strings or action.choices is None else list(action.choices)


def _bash(words: dict[str, list[str]], *, is_zsh: bool) -> str:
    cases = "\n".join(
        f'        {name}) words="{" ".join(options)}" ;;' for name, options in words.items() if name
    )
    prelude = "autoload -U +X bashcompinit && bashcompinit\n" if is_zsh else ""
    return f"""{prelude}_megallm() {{
    local words
    case "${{COMP_WORDS[1]}}" in
{cases}
        *) words="{" ".join(words[""])}" ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(words[""])}"; fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _megallm megallm
"""


def _fish(words: dict[str, list[str]]) -> str:
    lines = [f"complete -c megallm -n __fish_use_subcommand -f -a '{' '.join(words[''])}'"]
    for name, options in words.items():
        for option in options if name else []:
            where = f"complete -c megallm -n '__fish_seen_subcommand_from {name}'"
            lines.append(f"{where} -l {option[2:]}" if option.startswith("--") else f"{where} -a {option}")
    return "\n".join(lines) + "\n"
