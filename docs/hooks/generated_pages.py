"""Write the generated parts of the documentation: ``make pages``.

With ``--list``, only list the files that are out of date.

A page marks where a part begins, and the part ends at the next mark or heading of level 1 or 2:

- ``<!-- api: NAME -->``: signature and docstring of a public name, with its own public members.
- ``<!-- help: COMMAND -->``: the output of ``marglik COMMAND --help all``, without the options of
  earlier commands.

`examples/notebooks/` has each example as a notebook, without outputs.
"""

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs/api").glob("*.md")), ROOT / "docs/command-line.md"]
MARK = re.compile(r"<!-- (api|help): ([\w.]+) -->\n")
PART = re.compile(MARK.pattern + r"(?:(?!<!-- (?:api|help): |##? ).*\n)*")
WIDTH = 96
"""Columns of signatures and of the commands' help."""
OPTION = re.compile(r"^  (?=-).*?(--[\w.]+).*\n(?:    .*\n)*", re.M)
"""An option in the help of a command, with its name."""
EMPTY_GROUP = re.compile(r"\n\S.*:\n(?=\n|\Z)")
"""A group without options in the help of a command."""


def generated() -> Iterator[tuple[Path, str]]:
    """Each generated file with the text that it should have."""
    for page in PAGES:
        yield page, PART.sub(_part, page.read_text())
    for example in sorted((ROOT / "examples").glob("*.py")):
        yield ROOT / "examples/notebooks" / f"{example.stem}.ipynb", notebook(example)


def _part(match: re.Match[str]) -> str:
    kind, name = match.groups()
    mark = f"<!-- {kind}: {name} -->\n"
    return f"{mark}\n{documented(name) if kind == 'api' else printed_help(name)}\n"


def printed_help(command: str) -> str:
    """Return the output of ``--help all`` as a block of text.

    The block leaves out options with the same text as in the help of an earlier command. A line
    below the block names them.
    """
    from marglik.application.cli import COMMANDS

    commands = list(COMMANDS)
    earlier = map(_output_of_help, commands[: commands.index(command)])
    known = {option[0] for output in earlier for option in OPTION.finditer(output)}
    output = _output_of_help(command)
    repeated = [option for option in OPTION.finditer(output) if option[0] in known]
    for option in repeated:
        output = output.replace(option[0], "", 1)
    block = f"```text\n{EMPTY_GROUP.sub('', output)}```\n"
    names = ", ".join(f"`{option[1]}`" for option in repeated)
    line = fill(f"Other options, described above: {names}.", 120, break_on_hyphens=False)
    return f"{block}\n{line}\n" if repeated else block


@cache
def _output_of_help(command: str) -> str:
    from marglik.application.cli import main

    output = io.StringIO()
    with patch.dict(os.environ, COLUMNS=str(WIDTH)), redirect_stdout(output), suppress(SystemExit):
        main([command, "--help", "all"])
    return output.getvalue()


def notebook(example: Path) -> str:
    """An example as the JSON of a notebook; numbered cells make the text reproducible."""
    import jupytext

    content = jupytext.read(example)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for number, cell in enumerate(content.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    return jupytext.writes(content, fmt="ipynb") + "\n"


# The reference of the public names


@cache
def _packages() -> dict[str, Any]:
    import griffe

    options: Any = {"search_paths": [ROOT], "docstring_parser": "google"}
    packages = {name: griffe.load(name, **options) for name in ("kfac_backend", "marglik")}
    return packages


def documented(name: str) -> str:
    """Heading, signature and docstring of a public name, and the same of its members."""
    package, _, path = name.partition(".")
    value = _packages()[package][path]
    value = value.final_target if value.is_alias else value
    title = path.rpartition(".")[2]
    parts = [f"### {title}", *_described(value, title)]
    if value.is_class:
        members = [m for n, m in value.members.items() if n[0] != "_" and m.has_docstring]
        for member in sorted(members, key=lambda member: member.lineno or 0):  # as in the source
            parts += [f"#### {title}.{member.name}", *_described(member, member.name)]
    return "\n\n".join(parts) + "\n"


def _described(value: Any, title: str) -> list[str]:
    """Signature, text and sections of one object."""
    text = [f"```python\n{_signature(value, title)}\n```"]
    if value.is_class and value.bases:
        text.append("Bases: " + ", ".join(f"`{base}`" for base in value.bases))
    for section in value.docstring.parse("google", warnings=False) if value.docstring else ():
        kind = section.kind.value
        if kind == "text":
            text.append(section.value)
        elif kind == "admonition":
            text.append(f"**{section.title}**\n\n{section.value.description}")
        elif kind == "examples":
            text += [part for _, part in section.value]
        else:
            text.append(f"**{kind.capitalize()}**\n\n" + "\n".join(map(_item, section.value)))
    return text


def _item(item: Any) -> str:
    """A line of a list: an argument, an error, or a returned value."""
    name, annotation = getattr(item, "name", ""), getattr(item, "annotation", None)
    name = name if type(item).__name__ != "DocstringRaise" else ""
    type_of = f"`{_code(annotation)}`" if annotation else ""
    head = f"`{name}` ({type_of})" if name and type_of else f"`{name}`" if name else type_of
    description = item.description.strip().replace("\n", "\n  ")
    return f"- {head}: {description}" if head else f"- {description}"


def _signature(value: Any, title: str) -> str:
    """The code of a definition, with an argument a line where one line is too short."""
    if not (value.is_class or value.is_function):
        annotation = f": {_code(value.annotation)}" if value.annotation else ""
        is_short = value.value is not None and len(str(value.value)) < WIDTH // 2
        return f"{title}{annotation}" + (f" = {_code(value.value)}" if is_short else "")
    arguments, last = [], ""
    for parameter in value.parameters:
        kind = parameter.kind.value if parameter.kind else ""
        if parameter.name in ("self", "cls"):
            continue
        if last == "positional-only" != kind:
            arguments.append("/")
        if kind == "keyword-only" and last not in ("keyword-only", "variadic positional"):
            arguments.append("*")
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        text = f"{stars}{parameter.name}"
        text += f": {_code(parameter.annotation)}" if parameter.annotation else ""
        if parameter.default is not None and not stars:
            equals = " = " if parameter.annotation else "="
            text += f"{equals}{_code(parameter.default)}"
        arguments.append(text)
        last = kind
    is_class = value.is_class
    returns = f" -> {_code(value.returns)}" if not is_class and value.returns else ""
    decorator = "@classmethod\n" * ("classmethod" in value.labels)
    before = "class " if is_class else f"{decorator}def "
    line = f"{before}{title}({', '.join(arguments)}){returns}"
    if len(line.splitlines()[-1]) <= WIDTH:
        return line
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return f"{before}{title}(\n{lines}){returns}"


def _code(expression: Any) -> str:
    """An expression with the quotes of our code."""
    text = str(expression)
    return text if '"' in text else text.replace("'", '"')


def update(only_list: bool) -> None:
    """Write each generated file that has changed, and print its name."""
    for path, text in generated():
        if not path.exists() or path.read_text() != text:
            print(path.relative_to(ROOT))
            if not only_list:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)


if __name__ == "__main__":
    update(only_list="--list" in sys.argv)
