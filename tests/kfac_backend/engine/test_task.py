"""Models, inputs and outputs that are refused, by a message with the way out."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.curvature import CurvaturePass
from marglik import Laplace, Posterior, PriorLearner, compute_metrics, map_predictive, predict_all
from tests.kfac_backend.covariance.posteriors import precision_of
from tests.kfac_backend.networks import Model
from tests.random_numbers import normal

X, Y = normal(8, 4), torch.arange(8) % 3
SPOILT = X.masked_fill(torch.eye(8, 4).bool(), torch.inf)


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def using(forward, **parameters):
    """A linear layer, used as a function says."""
    return Model(forward, layer=nn.Linear(4, 3).double(), **parameters)


def spoilt(layer):
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    return layer


COMPLEX = torch.ones(3, dtype=torch.complex128)
REFUSED = {
    "complex outputs": (
        lambda: using(lambda m, x: torch.complex(m.layer(x), m.layer(x))),
        X, normal(8, 3), "regression", TypeError, r"complex.*view_as_real",
    ),
    "complex parameter": (
        lambda: using(lambda m, x: (m.layer(x) * m.scale).real, scale=COMPLEX),
        X, normal(8, 3), "regression", NotImplementedError, r"'scale' is complex.*freeze",
    ),
    "a scripted layer": (
        lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 3))).double(),
        X, Y, "classification", NotImplementedError, r"'1'.*torch.jit.*freeze",
    ),
    "meta": (lambda: network().to("meta"), X, Y, "classification", ValueError, r"meta.*to_empty"),
    "numpy": (network, X.numpy(), Y, "classification", TypeError, r"ndarray.*from_numpy"),
    "infinite inputs": (network, SPOILT, Y, "classification", ValueError, "inputs.*Correct"),
    "infinite targets": (
        network, X, SPOILT[:, :3], "regression", ValueError, "targets.*Correct or remove",
    ),
    "integers": (network, X.byte(), Y, "classification", TypeError, r"'0' .Linear.*uint8.*x.float"),
    "tokens in floating point": (
        lambda: nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(12, 3)).double(),
        X, Y, "classification", TypeError, r"'0' .Embedding.*needs integers.*tokens.long\(\)",
    ),
    "no examples": (network, X[:0], Y[:0], "classification", ValueError, "has no examples"),
    "no batch axis": (
        lambda: nn.Linear(4, 3).double(),
        X[0], Y[:1], "classification", ValueError, r"Linear.* got shape \(4,\), but needs a batch",
    ),
    "weights that are not finite": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), spoilt(nn.Linear(4, 3))).double(),
        X, Y, "classification", ValueError, "Parameter '2.weight' contains NaN",
    ),
    "overflow": (
        lambda: using(lambda m, x: m.layer(x) * 1e300 * 1e300),
        X, Y, "classification", ValueError, "activations overflow",
    ),
    "outputs that are no tensor": (
        lambda: using(lambda m, x: {"output": m.layer(x)}),
        X, Y, "classification", TypeError, "returned dict.*returns only its logits",
    ),
    "BatchNorm without running statistics": (
        lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), network()).eval(),
        X, Y, "classification", ValueError, "keeps no running statistics",
    ),
    "BatchNorm in train mode": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), network()),
        X, Y, "classification", ValueError, r"'0' .BatchNorm1d.*model.eval\(\)",
    ),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(3)),
        X, Y, "classification", ValueError, "'0.weight' has no shape yet",
    ),
    "frozen": (
        lambda: network().requires_grad_(False),
        X, Y, "classification", ValueError, "no trainable parameter",
    ),
    "0-dimensional": (
        lambda: using(lambda m, x: m.layer(x) * m.s, s=torch.tensor(1.0)),
        X, Y, "classification", ValueError, "'s' is 0-dimensional",
    ),
    "no model": (lambda: "resnet18", X, Y, "classification", TypeError, "must be a torch.nn"),
    "DataParallel": (
        lambda: nn.Sequential(nn.DataParallel(network())),
        X, Y, "classification", TypeError, r"in DataParallel.*wrapped module: model.0.module",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_way_out(case):
    make, x, y, likelihood, error, match = REFUSED[case]
    with pytest.raises(error, match=f"(?s){match}"):
        kronecker_factors(make(), [(x, y)], likelihood)


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ([], ValueError, "The data is empty"),
        ([X[0]], TypeError, r"must be \(x, y\)"),
        ([(X, Y), (X, 1)], TypeError, "the targets are int, .*both must be tensors"),
    ],
)
def test_data_of_no_batches(data, error, match):
    with pytest.raises(error, match=match):
        kronecker_factors(network(), data, "classification")


@pytest.mark.parametrize(
    "option", [{"fisher": "nonsense"}, {"unsupported": "nonsense"}, {"diagonal_above": 0}]
)
def test_options_with_what_is_supported(option):
    ((name, value),) = option.items()
    supported = f"{name}='nonsense' .*choose one of '" if value == "nonsense" else f"{name} must"
    with pytest.raises(ValueError, match=supported):
        kronecker_factors(network(), [(X, Y)], "classification", **option)


def test_a_mask_of_attention_may_hold_minus_infinity():
    model = using(lambda m, x: m.layer((x["mask"] == 0) * x["x"]))
    mask = torch.zeros(8, 4).masked_fill(torch.eye(8, 4).bool(), -torch.inf)
    batch = {"x": X, "mask": mask, "labels": Y}
    factors = kronecker_factors(model, [batch], "classification", dict_key_mask=None)
    expected = kronecker_factors(model.layer, [((mask == 0) * X, Y)], "classification")
    assert_close(factors.to_dense("layer.weight"), expected.to_dense("weight"))
    with pytest.raises(ValueError, match=r"inputs.*Correct"):
        kronecker_factors(model, [batch | {"x": mask}], "classification", dict_key_mask=None)


@pytest.mark.parametrize("wrap", [lambda f: {"logits": f}, lambda f: {"loss": 0.0, "logits": f}])
def test_a_mapping_with_logits_is_the_logits(wrap):
    model = using(lambda m, x: wrap(m.layer(x)))
    factors = kronecker_factors(model, [(X, Y)], "classification")
    expected = kronecker_factors(model.layer, [(X, Y)], "classification")
    assert_close(factors.to_dense("layer.weight"), expected.to_dense("weight"))
    f, _ = OutputCovariance(model, precision_of(factors))(X)
    assert_close(f, model.layer(X).detach())


def linear(bias=0.0, scale=1.0, rows=3):
    layer = nn.Linear(4, rows).double()
    with torch.no_grad():
        layer.weight.copy_(normal(rows, 4, seed=3) * scale)
        layer.bias.fill_(bias)
    return layer


WIDE = normal(40, 4, seed=2)
YES = (normal(40, 3, seed=1) > 0).double()
PROBABILITIES = {
    "softmax": (lambda: nn.Sequential(linear(), nn.Softmax(-1)), X, Y, "classification"),
    "of positions": (
        lambda: nn.Sequential(linear(), nn.Softmax(-1)),
        normal(8, 2, 4), Y[:, None].expand(8, 2), "classification",
    ),
    "smoothed": (
        lambda: using(lambda m, x: m.layer(x).softmax(1)), X, Y, "classification(smoothing=0.1)",
    ),
    "weighted": (
        lambda: using(lambda m, x: m.layer(x).softmax(1)),
        X, torch.stack([Y, Y + 1], 1).double(), "weighted(of='classification')",
    ),
    "sigmoid": (lambda: nn.Sequential(linear(), nn.Sigmoid()), X, YES[:8], "bernoulli"),
}  # fmt: skip
LOGITS = {
    "logits": (linear, X, Y, "classification"),
    "log probabilities": (
        lambda: nn.Sequential(linear(), nn.LogSoftmax(-1)), X, Y, "classification",
    ),
    "numbers in [0, 1]": (lambda: nn.Sequential(linear(), nn.Sigmoid()), X, X[:, :3], "regression"),
    "counts": (lambda: nn.Sequential(linear(), nn.Sigmoid()), X, YES[:8], "poisson"),
    "of an untrained network": (lambda: linear(0.3, 0.05), WIDE, YES, "bernoulli"),
    "few that differ": (lambda: linear(0.5, 0.22, 1), X[1:4], YES[1:4, :1], "bernoulli"),
}  # fmt: skip


def warnings_of(function):
    """What is said of probabilities while a function runs; other warnings are errors."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("case", PROBABILITIES)
def test_outputs_that_are_probabilities_are_warned_of_once(case):
    """In several passes over several batches, of which the first has one example."""
    make, x, y, likelihood = PROBABILITIES[case]
    curvature = CurvaturePass(make(), likelihood)

    def passes():
        for _ in range(2):
            for some in (slice(1), slice(1, 8), slice(8, None)):
                if len(y[some]):
                    curvature.add(x[some], y[some])
            curvature.factors()

    (said,) = warnings_of(passes)
    assert f"Likelihood '{likelihood}' takes logits. Omit the" in said
    assert ("Omit the sigmoid" in said) == ("bernoulli" in likelihood)


@pytest.mark.parametrize("case", LOGITS)
def test_outputs_that_may_be_logits_are_not_warned_of(case):
    make, x, y, likelihood = LOGITS[case]
    assert warnings_of(lambda: kronecker_factors(make(), [(x, y)], likelihood)) == []
    f = make()(x)
    if case in ("of an untrained network", "few that differ"):
        assert f.min() > 0 and f.max() < 1  # though all lie there
        assert (case == "few that differ") == (f.max() - f.min() > 0.5).item()


class Mapped(nn.Module):
    """A model of a mapping's entry, which it converts if asked."""

    def __init__(self, inner, converts=False):
        super().__init__()
        self.inner, self.converts = inner, converts

    def forward(self, batch):
        x = batch["x"]
        return self.inner(x.float() if self.converts else x)


NETWORKS = {
    "convolution": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
    "recurrent": lambda: Model(
        lambda m, x: m.fc(m.lstm(x.flatten(1, 2))[0].mean(1)),
        lstm=nn.LSTM(4, 3, batch_first=True), fc=nn.Linear(3, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.uint8, torch.int64])
@pytest.mark.parametrize("name", NETWORKS)
def test_inputs_in_another_dtype_are_named(name, dtype):
    """In a pass, and in predictions; a model that converts them runs."""
    torch.manual_seed(0)
    model, x, y = NETWORKS[name](), normal(6, 1, 4, 4).abs().mul(9).float(), torch.arange(6) % 3
    wrong = x.to(dtype)
    said = pytest.raises(
        TypeError, match=rf"{dtype}.*torch.float32.*x\.(to\(torch.float32\)|float\(\))"
    )
    for mode in ("auto", "expand"):
        with said as raised:
            kronecker_factors(model, [(wrong, y)], "classification", kfac_approx=mode)
        assert "\n" not in str(raised.value)
    with said:
        kronecker_factors(Mapped(model), [{"x": wrong, "labels": y}], "classification")
    converting = Mapped(model, converts=True)
    found = kronecker_factors(converting, [{"x": wrong, "labels": y}], "classification")
    expected = kronecker_factors(model, [(wrong.float(), y)], "classification")
    last = list(expected.blocks)[-1]
    assert_close(found.to_dense(f"inner.{last}"), expected.to_dense(last))
    posterior = Laplace(model, "classification", "all")
    posterior.fit([(x, y)])
    for predict in (
        posterior.output_distribution,
        lambda x: posterior.linearised_outputs(posterior.sample(2), x),
        lambda x: posterior.network_outputs(posterior.sample(2), x),
    ):
        with said:
            predict(wrong)


@pytest.mark.parametrize(
    "targets", [Y[:, None], nn.functional.one_hot(Y), nn.functional.one_hot(Y).double()]
)
def test_labels_of_another_shape_are_named_in_every_mode(targets):
    messages = set()
    for mode in ("auto", "expand", "reduce"):
        with pytest.raises(
            (ValueError, TypeError), match="likelihood 'classification' needs"
        ) as raised:
            kronecker_factors(network(), [(X, targets)], "classification", kfac_approx=mode)
        messages.add(str(raised.value))
    assert len(messages) == 1


def masked(R=5):
    x = normal(6, R, 4)
    mask = torch.ones(6, R, dtype=torch.long)
    mask[0, -1] = 0
    return {"x": x, "attention_mask": mask}


def test_numbers_at_hidden_positions_would_count_and_are_refused():
    """But for weights of 0 there, with which the loss is that of the others alone."""

    class PerPosition(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, batch):
            return self.fc(batch["x"]) * batch["attention_mask"][..., None]

    model, batch, y = PerPosition().double(), masked(), normal(6, 5, 1)
    with pytest.raises(ValueError, match=r"counts all targets.*weighted\(of='regression'\)"):
        kronecker_factors(model, [(batch, y)], "regression", kfac_approx="expand")
    weights = batch["attention_mask"].double()[..., None]
    of_weighted = [(batch, torch.cat([y, weights], -1))]
    found = kronecker_factors(model, of_weighted, "weighted(of='regression')", kfac_approx="expand")
    errors = (model(batch) - y).square() * weights
    assert found.loss == pytest.approx(0.5 * errors.sum().item())


def test_layers_with_other_positions_than_a_mask_are_named():
    class WithClassToken(nn.Module):
        def __init__(self, more):
            super().__init__()
            self.fc, self.head, self.more = nn.Linear(4, 3), nn.Linear(3, 2), more

        def forward(self, batch):
            x, mask = batch["x"], batch["attention_mask"].double()
            x = torch.cat([x[:, :1].detach(), x], 1) if self.more else x
            mask = torch.cat([mask[:, :1], mask], 1) if self.more else mask
            return self.head((self.fc(x).tanh() * mask[..., None]).sum(1))

    data = [(masked(), torch.arange(6) % 2)]
    with pytest.warns(UserWarning, match=r"does not fit the inputs of 'fc' \(Linear\)\. All"):
        kronecker_factors(WithClassToken(True).double(), data, "classification")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kronecker_factors(WithClassToken(False).double(), data, "classification")


@pytest.mark.parametrize("mode", ["expand", "reduce"])
def test_convolutions_that_count_the_padding_of_sequences_are_named(mode):
    """Their A depends on the padding, which nn.Linear in place of a kernel of size 1 leaves out."""

    def padded(batch, more):
        x, mask = batch["x"], batch["attention_mask"]
        mask = torch.cat([mask, mask.new_zeros(len(mask), more)], 1)
        return {"x": torch.cat([x, x.new_ones(len(x), more, 4)], 1), "attention_mask": mask}

    def pooled(is_linear, model, batch):
        x, mask = batch["x"], batch["attention_mask"].to(batch["x"])[..., None]
        h = model.layer(x * mask) if is_linear else model.layer((x * mask).mT).mT
        return (h * mask).sum(1) / mask.sum(1)

    def A(layer, more):
        model = Model(partial(pooled, isinstance(layer, nn.Linear)), layer=layer).double()
        data = [(padded(masked(), more), torch.arange(6) % 2)]
        found = kronecker_factors(model, data, "classification", kfac_approx=mode)
        return found.blocks["layer.weight"].A

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(A(nn.Linear(4, 2), 5), A(nn.Linear(4, 2), 0))
    words = (
        r"the inputs of 'layer' \(Conv1d\).*In convolutions all.*count.*nn.Linear on \(N, R, d\)"
    )
    with pytest.warns(UserWarning, match=words):
        wider = A(nn.Conv1d(4, 2, 1), 5)
    with pytest.warns(UserWarning, match=words):
        assert wider.trace() < 0.6 * A(nn.Conv1d(4, 2, 1), 0).trace()


def up(z):
    return nn.functional.interpolate(z, scale_factor=1.0, mode="nearest") * 1.01


PLACES = {
    "convolution": (lambda m, x: m.layer(x), "are second"),
    "convolution, resized": (lambda m, x: up(m.layer(x)), "may be second"),
    "convolution, moved": (lambda m, x: m.layer(x).movedim(1, -1), None),
    "resized, with an axis": (lambda m, x: up(m.layer(x)).movedim(1, -1)[:, None], None),
    "a linear layer": (lambda m, x: m.last(m.layer(x).movedim(1, -1)), None),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("run", ["factors", "full", "learner", "metrics"])
def test_classes_that_may_be_second_are_refused_where_sizes_are_equal(case, run):
    """Four classes of 4 × 4 pixels: a posterior is fitted only where the loss is that of pixels."""
    function, words = PLACES[case]
    torch.manual_seed(0)
    model = Model(function, layer=nn.Conv2d(2, 4, 1), last=nn.Linear(4, 4)).double()
    x, y = normal(6, 2, 4, 4), torch.arange(96).view(6, 4, 4).square() // 3 % 4
    y = y[:, None] if "axis" in case else y
    if "linear" not in case:
        model.last.requires_grad_(False)
    runs = {
        "factors": lambda: kronecker_factors(model, [(x, y)], "classification").loss,
        "full": lambda: fitted_loss(model, [(x, y)]),
        "learner": lambda: first_loss(model, [(x, y)]) * len(x),
        "metrics": lambda: y.numel() * compute_metrics(
            *predict_all(map_predictive(model, "classification"), [(x, y)]), "classification"
        ).nll,
    }  # fmt: skip
    if words:
        with pytest.raises(ValueError, match=rf"{words}.*f.movedim\(1, -1\).*y.unsqueeze\(1\)"):
            runs[run]()
        return
    f = model(x)
    cross_entropy = nn.functional.cross_entropy
    expected = cross_entropy(f.movedim(-1, 1), y, reduction="sum").item()
    assert float(runs[run]()) == pytest.approx(expected, rel=1e-9)
    # Negative control: with the classes second, the loss would be another.
    assert "axis" in case or cross_entropy(f, y, reduction="sum").item() != pytest.approx(expected)


def fitted_loss(model, data):
    posterior = Posterior(model, "classification", structure="full")
    posterior.fit(data)
    return posterior.fitted_curvature().loss


def first_loss(model, data):
    learner = PriorLearner("classification", loss_mean_over="terms")
    learner.start(model, torch.optim.SGD(model.parameters(), 0.1), data, 3)
    return learner.state.measures.first_loss
