"""`marglik --completion SHELL`: what completes the commands and their options in a shell.

The script is made by shtab, through jsonargparse, which knows what each option takes.
"""

from argparse import Action
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from jsonargparse import ArgumentParser

from marglik.commands.messages import class_names, hint_of

__all__ = ["SHELLS", "completion_action"]

SHELLS = ("bash", "zsh", "fish")
FILES = ("path", "checkpoint", "output")
FOLDERS = ("folders",)
"""Arguments of the commands that are files (or folders), and those that are folders."""


def completion_action(make_parser: Callable[[], ArgumentParser]) -> type[Action]:
    """The action of --completion, which prints the script and ends.

    Args:
        make_parser: the parser with the options of all commands, which takes seconds.
    """

    class PrintCompletion(Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            print(completion_script(make_parser(), values))
            parser.exit(0)

    return PrintCompletion


def completion_script(parser: ArgumentParser, shell: str) -> str:
    """The script for a shell.

    Raises:
        ValueError: shtab is not installed.
    """
    if find_spec("shtab") is None:
        raise ValueError(
            "--completion needs the package shtab, which is not installed: "
            "pip install 'marglik[completion]'."
        )
    import shtab

    commands: Any = parser._subcommands_action
    for command in commands._name_parser_map.values():
        for action in command._actions:
            if action.dest in FILES:
                action.complete = shtab.FILE
            elif action.dest in FOLDERS:
                action.complete = shtab.DIRECTORY
            elif names := class_names(hint_of(action)):
                # Else all subclasses of torch.nn.Module would be looked for, in whatever is there.
                action.choices = names
    return parser.get_completion_script(f"shtab-{shell}")
