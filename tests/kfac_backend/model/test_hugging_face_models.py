"""Models in the style of Hugging Face: mappings in, objects out; adapters; recurrent cells."""

import pytest
import torch
import torch.nn.functional as F
from laplace import Laplace
from torch import nn
from torch.testing import assert_close

from kfac_backend import counted_positions, kronecker_factors
from kfac_backend.laplace_torch.interface import KfacGGN
from marglik import KronLaplace, marglik_training
from marglik.training.loaders import CountedLoader
from tests import oracles
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.model.language import Output


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is stored (d_in, d_out)."""

    def __init__(self, d_out, d_in):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_in, d_out) / 2)
        self.bias = nn.Parameter(torch.zeros(d_out))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


Conv1D.__module__ = "transformers.pytorch_utils"


class Classifier(nn.Module):
    """Takes its entries by name, and computes a loss of labels where it is given them."""

    def __init__(self, middle=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.middle = middle or nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, input_ids, attention_mask=None, labels=None):
        mask = attention_mask.bool()
        with counted_positions(mask):
            x = torch.tanh(self.middle(self.embedding(input_ids)))
        x = x.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True)
        f = self.head(x)
        return Output(f, None if labels is None else F.cross_entropy(f, labels))


class Plain(nn.Module):
    """The same as a function of the tokens alone, for full masks."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids, torch.ones_like(input_ids)).logits


def batch(n=5, masked=True):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(7, (n, 4), generator=generator)
    mask = torch.ones_like(tokens)
    if masked:
        mask[::2, 2:] = 0
    labels = torch.randint(3, (n,), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels, "unknown": tokens}


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("middle", [None, Conv1D(4, 4)], ids=["Linear", "Conv1D"])
def test_mappings_and_objects(middle, kfac_approx):
    model, whole = Classifier(middle), batch(masked=False)
    factors = kronecker_factors(model, [whole], "classification", kfac_approx=kfac_approx)
    plain = Plain(model)
    pair = whole["input_ids"], whole["labels"]
    expected = kronecker_factors(plain, [pair], "classification", kfac_approx=kfac_approx)
    for name, block in factors.blocks.items():
        assert_close(block.to_dense(), expected.to_dense(f"model.{name}"))
    if kfac_approx == "reduce":  # exact behind the mean, but for the tanh
        ggn = oracles.dense_ggn_blocks(plain, whole["input_ids"], "classification")
        assert_close(factors.to_dense("head.bias"), ggn["model.head.bias"])


def test_gpt2_layer_is_a_linear_layer_stored_the_other_way_round():
    layer = Conv1D(4, 4)
    linear = nn.Linear(4, 4)
    model = Classifier(layer)
    linear.weight.data, linear.bias.data = layer.weight.data.T.contiguous(), layer.bias.data
    reference = Classifier(linear)
    reference.load_state_dict(model.state_dict() | {"middle.weight": layer.weight.T})
    factors = kronecker_factors(model, [batch()], "classification")
    expected = kronecker_factors(reference, [batch()], "classification").to_dense("middle.weight")
    turned = expected.view(4, 4, 4, 4).permute(1, 0, 3, 2).reshape(16, 16)
    assert_close(factors.to_dense("middle.weight"), turned)
    assert not torch.allclose(expected, turned)


def test_a_subset_of_the_parameters_as_adapters_have_it():
    model = Classifier()
    whole = kronecker_factors(model, [batch()], "classification")
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model.middle.weight.requires_grad_(True)
    factors = kronecker_factors(model, [batch()], "classification")
    assert list(factors.blocks) == ["middle.weight", "head.weight", "head.bias"]
    for name, block in factors.blocks.items():
        assert_close(block.to_dense(), whole.to_dense(name))


def test_laplace_of_such_a_model():
    la = KronLaplace(Classifier(), "classification", kfac_approx="auto")
    la.fit([batch(), batch(3)])
    assert la.factors is not None and la.factors.options.kfac_approx == "reduce"
    probabilities = la(batch())
    assert probabilities.shape == (5, 3)
    assert_close(probabilities.sum(1), torch.ones(5, dtype=torch.float64))


def test_through_laplace_torch():
    class Whole(nn.Module):
        """laplace-torch calls a model with the mapping itself."""

        def __init__(self):
            super().__init__()
            self.inner = Classifier()

        def forward(self, batch):
            return self.inner(batch["input_ids"], batch["attention_mask"]).logits

    la = Laplace(Whole(), "classification", "all", "kron", backend=KfacGGN)
    la.fit(CountedLoader([batch()]))
    ours = KronLaplace(Whole(), "classification", kfac_approx="expand")
    ours.fit([batch()])
    assert_close(la.H_facs.to_matrix(), ours.H_facs.to_matrix())


def test_online_training_of_such_a_model():
    data = [batch(), batch(3)]
    laplace, model, evidences, losses = marglik_training(
        Classifier(), data, n_epochs=4, marglik_frequency=2, n_hypersteps=3, kfac_approx="auto"
    )
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert len(set(laplace.prior_precision.tolist())) > 1
    assert isinstance(model, Classifier)


class Positions(nn.Module):
    """Adds an embedding of positions that runs once for all examples, and pools by a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(7, 4), nn.Embedding(4, 4)
        self.middle, self.pool, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.bool()
        x = self.tokens(input_ids) + self.positions(torch.arange(4)[None])
        x = torch.tanh(self.middle(x)).masked_fill(~mask[..., None], 0).sum(1)
        return Output(self.head(torch.tanh(self.pool(x))))


class Masked(nn.Module):
    """The mask around the whole of a model that knows nothing of it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        with counted_positions(attention_mask.bool()):
            return self.model(input_ids, attention_mask)


@pytest.mark.parametrize("kfac_approx", MODES)
def test_a_mask_around_a_whole_model(kfac_approx):
    model, data = Positions(), batch(4)  # as many examples as positions and features
    factors = kronecker_factors(Masked(model), [data], "classification", kfac_approx=kfac_approx)
    counted = int(data["attention_mask"].sum()) if kfac_approx == "expand" else 4
    for name in ("tokens", "positions", "middle"):
        assert factors.blocks[f"model.{name}.weight"].num_terms == counted
    # A mapping's mask counts of itself.
    of_itself = kronecker_factors(model, [data], "classification", kfac_approx=kfac_approx)
    for name, block in of_itself.blocks.items():
        assert_close(block.to_dense(), factors.to_dense(f"model.{name}"))
    # What lies behind the pooling is as without the mask.
    plain = kronecker_factors(
        model, [data], "classification", kfac_approx=kfac_approx, dict_key_mask=None
    )
    for name in ("pool.weight", "head.weight", "head.bias"):
        assert_close(factors.to_dense(f"model.{name}"), plain.to_dense(name))
    uncounted = plain.to_dense("middle.weight")
    assert (factors.to_dense("model.middle.weight") - uncounted).norm() > 0.1 * uncounted.norm()
