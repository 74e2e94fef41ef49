"""Which mode each layer has: one for all, one by the shape of the outputs, or by layers' names."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from kfac_backend.options import Approximation, KfacApprox, Mode, check_option

__all__ = ["automatic_mode", "check_kfac_approx", "modes_of_layers"]


def check_kfac_approx(kfac_approx: KfacApprox) -> KfacApprox:
    """What was asked for, as a copy of plain dicts.

    Raises:
        ValueError: neither a mode, "auto", nor a mapping of patterns to modes.
    """
    if not isinstance(kfac_approx, Mapping):
        if kfac_approx not in ("expand", "reduce", "auto"):
            raise ValueError(
                f"kfac_approx={kfac_approx!r} is not supported; choose one of 'expand', 'reduce', "
                "'auto', or a mapping of layers' names or patterns to modes, such as "
                "{'head*': 'expand', '*': 'reduce'}."
            )
        return kfac_approx
    if not kfac_approx:
        raise ValueError("kfac_approx is an empty mapping; give '*' a mode for all layers.")
    for pattern, mode in kfac_approx.items():
        if isinstance(mode, Mapping) and not mode:
            raise ValueError(
                f"kfac_approx[{pattern!r}] names no axis; give each shared axis a mode, such as "
                "{'space': 'reduce'}."
            )
        axes = mode if isinstance(mode, Mapping) else {"": mode}
        for axis, of_axis in axes.items():
            where = f"kfac_approx[{pattern!r}]" + (f"[{axis!r}]" if axis else "")
            check_option(where, of_axis, Mode)
    return {
        pattern: dict(mode) if isinstance(mode, Mapping) else mode
        for pattern, mode in kfac_approx.items()
    }


def automatic_mode(num_dimensions: int) -> Mode:
    """What "auto" is for outputs of so many dimensions: expand for (N, ..., C), reduce for (N, C).

    With a loss term at each position the paper's expand setting is at hand, else its reduce setting
    (Eschenhagen et al. 2023, section 3.1).
    """
    return "expand" if num_dimensions > 2 else "reduce"


def modes_of_layers(kfac_approx: KfacApprox, names: Iterable[str]) -> dict[str, Approximation]:
    """Each layer's mode; the first pattern that fits its name counts.

    Args:
        kfac_approx: not "auto", which is known with the first outputs only.
        names: layers' names in the model.

    Raises:
        ValueError: a layer that no pattern fits, a pattern that fits no layer.
    """
    names = list(names)
    if not isinstance(kfac_approx, Mapping):
        assert kfac_approx != "auto"
        return dict.fromkeys(names, kfac_approx)
    modes: dict[str, Approximation] = {}
    used: set[str] = set()
    for name in names:
        fitting = [pattern for pattern in kfac_approx if fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(
                f"No pattern of kfac_approx fits layer '{name}': {', '.join(kfac_approx)}. Add it, "
                "or '*' at the end for all others."
            )
        modes[name] = kfac_approx[fitting[0]]
        used.add(fitting[0])
    unused = [pattern for pattern in kfac_approx if pattern not in used and pattern != "*"]
    if unused:
        hidden = any(fnmatchcase(name, unused[0]) for name in names)
        why = " that an earlier pattern does not fit" if hidden else ""
        raise ValueError(
            f"The pattern '{unused[0]}' of kfac_approx fits no layer{why}; there are "
            f"{', '.join(names)}."
        )
    return modes
