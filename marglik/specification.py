"""Build networks and data from specifications in files, with limits on their contents."""

import json
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints

from torch import nn

from kfac_backend.extras import extra

OURS = ("marglik.application.data", "marglik.augmentation", "marglik.data", "marglik.models")
"""Modules whose public classes a file may name, in addition to the networks of
torchvision.models."""
MAY_BE_BUILT = ("torch.nn.Module", "marglik.data.DataSource", "marglik.augmentation.Transform")
OF_PATHS = ("path", "root")
"""Arguments of our classes that are paths."""
OF_DOWNLOADS = ("download", "pretrained", "weights")
"""First words of arguments that make our or torchvision's classes download files."""


def build_from_spec(
    kind: type | tuple[type, ...],
    spec: Any,
    named: Collection[str] | None = (),
    folder: Path | None = None,
) -> Any:
    """Return the object of a specification ``{"class_path": ..., "init_args": {...}}``.

    A specification comes from a file, perhaps a downloaded one. Building an object runs code, reads
    files and may download some. A file may therefore name only the public classes of `OURS`, the
    networks of torchvision.models, and classes that the user named. It may name only files in its
    own folder, and no download. The user must pass everything else. Arguments are plain values or
    specifications; nothing in them is imported.

    Args:
        kind: class, or alternative classes, of the object.
        spec: path of its class (or of a function that returns such an object, as in torchvision),
            and the arguments.
        named: paths of classes that the user named on the command line; None if the whole
            specification is the user's, without limits.
        folder: the folder of the file.

    Raises:
        ValueError: a class may not or cannot be imported, or the class or the limits reject an
            argument.
    """

    def made(value: Any) -> Any:
        if isinstance(value, list):
            return [made(item) for item in value]
        if not isinstance(value, dict) or "class_path" not in value:
            is_nested = isinstance(value, dict)
            return {key: made(item) for key, item in value.items()} if is_nested else value
        path = str(value["class_path"])
        is_named = named is None or path in named
        if not is_named and not _is_known(path):
            raise ValueError(
                f"a file may only name classes of {', '.join(OURS)} and torchvision.models, "
                f"because importing other classes runs their code. If you trust {path}, pass it on "
                f"the command line: --model {path} (or --data). In Python, pass the object"
            )
        module, _, name = path.rpartition(".")
        make = getattr(import_module(module), name)
        returns = make if isinstance(make, type) else get_type_hints(make).get("return")
        if not (isinstance(returns, type) and issubclass(returns, kinds)):
            raise ValueError(f"{path} is not a class of networks, data or transforms")
        arguments = (value.get("init_args") or {}) | (value.get("dict_kwargs") or {})
        if named is not None and (request := _asked_for(path, make, arguments, is_named, folder)):
            typed = _as_options("--model" if kind is nn.Module else "--data", spec)
            raise ValueError(
                f"{request}, which a file may not request. If you trust it, pass the class with "
                f"its options: {typed}"
            )
        return make(**{name: made(item) for name, item in arguments.items()})

    path = spec.get("class_path") if isinstance(spec, dict) else None
    kinds = tuple(map(resolve_name, MAY_BE_BUILT))
    try:
        instance = made(spec)
        if not isinstance(instance, kind):
            raise TypeError("the object is not of the required class")
    except Exception as error:  # a class may raise any error for its arguments
        whose = "its" if named is None else "its saved"  # as the user gave them, or a file has them
        reason = str(error).rstrip(".")
        raise ValueError(f"{path} could not be built from {whose} arguments: {reason}.") from error
    return instance


def _is_known(path: str) -> bool:
    """Return whether any file may name this class."""
    module, _, name = path.rpartition(".")
    if module in OURS:
        return name in import_module(module).__all__
    if module != "torchvision.models":
        return False
    with extra("images"):
        from torchvision import models

    # Reject its other functions that return networks, because detectors download a backbone
    # unasked.
    return isinstance(getattr(models, name, None), type) or name in models.list_models(models)


def _asked_for(
    path: str,
    make: Callable[..., Any],
    arguments: Mapping[str, Any],
    is_named: bool,
    folder: Path | None,
) -> str | None:
    """Return the first argument with a file outside of the folder, or with a download.

    Defaults of a class that the user named count as the user's choice.
    """
    is_ours, defaults = _is_known(path), _defaults(make)
    for name, value in (arguments if is_named else defaults | dict(arguments)).items():
        if value is Parameter.empty or (is_named and name in defaults and value == defaults[name]):
            continue
        for text in _texts(value):
            is_path = name in OF_PATHS or (not is_ours and (os.sep in text or text[:1] == "~"))
            if is_path and not (folder and _is_inside(text, folder)):
                return f"{name}={text!r} is outside of the saved folder"
        if value and name.startswith(OF_DOWNLOADS) and (is_ours or isinstance(value, bool | str)):
            return f"{name}={value!r} is a download"
    return None


def _defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a class's or function's arguments; `Parameter.empty` without one."""
    return {name: p.default for name, p in signature(make).parameters.items()}


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings in nested lists and dicts, except specifications."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, dict):
        yield from _texts([*value.values()] if "class_path" not in value else [])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _is_inside(path: str, folder: Path) -> bool:
    """Return whether a path, with all links resolved, is in a folder."""
    return Path(path).expanduser().resolve().is_relative_to(folder.resolve())


def _as_options(option: str, spec: dict[str, Any]) -> str:
    """Return a specification as options of the command line."""
    path = str(spec["class_path"])
    arguments = (spec.get("init_args") or {}) | (spec.get("dict_kwargs") or {})
    defaults = _defaults(resolve_name(path)) if _is_known(path) else {}
    words = [option, shlex.quote(path)]
    for name, value in arguments.items():
        if isinstance(value, dict) and "class_path" in value:
            words.append(_as_options(f"{option}.{name}", value))
        elif value is not None and value != defaults.get(name, Parameter.empty):
            text = value if isinstance(value, str) else json.dumps(value)
            words += [shlex.quote(f"{option}.{name}"), shlex.quote(text)]
    return " ".join(words)
