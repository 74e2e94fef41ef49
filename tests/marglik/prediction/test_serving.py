"""The module to serve equals its predictive, in eager mode, exported, compiled and in ONNX."""

import shutil

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from marglik import KronLaplace, PredictiveConfig, laplace_predictive, map_predictive
from marglik.prediction.links import Calibration
from tests.marglik.posteriors import data, fitted, jacobians, network

LAST = PredictiveConfig("probit", layers="last")
CALIBRATION = Calibration(0.3, 1.7)


class Pixels(nn.Module):
    """Three outputs at each pixel (N, H, W, C), of a convolution with padding that reflects."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.last = nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect", bias=False)

    def forward(self, image, scale=1.0):
        return self.last(self.first(image).tanh() * scale).movedim(1, -1)


class Clamped(nn.Module):
    """Outputs of the last layer up to a bound, which the inputs of the test do not reach."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x).clamp(-100, 100)


class Scaled(nn.Module):
    """Outputs that aren't those of the last layer."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return 2 * self.net(x)


def of_likelihood(likelihood):
    y = data()[1] if "classification" in likelihood else data("regression")[1]
    if likelihood == "bernoulli":
        y = data("bernoulli")[1]
    elif likelihood == "heteroscedastic":
        model, y = network(), data("regression")[1][:, :1]
        model[-1] = nn.Linear(16, 2).double()
        return posterior(model, likelihood, y)
    elif likelihood == "poisson":
        y = y.abs().round()
    return posterior(network(), likelihood, y)


def posterior(model, likelihood, y):
    sigma = {"sigma_noise": 0.4} if likelihood == "regression" else {}
    la = KronLaplace(model, likelihood, prior_precision=0.8, **sigma)
    la.fit([(data()[0], y)])
    return la


LIKELIHOODS = [
    "classification", "noisy_classification(noise=0.2)", "regression", "bernoulli",
    "heteroscedastic", "poisson",
]  # fmt: skip
NEW = torch.randn(5, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_module_is_the_predictive(likelihood):
    """Also exported, with another number of inputs; and the variances, by the Jacobian."""
    la = of_likelihood(likelihood)
    config = PredictiveConfig(layers="last", labels="observed")
    predict = laplace_predictive(la, config, calibration=CALIBRATION)
    module = predict.module(data()[0])
    before = la.model.training
    mean, variance = module.train()(NEW)
    expected = predict(NEW)
    assert la.model.training == before
    assert_close(mean, expected.mean, rtol=0, atol=1e-10)
    if la.likelihood.kind == "continuous":
        assert_close(variance, expected.total_uncertainty, rtol=0, atol=1e-10)
    else:
        names = [name for name, _ in la.model[-1].named_parameters()]
        J = torch.cat([jacobians(la.model, NEW)[f"6.{name}"] for name in names], -1)
        last = la.precision().to_dense()[-J.shape[-1] :, -J.shape[-1] :]
        brute = torch.einsum("ncp,pq,ncq->nc", J, last.inverse(), J) * 0.3 / 1.7**2
        assert_close(variance, brute, rtol=0, atol=1e-10)
    # Negative control: another calibration has another mean, or another variance.
    plain = laplace_predictive(la, config)(NEW)
    change = plain.total_uncertainty - expected.total_uncertainty
    assert max((plain.mean - mean).abs().max(), change.abs().max()) > 1e-3
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(module, (data()[0],), dynamic_shapes=dynamic).module()
    assert_close(exported(NEW), (mean, variance), rtol=0, atol=1e-10)


def test_pixels_names_and_compilation():
    """A convolution at each pixel, inputs by name, and no break in the compiled graph."""
    torch.manual_seed(0)
    model = Pixels().double()
    labels = torch.randint(3, (8, 4, 4), generator=torch.Generator().manual_seed(0))
    la = posterior(model, "classification", labels)
    predict = laplace_predictive(la, LAST, calibration=CALIBRATION)
    module = predict.module(data()[0])
    found = module(image=NEW, scale=1.0)
    assert_close(found[0], predict(NEW).mean, rtol=0, atol=1e-10)
    assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(NEW), found)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor calls a C++ compiler")
def test_compiled_by_inductor():
    la, x = fitted()
    predict = laplace_predictive(la, LAST, calibration=CALIBRATION)
    module = predict.module(x)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True)(NEW)
        assert_close(compiled, module(NEW), rtol=0, atol=1e-10)
    assert_close(compiled[0], predict(NEW).mean, rtol=0, atol=1e-10)


def test_a_network_that_takes_one_position_of_its_last_layer():
    torch.manual_seed(0)

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):  # (N, 2, 4, 4), of which the first row is taken last
            return self.last(self.first(x.flatten(1, 2)).tanh())[:, 0]

    la = posterior(First().double(), "classification", data()[1])
    predict = laplace_predictive(la, LAST, calibration=CALIBRATION)
    assert_close(predict.module(data()[0])(NEW)[0], predict(NEW).mean, rtol=0, atol=1e-10)

    class Largest(First):
        def forward(self, x):  # whose variance is not the largest one
            return self.last(self.first(x.flatten(1, 2)).tanh()).amax(1)

    for seed in range(10):  # also where a single example has the largest variances there
        torch.manual_seed(seed)
        la = posterior(Largest().double(), "classification", data()[1])
        with pytest.raises(NotImplementedError, match="not the outputs of its last layer"):
            laplace_predictive(la, LAST, calibration=CALIBRATION).module(NEW[:1])


def test_of_the_network_itself():
    """The variance of a new target is σ² to the bit of float64, also of a calibrated σ."""
    la = of_likelihood("regression")
    predict = map_predictive(la.model, "regression", 0.4)
    mean, variance = predict.module(NEW)(NEW)
    assert_close(mean, predict(NEW).mean)
    assert_close(variance, torch.full_like(mean, 0.4**2), rtol=1e-15, atol=0)
    # A calibration without a width is the network's, too.
    scaled = laplace_predictive(la, calibration=Calibration(0.0, 1.0, 0.7))
    variance = scaled.module(NEW)(NEW)[1]
    assert_close(variance, torch.full_like(mean, 0.7**2), rtol=1e-15, atol=0)
    # Negative control: σ that went through float32.
    assert abs(float(torch.tensor(0.7)) ** 2 / 0.7**2 - 1) > 1e-9
    with torch.no_grad():
        la.model[-1].weight += 1
    with pytest.raises(ValueError, match="no longer has the weights"):
        scaled.module(NEW)


def test_in_onnx(tmp_path):
    """In float32, by onnxruntime, with another number of inputs."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    la, x = fitted(dtype=torch.float32)
    predict = laplace_predictive(la, LAST, calibration=CALIBRATION)
    module = predict.module(x)
    torch.onnx.export(
        module, (x,), tmp_path / "served.onnx", dynamo=True, verbose=False,
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), input_names=["x"],
        output_names=["mean", "variance"],
    )  # fmt: skip
    session = runtime.InferenceSession(tmp_path / "served.onnx")
    found = [torch.from_numpy(v) for v in session.run(None, {"x": NEW.float().numpy()})]
    assert_close(found, [*module(NEW.float())], rtol=1e-5, atol=1e-6)
    assert_close(found[0], predict(NEW.float()).mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "model", "reason"),
    [
        (PredictiveConfig(layers="all"), network(), "layers 'all' needs backward passes"),
        (PredictiveConfig("mc", layers="last"), network(), "'mc' draws samples"),
        (PredictiveConfig("linearised"), network(), "'linearised' draws samples"),
        (LAST, Scaled(), "not the outputs of its last layer 'net.6'"),
        (LAST, Clamped(), "not the outputs of its last layer 'net.6'"),
        (LAST, network()[:-1], "not the outputs of its last layer '3'"),
    ],
)
def test_what_cannot_be_served_says_so(config, model, reason):
    """And names what is served."""
    classes = model(data()[0]).shape[1]
    la = posterior(model, "classification", data()[1] % classes)
    with pytest.raises(NotImplementedError, match=reason) as error:
        laplace_predictive(la, config).module(data()[0])
    assert "PredictiveConfig(layers='last', method='probit')" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Linear", "Conv2d", "network"])
def test_a_served_module_is_cast(kind, dtype):
    """The layers run in the dtype; σ and variances beyond float16's range stay in float32."""
    torch.manual_seed(0)
    if kind == "Conv2d":
        model, y = Pixels(), torch.randint(3, (8, 4, 4))
        la = KronLaplace(model, "classification", prior_precision=1e-6)
        la.fit([(data()[0].float(), y)])
        module = laplace_predictive(la, LAST).module(data()[0].float())
    elif kind == "Linear":
        la = KronLaplace(network().float(), "regression", prior_precision=1e-6, sigma_noise=300.1)
        la.fit([(data()[0].float(), data("regression")[1].float())])
        module = laplace_predictive(la, LAST).module(data()[0].float())
    else:
        module = map_predictive(network().float(), "regression", 300.1).module(NEW)
    expected = module(NEW.float())
    cast = module.to(dtype)
    mean, variance = cast(NEW.to(dtype))
    tolerance = 30 * torch.finfo(dtype).eps
    assert_close(mean, expected[0], rtol=tolerance, atol=tolerance)
    assert_close(variance, expected[1], rtol=tolerance, atol=0)
    assert variance.max() > 65504  # of float16
    # Negative control: the layers' outputs are in the dtype and not in float32.
    assert not torch.equal(mean, expected[0])
    assert {p.dtype for p in cast.model.parameters()} >= {dtype}
    assert_close(cast.double()(NEW)[0], expected[0].double(), rtol=tolerance, atol=tolerance)
