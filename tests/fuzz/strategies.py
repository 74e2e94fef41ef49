"""Drawing cases: what stands first in a list is what a smallest failing case has."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.cases import RECURRENT, Case, Data, Layer, Net, Pass

LIKELIHOODS = (
    "classification", "regression", "bernoulli", "poisson", "student_t", "student_t(df=5)",
    "negative_binomial", "regression_per_output", "heteroscedastic", "weibull", "known_noise",
    "ordinal(cuts=[-0.5, 0.5])", "classification(smoothing=0.1)", "weighted(of='poisson')",
    "weighted(of='classification')", "weighted(of='student_t')",
)  # fmt: skip
OF_OUTPUTS = (
    "classification", "regression", "bernoulli", "poisson", "student_t", "negative_binomial",
    "regression_per_output", "heteroscedastic", "ordinal(cuts=[-0.5, 0.5])",
)  # fmt: skip
"""Those whose curvature does not depend on the targets, as K-FAC's steps need."""
DICE = st.integers(0, 11)


@lru_cache(None, typed=True)
def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


yes_or_no = st.booleans()


@lru_cache(None, typed=True)
def bodies(
    axes: int, pads: bool, ruled: bool, least: int, most: int
) -> st.SearchStrategy[tuple[Layer, ...]]:
    """So many layers for activations with these axes; with padding they keep the positions."""

    def kind(*names: str, **options: Any) -> st.SearchStrategy[Layer]:
        again, tied, residual = (one_of(False, False, False, True) for _ in range(3))
        in_place = one_of(False, False, False, True)
        defaults = {"again": again, "tied": tied, "residual": residual, "in_place": in_place}
        options = {**defaults, **options}
        return st.builds(Layer, one_of(*names), **options)

    use = one_of("module", "functional", "matmul", "twice")
    linear = kind("Linear", use=use, bias=one_of(True, False))
    # An instance norm needs two positions, and sequences may have one.
    of_instances = ["InstanceNorm", "ViewNorm"] if axes and not pads else []
    norms = kind("LayerNorm", "RMSNorm", "GroupNorm", *of_instances)
    some = [
        st.one_of(linear, linear, kind("ViewLinear")),
        kind("BatchNorm"),
        norms,
        kind("Scale", "Shift", "PReLU", "own scale", "own shift"),
    ]
    if axes == 1:
        packed = one_of(pads, False)
        some += [kind(*RECURRENT, packed=packed, flag=yes_or_no, depth=one_of(1, 1, 2))]
        some += [kind("attention", "encoder", flag=yes_or_no)]
    if axes:
        conv = st.just((3, 1, 1, 1)) if pads else CONVOLUTIONS
        kinds = ["Conv"] if pads else ["Conv", "ConvTranspose"]
        some += [kind(*kinds, conv=conv, flag=yes_or_no, bias=yes_or_no)]
    some += [kind("Tanh", "ReLU", "GELU", "ReLU in place")]
    some += [kind("Dropout", "BatchScale", *[] if ruled else ["Bilinear"])]
    return st.lists(st.one_of(some), min_size=least, max_size=most).map(tuple)


CONVOLUTIONS = st.tuples(one_of(3, 2, 1), one_of(1, 2), one_of(1, 0), one_of(1, 2))
SIZES = {1: one_of(3, 4), 2: one_of(3, 2), 3: one_of(2)}


@st.composite
def nets(draw: Any, pads: bool, mapping: bool, ruled: bool, most: int) -> Net:
    """A network of so many layers; one that averages copies takes no mappings."""
    axes = 1 if pads else draw(one_of(0, 1, 1, 2, 2, 3))
    embeds = 0 < axes < 3 and draw(one_of(False, False, False, True))
    pools = ["masked"] * 6 if pads else ["mean", "flatten", "mean"]
    pool = draw(one_of(*pools, "sum", None, "last")) if axes else "mean"
    return Net(
        draw(bodies(axes, pads, ruled, 0 if embeds else 1, most)),
        (4,) if pads else tuple(draw(SIZES[axes]) for _ in range(axes)),
        draw(one_of(2, 3)),
        draw(one_of(2, 3)),
        pool,
        axes > 0 and pool != "flatten" and draw(yes_or_no),
        embeds,
        embeds and draw(one_of(True, pads)),
        draw(one_of(None, None, "parameter", "embedding")) if axes == 1 else None,
        pads and draw(one_of(True, True, True, False)),
        embeds and draw(one_of(False, False, True)),
        draw(FROZEN),
        0 if embeds or pads or mapping else draw(one_of(0, 0, 0, 2)),
    )


FROZEN = st.lists(st.integers(0, 9), max_size=2).map(tuple)
SEEDS = st.integers(0, 99)


@lru_cache
def sizes(least: int, most: int, smallest: int) -> st.SearchStrategy[tuple[int, ...]]:
    largest = max(3, 2 * smallest - 1)
    return st.lists(st.integers(smallest, largest), min_size=least, max_size=most).map(tuple)


@st.composite
def cases(
    draw: Any,
    likelihoods: tuple[str, ...] = LIKELIHOODS,
    approx: tuple[str, ...] = ("expand", "reduce", "auto", "head expand", "head reduce"),
    fisher: tuple[str, ...] = ("exact", "exact", "empirical"),
    pads: tuple[bool, ...] = (False, True),
    batches: tuple[int, int] = (1, 3),
    smallest: int = 1,
    layers: int = 4,
    ruled: bool = False,
    mixes: bool = False,
) -> Case:
    """A case with these likelihoods and options.

    Args:
        draw: of Hypothesis.
        likelihoods: to choose from, as ``approx``, ``fisher`` and ``pads``.
        approx: see `Pass`.
        fisher: see `Pass`.
        pads: see `Data`.
        batches: least and most.
        smallest: examples of a batch, at least.
        layers: the most.
        ruled: whether each layer has a rule.
        mixes: whether one more layer mixes examples.
    """
    padded, mapping = draw(one_of(*pads)), draw(yes_or_no)
    net = draw(nets(padded, mapping, ruled, layers))
    if mixes:
        place = draw(st.integers(0, len(net.layers)))
        mix = Layer(draw(one_of("MixRest", "MixGroup", "MixNearest")))
        net = replace(net, layers=(*net.layers[:place], mix, *net.layers[place:]), copies=0)
    trimmed = padded and draw(one_of(False, False, False, True))
    data = Data(
        draw(sizes(*batches, smallest)), padded, trimmed, mapping,
        draw(one_of("list", "reused", "iterator", "DataLoader")),
        draw(one_of(False, False, False, True)),
    )  # fmt: skip
    options = Pass(
        draw(one_of(*approx)),
        draw(one_of(*fisher)),
        "error" if ruled else draw(one_of("error", "freeze", "diagonal")),
        draw(one_of(None, None, None, 3)),
        draw(one_of(True, False)),
    )
    if net.head_tied:  # with an output for each token
        likelihoods = tuple(name for name in likelihoods if "ordinal" not in name)
    return Case(net, data, draw(one_of(*likelihoods)), options, draw(SEEDS), draw(DICE))
