"""Drawing cases: what is drawn first is what a smallest failing case has."""

from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.cases import (
    Act,
    Again,
    Attention,
    BatchScale,
    Case,
    Conv,
    Data,
    Dense,
    Dropout,
    Elementwise,
    Layer,
    Net,
    Norm,
    Pass,
    Recurrent,
    Residual,
    Unruled,
)

LIKELIHOODS = (
    "classification", "regression", "bernoulli", "poisson", "student_t", "student_t(df=5)",
    "negative_binomial", "regression_per_output", "heteroscedastic", "weibull", "known_noise",
    "ordinal(cuts=[-0.5, 0.5])", "classification(smoothing=0.1)", "weighted(of='poisson')",
    "weighted(of='classification')", "weighted(of='student_t')",
)  # fmt: skip
LEARNED = (
    "student_t", "negative_binomial", "regression_per_output", "heteroscedastic", "weibull",
    "regression", "classification", "weighted(of='student_t')",
)  # fmt: skip
"""Those that training learns numbers of, and two others."""
SYMMETRIC = ("classification", "regression", "bernoulli", "poisson", "student_t", "known_noise")
"""Those that treat all outputs alike."""
FROZEN = st.lists(st.integers(0, 9), max_size=2).map(tuple)
SEEDS, DICE = st.integers(0, 99), st.integers(0, 11)


@lru_cache(None, typed=True)
def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@lru_cache(None, typed=True)
def layers(axes: int, pads: bool) -> st.SearchStrategy[Layer]:
    """A layer for activations with so many axes; with padding, one that keeps the positions."""
    kinds = ["LayerNorm", "BatchNorm", "RMSNorm", "GroupNorm", *["InstanceNorm"] * (axes > 0)]
    dense = st.builds(Dense, one_of("module", "functional", "matmul", "half"), st.booleans())
    simple = [
        dense,
        st.builds(Norm, one_of(*kinds)),
        st.builds(Elementwise, one_of("Scale", "Bias", "PReLU", "own scale", "own shift")),
    ]
    if axes == 1:
        recurrent = st.builds(Recurrent, one_of("GRU", "RNN", "LSTM"), st.booleans(), st.booleans())
        if pads:
            simple.append(st.builds(Recurrent, one_of("RNN", "GRU"), st.just(True)))
        simple += [recurrent, st.builds(Recurrent, st.just("RNN"), layers=st.just(2))]
        simple.append(
            st.builds(Attention, one_of("attention", "encoder"), st.booleans(), st.booleans())
        )
    if axes and pads:
        simple.append(st.builds(Conv))
    elif axes:
        conv = st.builds(
            Conv, one_of(3, 2, 1), one_of(1, 2), one_of(1, 0), one_of(1, 2), st.booleans(),
            st.booleans(), st.booleans(),
        )  # fmt: skip
        simple += [conv, conv]
    some = st.one_of(simple)
    return st.one_of(
        some,
        st.builds(Act, one_of("Tanh", "ReLU", "GELU", "ReLU in place")),
        st.builds(Residual, some),
        st.builds(Again, st.one_of(simple)),
        st.builds(Dense, tied=st.just(True)),
        st.one_of(st.builds(BatchScale), st.builds(Dropout), st.builds(Unruled)),
    )


@lru_cache(None, typed=True)
def bodies(axes: int, pads: bool, least: int, most: int) -> st.SearchStrategy[list[Layer]]:
    return st.lists(layers(axes, pads), min_size=least, max_size=most)


@st.composite
def nets(draw: Any, pads: bool, mapping: bool, small: bool) -> Net:
    """A network; ``small``: with few layers. One that averages copies takes no mappings."""
    axes = 1 if pads else draw(one_of(0, 1, 1, 2, 2, 3))
    sizes = {1: one_of(3, 4), 2: one_of(3, 2), 3: st.just(2)}
    space = tuple(draw(sizes[axes]) for _ in range(axes))
    embeds = 0 < axes < 3 and draw(one_of(False, False, True))
    pools = [*(["masked", "sum"] if pads else []), "mean", None, "sum", "last"]
    pools += [] if pads else ["flatten"]
    body = draw(bodies(axes, pads, 0 if embeds else 1, 2 if small else 4))
    return Net(
        tuple(body),
        space,
        draw(one_of(2, 3)),
        draw(one_of(2, 3)),
        draw(one_of(*pools)) if axes else "mean",
        draw(st.booleans()) if axes else False,
        embeds,
        embeds and draw(one_of(True, pads)),
        draw(one_of(None, None, "parameter", "embedding")) if axes == 1 else None,
        pads and draw(st.booleans()),
        embeds and draw(st.booleans()),
        draw(FROZEN),
        0 if embeds or pads or mapping else draw(one_of(0, 0, 0, 2)),
    )


@lru_cache(None, typed=True)
def sizes(least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 4), min_size=least, max_size=most).map(tuple)


@st.composite
def cases(
    draw: Any,
    likelihoods: tuple[str, ...] = LIKELIHOODS,
    approx: tuple[str, ...] = ("expand", "reduce", "auto", "head expand", "head reduce"),
    fisher: tuple[str, ...] = ("exact", "exact", "empirical"),
    pads: tuple[bool, ...] = (True, False),
    least: int = 1,
    most: int = 3,
    small: bool = False,
    plain: bool = False,
) -> Case:
    """A case with these likelihoods and options, and at least so many batches.

    ``plain``: with nothing that a pass does not cover or that is given up: no layer without a rule.
    """
    padded, mapping = draw(one_of(*pads)), draw(st.booleans())
    net = draw(nets(padded, mapping, small))
    if net.embeds and net.head_tied:
        likelihoods = tuple(x for x in likelihoods if "ordinal" not in x)
    data = Data(
        draw(sizes(least, most)), padded, padded and draw(st.booleans()), mapping,
        draw(one_of("list", "list", "reused", "iterator", "DataLoader")),
        draw(one_of(False, False, False, True)),
    )  # fmt: skip
    options = Pass(
        draw(one_of(*approx)),
        draw(one_of(*fisher)),
        "error" if plain else draw(one_of("freeze", "diagonal", "error")),
        draw(one_of(None, None, None, 3)),
        draw(one_of(True, True, False)),
    )
    likelihood = draw(one_of(*likelihoods))
    return Case(net, data, likelihood, options, draw(SEEDS), draw(DICE))
