"""`marglik_training` beside laplace-torch's function of that name, on the same network and data."""

import pytest
import torch
from laplace import marglik_training as laplace_torch_training
from laplace.curvature import CurvlinopsHessian
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend.laplace_torch.interface import KfacGGN
from marglik import marglik_training

pytestmark = pytest.mark.usefixtures("one_thread")


def loader(likelihood="classification", n=30, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, dtype=torch.float64, generator=generator)
    y = x[:, :3].argmax(-1) if likelihood == "classification" else x[:, :1].sin()
    return DataLoader(TensorDataset(x, y), 10, **options)


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


OPTIONS = {
    "n_epochs": 6, "n_hypersteps": 5, "marglik_frequency": 2, "n_epochs_burnin": 3,
    "prior_prec_init": 0.5, "optimizer_kwargs": {"lr": 1e-2},
}  # fmt: skip
THEIRS = {
    "keep": "best", "scheduler_cls": LambdaLR, "scheduler_kwargs": {"lr_lambda": lambda _: 1.0}
}  # fmt: skip
"""What laplace-torch does: the update with the best evidence, at a constant rate."""


@pytest.mark.parametrize(
    ("prior_structure", "structure"),
    [("layerwise", "kron"), ("scalar", "kron"), ("scalar", "full"), ("layerwise", "diag")],
)
def test_same_numbers_in_classification(prior_structure, structure):
    options = OPTIONS | {"prior_structure": prior_structure, "hessian_structure": structure}
    ours = marglik_training(network(), loader(), **options, **THEIRS)
    theirs = laplace_torch_training(network(), loader(), backend=KfacGGN, **options)
    assert len(ours) == len(theirs) == 4
    assert ours == (ours.laplace, ours.model, ours.negative_evidences, ours.losses)
    assert_close(torch.tensor(ours[2]), torch.tensor(theirs[2]), rtol=1e-6, atol=0)
    assert_close(torch.tensor(ours[3]), torch.tensor(theirs[3]), rtol=1e-6, atol=0)
    assert ours[0].structure == structure
    assert ours[0].prior_precision.shape == theirs[0].prior_precision.shape
    x = next(iter(loader()))[0]
    assert_close(ours[1](x), theirs[1](x), rtol=1e-5, atol=1e-7)
    # laplace-torch keeps the precision of before the last hyperparameter step.
    assert_close(ours[0](x), theirs[0](x), rtol=0.02, atol=0)


def test_same_evidences_in_regression():
    """Adam does not see that laplace-torch's loss is twice ours (one output)."""
    options = OPTIONS | {"sigma_noise_init": 0.7}
    ours = marglik_training(network(1), loader("regression"), "regression", **options, **THEIRS)
    theirs = laplace_torch_training(
        network(1), loader("regression"), "regression", backend=KfacGGN, **options
    )
    assert_close(torch.tensor(ours[2]), torch.tensor(theirs[2]), rtol=1e-4, atol=0)
    # laplace-torch keeps the noise of before the last hyperparameter step.
    assert ours[0].sigma_noise == pytest.approx(float(theirs[0].sigma_noise), rel=0.1)


def test_short_runs_on_a_full_batch_are_as_good_as_laplace_torchs():
    """Its example, a noisy sine: errors, noise and evidence after 50 epochs, with our defaults."""
    torch.manual_seed(0)
    x = 8 * torch.rand(150, 1)
    data = DataLoader(TensorDataset(x, x.sin() + 0.3 * torch.randn(150, 1)), 150)
    grid = torch.linspace(0, 8, 100)[:, None]

    def trained(training, **options):
        torch.manual_seed(100)
        model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
        options |= {"n_epochs": 50, "optimizer_kwargs": {"lr": 1e-2}}
        la, model, *_ = training(model, data, "regression", **options)
        rmse = (model(grid) - grid.sin()).square().mean().sqrt().item()
        return rmse, float(la.sigma_noise), float(la.log_marginal_likelihood())

    rmse, sigma, evidence = trained(marglik_training)
    theirs = trained(laplace_torch_training, hessian_structure="kron", backend=KfacGGN)
    assert rmse < 1.01 * theirs[0]
    assert sigma < 1.01 * theirs[1]  # whose start at 1 it still comes from
    assert evidence > theirs[2]


def test_what_it_returns():
    """Examples that were seen, a fixed noise, a weight decay set to 0, gradients in the input."""
    with pytest.warns(UserWarning, match="weight_decay is set to 0"):
        la, model, *_ = marglik_training(
            network(1), loader("regression", 35, drop_last=True), "regression",
            fix_sigma_noise=True, sigma_noise_init=0.3, enable_backprop=True,
            scheduler_cls=CosineAnnealingLR, scheduler_kwargs={"T_max": 18},
            **OPTIONS | {"optimizer_kwargs": {"weight_decay": 0.1}},
        )  # fmt: skip
    assert la.n_data == 30 and la.sigma_noise == pytest.approx(0.3) and not model.training
    x = torch.randn(3, 4).double().requires_grad_()
    la(x)[1].sum().backward()
    assert x.grad.any()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prior_structure": "diag"}, ValueError, "'diag'.*use laplace.marglik_training"),
        ({"hessian_structure": "block"}, ValueError, "hessian_structure='block' is not supported"),
        (
            {
                "hessian_structure": "full",
                "likelihood": "student_t(df=4)",
                "model": network(1),
                "train_loader": loader("regression"),
            },
            NotImplementedError,
            "'full' has no derivatives",
        ),
        (
            {"hessian_structure": "full", "kfac_approx": "reduce"},
            ValueError,
            "for hessian_structure 'kron'",
        ),
        (
            {"backend": CurvlinopsHessian},
            ValueError,
            "'CurvlinopsHessian' computes neither the GGN",
        ),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        marglik_training(**{"model": network(), "train_loader": loader()} | options)
