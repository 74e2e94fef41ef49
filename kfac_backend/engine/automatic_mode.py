"""Choose each layer's mode for kfac_approx="auto" from output axes and block traces.

Outputs (N, ..., C) with a loss term at each position are the paper's expand setting (Eschenhagen et
al. 2023, section 3.1). Outputs (N, C) are its reduce setting, but reduce is exact there only if the
network averages its positions. The trace of a layer's block shows whether it does. Let g_nv = Σ_r
b_nvr ⊗ a_nr be the gradient of example n for a vector v of the loss Hessian's root. The traces are

- exact: Σ_nv ‖Σ_r b_nvr a_nrᵀ‖²;
- expand: Σ_nvr ‖b_nvr‖² · mean_nr ‖a_nr‖². It omits products of different positions, so it is too
  small if the network averages positions;
- reduce: Σ_nv ‖Σ_r b_nvr‖² · mean_n ‖mean_r a_nr‖². Gradients of different signs cancel, so it is
  too small, down to 1 %, if the network distinguishes positions (a flattened head).

With a block that is too small, the evidence counts too few parameters as determined by the data and
chooses a weight decay that is too small. So each layer gets the mode with the nearer trace on some
examples of the first batch. Layers without shared positions have the same block in both modes.
"""

from collections.abc import Mapping, Sequence
from glob import escape
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kfac_backend.engine.batches import examples
from kfac_backend.engine.capture import Capture, Sink
from kfac_backend.engine.model_calls import forked_random_numbers
from kfac_backend.engine.proof import Proof
from kfac_backend.engine.rule_assignment import RuleAssignment, TrackedLayer
from kfac_backend.fisher import DrawnLabels, ExactGGN
from kfac_backend.layers import Use, WeightSharingRule
from kfac_backend.layers.rows import counted_positions
from kfac_backend.likelihoods import Likelihood, check_targets
from kfac_backend.options import KfacApprox, Mode, PassOptions
from kfac_backend.precision import at_least_float32

EXAMPLES = 8
"""Number of examples of the first batch that decide the mode."""

MOST_VECTORS = 16
"""Maximum number of vectors of the loss Hessian that decide the mode. If there are more, as many
labels are drawn instead."""


def automatic_mode(num_dimensions: int) -> Mode:
    """Return the mode for a network's output axes: expand for (N, ..., C), reduce for (N, C)."""
    return "expand" if num_dimensions > 2 else "reduce"


ModeAndTraces = tuple[Mode, Mapping[str, Float[Tensor, "3"]]]
"""Mode from a rank's outputs, and the traces of its layers' blocks if the mode is reduce."""


def mode_and_traces(
    model: nn.Module,
    proof: Proof,
    likelihood: Likelihood,
    options: PassOptions,
    x: Any,
    y: Tensor,
    mask: Tensor | None,
) -> ModeAndTraces:
    """Return the mode and the block traces of a rank's first batch, at positions of the mask."""
    mode = automatic_mode(proof.output_dim)
    if mode == "expand":
        return mode, {}
    # A model that needs a whole batch runs on all examples; the first ones still decide.
    if proof.batch.can_split:
        first = slice(EXAMPLES)
        x, y, mask = examples(x, first), y[first], None if mask is None else mask[first]
    # Active dropout must not advance the user's random numbers.
    no_autocast = torch.autocast(next(model.parameters()).device.type, enabled=False)
    with forked_random_numbers(model), no_autocast, counted_positions(mask):
        per_example = options.expand_scaling == "examples"
        return mode, block_traces(model, proof.assignment, likelihood, x, y, per_example)


def common_mode(of_ranks: Sequence[ModeAndTraces | None]) -> KfacApprox:
    """Return the common mode of all ranks' first batches; None marks a rank without data.

    The mode stays "auto" if no rank has data.
    """
    decisions = [of_rank for of_rank in of_ranks if of_rank]
    if not decisions:
        return "auto"
    mode = decisions[0][0]
    return nearest_modes([traces for _, traces in decisions]) if mode == "reduce" else mode


class BlockTraces(Sink):
    """Compute the trace of each weight's block: exact, by expand, and by reduce.

    The traces are sums over the first `EXAMPLES` examples. A model that needs a whole batch runs on
    all examples and gives the same traces. Only layers with shared positions have traces, without
    positions that a mask hides. Layers inside `examples_of_rows` have none. Layers that share a
    weight have the sum of their traces, without the products of different uses.
    """

    needs_inputs = True

    def __init__(self, per_example: bool = False) -> None:
        self.per_example = per_example
        self.num_examples = 0
        """N of the present batch."""
        self.has_shared_weights = False
        """Whether some layer ran on several positions per example."""
        self.traces: dict[tuple[Any, ...], Float[Tensor, "3"]] = {}
        """Maps (parameter, index of its linear map) to the three traces."""

    def input(self, tracked: TrackedLayer, use: Use) -> None:
        """Note whether positions share the layer's weight."""
        if issubclass(tracked.rule, WeightSharingRule) and not self.has_shared_weights:
            rule = tracked.rule(tracked.layer, "expand", tracked.parameters)
            self.has_shared_weights = use.rows is not None or rule.inputs(use.a[:1]).shape[2] > 1

    def gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """Add one use's traces."""
        is_declared = use.rows is not None and not use.rows.of_positions
        if is_declared or not issubclass(tracked.rule, WeightSharingRule):
            return
        rule = tracked.rule(tracked.layer, "expand", tracked.parameters)
        if "weight" not in rule.names:
            return
        N, number = self.num_examples, None
        if use.rows is not None:
            use, b, number = Use(use.rows.padded(use.a)), use.rows.padded(b), use.rows.counts
            number = number[:EXAMPLES].to(b)
        if len(use.a) % N:  # not the examples' rows
            return
        some = slice(len(use.a) // N * EXAMPLES)  # rows of the first examples
        rows = rule.inputs(use.a[some]), rule.weight_gradients(b[some])
        a, g = map(at_least_float32, rows)  # (G, n, R, d)
        if number is None:
            number = g.new_full((a.shape[1],), a.shape[2])  # R of each example
        else:  # padded integers are token 0, whose one-hot row is not zero
            a = a * (torch.arange(a.shape[2], device=a.device) < number[:, None])[..., None]
            number = number.clamp(min=1)
        if a.shape[2] == 1:  # no shared positions: the trace is exact in both modes
            return
        # Only the exact trace forms the gradients Σ_r g_r a_rᵀ of the eight examples, (d_out, d_in)
        # each. The traces of both modes need only squared norms, since tr(B ⊗ A) = tr B · tr A.
        # Expand averages ‖a‖² over positions; reduce averages a over positions first.
        exact = (g.mT @ a).square().sum()
        terms = len(number) if self.per_example else number.sum()
        expand = g.square().sum((1, 2, 3)) @ (a.square().sum((1, 2, 3)) / terms)
        means = a.sum(2) / number[:, None]
        reduce = g.sum(2).square().sum((1, 2)) @ means.square().mean(1).sum(1)
        traces = torch.stack([exact, expand, reduce]).double()
        self.traces[_weight(tracked)] = self.traces.get(_weight(tracked), 0) + traces


def block_traces(
    model: nn.Module,
    assignment: RuleAssignment,
    likelihood: Likelihood,
    x: Any,
    y: Tensor,
    per_example: bool = False,
) -> dict[str, Float[Tensor, "3"]]:
    """Return the three traces of `BlockTraces` by layer name."""
    traces = BlockTraces(per_example)
    with Capture(model, assignment, traces) as capture:
        f = capture.forward(x)
        check_targets(f, y, likelihood, may_ignore=True)
        if not traces.has_shared_weights:
            return {}
        traces.num_examples = len(f)
        are_few = likelihood.num_vectors(f.shape[-1]) <= MOST_VECTORS
        fisher = ExactGGN() if are_few else DrawnLabels(MOST_VECTORS)
        # A separate generator keeps the pass's drawn labels independent of this choice.
        generator = torch.Generator(f.device).manual_seed(0)
        some = f[:EXAMPLES].detach(), y[:EXAMPLES]
        vectors = fisher.vectors(likelihood, *some, generator)
        others = torch.zeros_like(f[EXAMPLES:])
        capture.backward(f, (torch.cat([v.to(others), others]) for v in vectors))
    of_weights = {t.name: traces.traces.get(_weight(t)) for t in assignment.layers}
    return {name: of_one.cpu() for name, of_one in of_weights.items() if of_one is not None}


def _weight(tracked: TrackedLayer) -> tuple[Any, ...]:
    """Return a key for a linear map: the parameter's name and the map's index in it."""
    return tracked.parameters.get("weight"), tracked.slots.get("weight")


def nearest_modes(of_ranks: Sequence[Mapping[str, Float[Tensor, "3"]]]) -> KfacApprox:
    """Choose each layer's mode with the smaller ratio to the exact trace; reduce without one.

    Each rank has the traces of its own examples.
    """
    names = dict.fromkeys(name for traces in of_ranks for name in traces)
    expand: dict[str, Mode] = {}
    for name in names:
        total = torch.stack([traces[name] for traces in of_ranks if name in traces]).sum(0)
        exact, by_expand, by_reduce = total.clamp(min=1e-300).log().tolist()
        if abs(by_expand - exact) < abs(by_reduce - exact):
            expand[escape(name)] = "expand"
    return {**expand, "*": "reduce"} if expand else "reduce"
