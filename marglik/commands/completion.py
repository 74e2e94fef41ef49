"""`marglik --completion SHELL`: a script that completes commands and options in a shell.

shtab makes the script, through jsonargparse, which knows what each option takes.
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
"""Arguments of the commands that take files or folders, and those that take folders."""


def completion_action(make_parser: Callable[[], ArgumentParser]) -> type[Action]:
    """The action of --completion, which prints the script and ends.

    Args:
        make_parser: returns the parser with the options of all commands; called when the script is
            needed, since it takes seconds.
    """

    class PrintCompletion(Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            print(completion_script(make_parser(), values))
            parser.exit(0)

    return PrintCompletion


def completion_script(parser: ArgumentParser, shell: str) -> str:
    """The completion script for a shell.

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
                # Otherwise jsonargparse would search all installed packages for subclasses of
                # torch.nn.Module.
                action.choices = names
    return parser.get_completion_script(f"shtab-{shell}")
