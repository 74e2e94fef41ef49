"""Messages for wrong options: the value, what is supported, and the way out.

jsonargparse's own messages name internal types and run over many lines. This is the one module that
knows their wording: it reads from the text which option is meant, and from that option's type hint
what it takes, so that choices need not be written down twice. Text that matches no pattern is
passed on, in one line.
"""

import difflib
import inspect
import math
import re
import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, Namespace

__all__ = ["check_values", "class_names", "explained", "hint_of"]

LARGEST = 2**63 - 1
"""Largest whole number that torch and the files of results can hold."""
LONGEST = 200
"""Most characters of a text that is quoted."""
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# In jsonargparse's errors about a class_path that cannot be imported or is of the wrong type.
NO_CLASS = (
    "Expected a dot import path", "Unexpected import path", "does not correspond to a subclass",
    "Not a valid subclass", "No module named", "has no attribute",
)  # fmt: skip


def explained(error: Exception, parser: ArgumentParser | None, arguments: Sequence[str]) -> str:
    """An error in one line: one of jsonargparse in our words, one of ours unchanged.

    Args:
        error: an error of jsonargparse, or one of ours, which jsonargparse may have wrapped.
        parser: the parser of the command, None if no command was given.
        arguments: the arguments of the command line.
    """
    text = str(error)
    if parser is None:
        return _of_no_command(text)
    # Errors that are known by their beginning come first: "Parser key" is searched for anywhere,
    # and may be part of what one of them quotes.
    if found := re.match(r"the following arguments are required: (.*)", text):
        names = [name.split(".", 1)[1] for name in found[1].split(", ")]
        return f"{_joined([_option(parser, name) for name in names], 'and')} must be given."
    if found := re.match(r"argument (\S+): expected (?:one|at least one) argument", text):
        return f"{found[1].split('/')[0]} needs a value."
    if found := re.match(r"argument (--\w+)\S*: ignored explicit argument '(.*)'", text):
        return _flag(found[1], found[2])
    if found := re.match(r"unrecognized arguments: (.*)", text, re.S):
        first = max((a for a in arguments if found[1].startswith(a)), key=len, default=found[1])
        return _unknown(parser, first, arguments)
    if found := re.match(r"Subcommand '\w+' does not accept option '(.*)'", text):
        return _unknown(parser, f"--{found[1]}", arguments)
    if re.match(r"Problems parsing config|Unexpected config", text):
        return f"--config takes a YAML file with a mapping of options: {_bounded(text)}"
    keys = list(dict.fromkeys(re.findall(r'Parser key "([^"]+)":', text)))
    if not keys:
        return _one_line(_cause(text))
    return _of_key(parser, keys, text)


def check_values(parser: ArgumentParser, options: Namespace) -> None:
    """Raise a ValueError for numbers that are not finite or too large, and for a null not allowed.

    jsonargparse itself accepts 1e999, whole numbers of any length, and null for any argument of a
    class.
    """
    for key, value in options.items():
        option = _option(parser, key.replace(".init_args.", "."))  # as users write it
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, float) and not math.isfinite(item):
                raise ValueError(f"{option} {value}: must be finite.")
            if isinstance(item, int) and abs(item) > LARGEST:
                raise ValueError(f"{option} {value}: must lie in -{LARGEST}..{LARGEST}.")
        owner, _, name = key.rpartition(".init_args.")
        if value is None and owner:
            hint = _hint_of_argument(options[f"{owner}.class_path"], name)
            if hint in WORDS:
                raise ValueError(f"{option} null: must be {_expected(hint)}.")


def _of_no_command(text: str) -> str:
    """Message for an error that occurs before the options of a command are read."""
    if found := re.match(r"argument subcommand: invalid choice: '(.*)' \(choose from (.*)\)", text):
        commands = re.findall(r"\w+", found[2])
        near = difflib.get_close_matches(found[1], commands, 1)
        ask = f"; did you mean {near[0]}?" if near else "."
        return f"No command {found[1]!r}{ask} There are {_joined(commands, 'and')}."
    return _one_line(text).removeprefix("argument ")


def _of_key(parser: ArgumentParser, keys: list[str], text: str) -> str:
    """Message for a wrong value of an option, or of an argument of the class that it names.

    Args:
        parser: the parser of the command.
        keys: the keys in jsonargparse's text, from the option to the argument inside its class.
        text: jsonargparse's text.
    """
    option = _option(parser, ".".join(keys))
    # Errors are nested from the outside to the inside: the last class and reason are the cause.
    class_path = (re.findall(r"given class_path '([^']*)'", text) or [""])[-1]
    reason = _cause(re.split(r"""Parser key "[^"]+":|given class_path '[^']*':""", text)[-1])
    # What follows is the report of a union around the cause.
    reason = re.split(r"\n *- Expected|\n *Given value", reason)[0]
    if found := re.match(r"the following arguments are required: (.*)", reason):
        needed = [f"{option}.{name}" for name in found[1].split(", ")]
        return f"{option} {class_path} needs {_joined(needed, 'and')}."
    if found := re.match(r"Option '([^']*)' is not accepted", reason):
        name = found[1].split(".")[0]
        takes = _joined([f"{option}.{n}" for n in _arguments_of(class_path)], "and")
        return f"{class_path} has no option {option}.{name}; it takes {takes or 'none'}."
    if reason.startswith("Multiple subclasses"):
        return f"{option}: {_one_line(reason)}"
    values = re.findall(r"Given value: (.*)", text) or re.findall(r"Got value: (.*)", text)
    value = values[-1].replace("None", "null") if values else ""
    if value.startswith("NestedArg"):  # jsonargparse's object; the user's text comes later
        value = (re.findall(r"Got value: (.*)", text) or [""])[-1]
    if found := re.search(r"Unable to load config '(.*?)'", text):
        fields = [a.option_strings[0] for a in parser._actions if a.dest.startswith(f"{keys[0]}.")]
        return f"{option} {found[1]!r}: no YAML file; give {_joined(fields)}, or a file of them."
    hint = _hint_of_argument(class_path, keys[-1]) if len(keys) > 1 else _hint(parser, keys[0])
    if any(words in reason for words in NO_CLASS):
        named = re.findall(r"(?:string|format): (.*)|Import path (\S+)", reason)
        given = class_path or value or "".join(*named[:1])
        why = f" ({_one_line(reason)})" if class_path else ""
        return f"{option} {given or repr('')}: no such class{why}. It must be {_expected(hint)}."
    if hint is not None and ("Expected" in reason or "Union subtypes" in text):
        return f"{option} {_one_line(value) or repr('')}: must be {_expected(hint)}."
    return f"{option}: {_one_line(reason)}"


def _cause(text: str) -> str:
    """Of the errors of a union's members, the one that says most: ours, if there is one."""
    if "Union subtypes" not in text:
        return text.strip()
    errors = re.findall(r"^ *- (.*)$", text.split("Errors:", 1)[1], re.M)
    ours = [e for e in errors if not re.match(r"Expected a (<class|typing)", e)]
    return (ours or errors)[0].strip()


def _unknown(parser: ArgumentParser, name: str, arguments: Sequence[str]) -> str:
    options = [option for action in parser._actions for option in action.option_strings]
    if name.startswith("--"):
        name = name.split("=")[0]
        near = difflib.get_close_matches(name, options, 1, cutoff=0.75)
        return f"No option {name}{f'; did you mean {near[0]}?' if near else '.'}"
    before = arguments[arguments.index(name) - 1] if name in arguments else ""
    if before in options and not before.startswith("--no_"):
        return _flag(before, name)
    return f"{name!r} belongs to no option."


def _flag(name: str, value: str) -> str:
    return f"{name} takes no value, not {value!r}; there is --no_{name[2:]} for the opposite."


def _option(parser: ArgumentParser, key: str) -> str:
    """An option as it is given on the command line: with dashes, or a positional in capitals."""
    positional = any(a.dest == key and not a.option_strings for a in parser._actions)
    return key.upper() if positional else f"--{key}"


def _hint(parser: ArgumentParser, key: str) -> Any:
    """The type of an option, None if it is unknown."""
    return next((hint_of(action) for action in parser._actions if action.dest == key), None)


def hint_of(action: Any) -> Any:
    """The type that an option takes."""
    return getattr(action, "_typehint", None) or action.type or bool


def _hint_of_argument(class_path: str, name: str) -> Any:
    """The type of a class's argument, None if it is unknown."""
    cls = _class(class_path)
    try:
        return None if cls is None else get_type_hints(cls.__init__).get(name)
    except (NameError, TypeError):
        return None


def _arguments_of(class_path: str) -> list[str]:
    cls = _class(class_path)
    return [] if cls is None else list(inspect.signature(cls).parameters)


def _class(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(__import__(module, fromlist=[name]), name, None)
    except (ImportError, ValueError):
        return None


def _expected(hint: Any) -> str:
    """The values that a type accepts, in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in WORDS:
        return WORDS[hint]
    if hint is None or hint is type(None):
        return "null"
    if origin is Literal:
        return _joined([str(choice) for choice in arguments])
    if origin in (Union, types.UnionType):
        return ", or ".join(dict.fromkeys(_expected(member) for member in arguments))
    if origin is dict:
        return f"a mapping of names to {_expected(arguments[1])}"
    if origin in (list, tuple) or hint in (list, tuple):
        return "a list in brackets" + (
            f", each item {_expected(arguments[0])}" if arguments else ""
        )
    if inspect.isclass(hint):
        return _classes(hint)
    return _one_line(str(hint))


def _classes(base: type) -> str:
    """Our own subclasses of a class, and how to name another one."""
    names = _joined(class_names(base))
    return (
        f"{names}, or the path of a class that can be imported from here, such as "
        "package.module.Name"
    )


def class_names(hint: Any) -> list[str]:
    """The short names of our networks and data sources of a type; empty for other types."""
    from marglik import data, models

    bases = tuple(one for one in get_args(hint) or (hint,) if inspect.isclass(one))
    return [
        name
        for module in (models, data)
        for name in module.__all__
        if inspect.isclass(found := getattr(module, name))
        and issubclass(found, bases)
        and not inspect.isabstract(found)
    ]


def _bounded(text: str) -> str:
    """The beginning of a text, which may quote a whole file."""
    line = _one_line(text)
    return line if len(line) <= LONGEST else f"{line[:LONGEST].rstrip('.')}..."


def _joined(names: Sequence[str], last: str = "or") -> str:
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _one_line(text: str) -> str:
    return " ".join(text.split())
