"""kfac_approx="auto" beside the traces of dense blocks."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kfac_backend import counted_positions, examples_of_rows, kronecker_factors
from kfac_backend.curvature import CurvaturePass
from kfac_backend.engine.automatic_mode import block_traces, nearest_modes
from kfac_backend.likelihoods import Classification
from tests.kfac_backend.block_checks import assert_same, factors_of
from tests.kfac_backend.networks import random_model
from tests.oracles import dense_ggn_blocks
from tests.random_numbers import normal
from tests.uses import kfac_blocks


def images(*head: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 4, 2), *head).double()


def attention() -> nn.Module:
    """Softmax attention of tokens (N, R, 4) by layers of its own; means over the tokens."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        scores = m.query(x) @ m.key(x).mT
        return m.head((scores.softmax(-1) @ m.value(x)).mean(1))

    layers = {name: nn.Linear(4, 4) for name in ("query", "key", "value")}
    return random_model(forward, **layers, head=nn.Linear(4, 3))


MODELS = {
    # name: (model, inputs, layers with positions, one of them and its mode)
    "flattened": (
        images(nn.Flatten(), nn.Linear(36, 3)), normal(6, 2, 5, 5), ["0", "2"],
        ("0", "expand"),
    ),
    "averaged": (
        images(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), normal(6, 2, 5, 5),
        ["0", "2"], ("2", "reduce"),
    ),
    "attention": (
        attention(), normal(6, 5, 4), ["query", "key", "value"], ("key", "expand"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("scaling", ["positions", "examples"])
@pytest.mark.parametrize("name", MODELS)
def test_the_mode_with_the_better_trace(name, scaling):
    model, x, layers, (one, mode_of_one) = MODELS[name]
    scaled = {"expand_scaling": scaling}
    y = torch.arange(6) % 3
    exact = dense_ggn_blocks(model, x, "classification")
    by_mode = [
        kfac_blocks(model, x, "classification", mode, scaling) for mode in ("expand", "reduce")
    ]
    assignment = CurvaturePass(model, "classification").driver.proof.assignment
    per_example = scaling == "examples"
    traces = block_traces(model, assignment, Classification(), x, y, per_example)
    assert list(traces) == layers
    modes = {}
    for layer in layers:
        blocks = [blocks[f"{layer}.weight"] for blocks in (exact, *by_mode)]
        dense = torch.stack([block.trace() for block in blocks])
        # The oracle's blocks round what is zero: the keys' gradients, summed over positions.
        assert_close(traces[layer], dense, atol=1e-12, rtol=1e-9)
        distance = (dense.clamp(min=1e-12) / dense[0]).log().abs()
        modes[layer] = "expand" if distance[1] < distance[2] else "reduce"
    assert scaling == "examples" or modes[one] == mode_of_one
    expand = {layer: mode for layer, mode in modes.items() if mode == "expand"}
    expected = {**expand, "*": "reduce"} if expand else "reduce"
    assert nearest_modes([traces]) == expected
    # All of the first batch decide here; the second has nothing to say.
    factors = factors_of(model, [(x, y), (x[:1], y[:1])], "auto", **scaled)
    assert factors.options.kfac_approx == expected
    assert_same(factors, factors_of(model, [(x, y), (x[:1], y[:1])], expected, **scaled))


@pytest.mark.parametrize("classes", [3, 20])
def test_a_whole_batch_has_the_traces_of_its_first_examples(classes):
    """A model that takes no part of a batch has the same mode; of many outputs labels are drawn."""
    model = images(nn.Flatten(), nn.Linear(36, classes))
    x, y = normal(20, 2, 5, 5), torch.arange(20) % 3
    assignment = CurvaturePass(model, "classification").driver.proof.assignment

    def traces(which: slice) -> Tensor:
        of_layers = block_traces(model, assignment, Classification(), x[which], y[which])
        return torch.stack(list(of_layers.values()))

    assert_close(traces(slice(20)), traces(slice(8)))
    assert not torch.allclose(traces(slice(20)), traces(slice(8, 16)), rtol=0.01)


def test_ranks_decide_by_the_sum_of_their_traces():
    one, other = ({"a": torch.tensor(t)} for t in ([4.0, 3.0, 1.0], [20.0, 1.0, 18.0]))
    assert nearest_modes([one, {}]) == {"a": "expand", "*": "reduce"}
    assert nearest_modes([one, other]) == "reduce"
    assert nearest_modes([{"b[0]": one["a"]}]) == {"b[[]0]": "expand", "*": "reduce"}


def test_layers_that_are_told_their_examples_keep_reduce():
    """A head over all positions of each example, whose rows come with an index."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        N, R = x.shape[:2]
        with examples_of_rows(torch.arange(N).repeat_interleave(R), N):
            a = m.layer(x.flatten(0, 1)).tanh()
        return m.head(a.unflatten(0, (N, R)).flatten(1))

    model = random_model(forward, layer=nn.Linear(4, 3), head=nn.Linear(18, 3))
    x = normal(6, 6, 4)
    factors = factors_of(model, [(x, torch.arange(6) % 3)], "auto")
    assert factors.options.kfac_approx == "reduce"


@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_deciding_draws_none_of_the_users_random_numbers(fisher):
    model = images(nn.Flatten(), nn.Linear(36, 3))
    data = [(normal(6, 2, 5, 5), torch.arange(6) % 3)]
    states = []
    for mode in ("auto", {"0": "expand", "2": "expand", "*": "reduce"}):
        torch.manual_seed(1)
        factors = kronecker_factors(model, data, "classification", kfac_approx=mode, fisher=fisher)
        states.append((factors.options.kfac_approx, torch.get_rng_state()))
    assert states[0][0] == states[1][0]
    assert torch.equal(states[0][1], states[1][1])


@pytest.mark.parametrize("first", [nn.Linear(4, 5), nn.Embedding(7, 5)])
def test_what_a_mask_hides_is_in_no_trace(first):
    """More padding, with any numbers in it, changes nothing; a mask that hides nothing neither."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = first, nn.Linear(5, 3)

        def forward(self, h: Tensor, mask: Tensor) -> Tensor:
            h = self.two(self.one(h).tanh()) * mask[..., None]
            return h.sum(1) / mask.sum(1, keepdim=True)

    model, y = Mean().double(), torch.tensor([0, 1, 2, 1])
    ragged = torch.arange(6) < torch.tensor([[6], [2], [3], [5]])
    assignment = CurvaturePass(model, "classification").driver.proof.assignment

    def inputs(mask: Tensor, seed: int = 0) -> dict[str, Tensor]:
        h = torch.cat([normal(4, 6, 4), 1 + normal(4, mask.shape[1] - 6, 4, seed=seed)], 1)
        is_token = isinstance(first, nn.Embedding)
        return {"h": (100 * h[..., 0]).long() % 7 if is_token else h, "mask": mask}

    def traces(mask: Tensor, shows: Tensor | None, seed: int = 0) -> Tensor:
        x = inputs(mask, seed)
        with counted_positions(shows):
            of_layers = block_traces(model, assignment, Classification(), x, y)
        return torch.stack([of_layers["one"], of_layers["two"]])

    longer = nn.functional.pad(ragged, (0, 3))
    assert_close(traces(longer, longer, 1), traces(ragged, ragged))
    whole = torch.ones(4, 6, dtype=torch.bool)
    assert_close(traces(whole, whole), traces(whole, None))
    for i, mode in ((1, "expand"), (2, "reduce")):
        batch = inputs(ragged) | {"labels": y}
        factors = kronecker_factors(
            model, [batch], "classification", kfac_approx=mode, dict_key_mask="mask"
        )
        assert_close(traces(ragged, ragged)[0, i], factors.to_dense("one.weight").trace())
    # Negative control: without the mask, the padding counts.
    assert not torch.allclose(traces(longer, None, 1), traces(ragged, None), rtol=0.01)
