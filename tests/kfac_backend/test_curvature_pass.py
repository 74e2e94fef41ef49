"""The fast pass against the plain one, and that it does no work that it need not do."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from kfac_backend import kronecker_factors
from kfac_backend.factors import CurvaturePass
from kfac_backend.layers import Bias, Scale
from kfac_backend.layers.uses import PositionSums
from kfac_backend.model import batches
from tests import oracles
from tests.kfac_backend.networks import assert_same, data, images, network, wide_resnet
from tests.plain_curvature import plain_factors

MODES = ["expand", "reduce"]


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize(
    ("dtype", "width", "tolerance"), [(torch.float64, 1, 1e-12), (torch.float32, 2, 1e-4)]
)
def test_wide_resnet_equals_the_plain_implementation(kfac_approx, dtype, width, tolerance):
    model, (x, y) = wide_resnet(width, dtype), images(4, dtype)
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    plain = plain_factors(model, x, kfac_approx)
    assert set(plain) == set(factors.blocks) and len(plain) == (50 if width == 2 else 49)
    for name, (B, A) in plain.items():
        block = factors.blocks[name]
        assert (block.B - B).norm() <= tolerance * B.norm(), name
        if A is not None:
            assert block.A is not None
            assert (block.A - A).norm() <= tolerance * A.norm(), name


def convolution_flops(work):
    with FlopCounterMode(display=False) as counter:
        work()
    counts = counter.get_flop_counts()["Global"]
    aten = torch.ops.aten
    return counts.get(aten.convolution, 0), counts.get(aten.convolution_backward, 0)


@pytest.mark.parametrize(("fisher", "vectors"), [("exact", 9), ("mc", 1), ("empirical", 1)])
def test_backward_passes_reach_inputs_only(fisher, vectors):
    """V passes to the inputs of all convolutions but the first, and no weight gradient."""
    model, (x, y) = wide_resnet(), images(3)
    curvature = CurvaturePass(model, "classification", fisher=fisher)
    curvature.add(x, y)
    forward, _ = convolution_flops(lambda: model(x))
    stem, _ = convolution_flops(lambda: model.conv(x))
    assert convolution_flops(lambda: curvature.add(x, y)) == (forward, vectors * (forward - stem))
    # Negative control: a training step computes the weights' gradients, too.
    loss = nn.functional.cross_entropy(model(x), y)
    assert convolution_flops(loss.backward) == (0, 2 * forward - stem)


@pytest.mark.parametrize("kfac_approx", MODES)
def test_parts_of_a_batch_give_what_the_batch_gives(kfac_approx, monkeypatch):
    model, (x, y) = network(), data()
    whole = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    # The largest activation has 4·4·4 entries of 8 bytes an example.
    monkeypatch.setattr(batches, "LARGEST_ACTIVATION", 3 * 512)
    sizes = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    split = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    assert_same(split, whole, rtol=1e-12, atol=1e-14)
    assert split.num_data == 7 and split.loss == pytest.approx(whole.loss, rel=1e-12)
    assert max(sizes) <= 4  # 7 examples in even parts of three; the proof takes four


def test_a_model_that_takes_whole_batches_only_is_not_split(monkeypatch):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            assert len(x) == 6
            return self.fc(x.reshape(6, 4))

    monkeypatch.setattr(batches, "LARGEST_ACTIVATION", 1)
    x, y = torch.randn(6, 2, 2), torch.zeros(6, dtype=torch.long)
    assert kronecker_factors(Fixed(), [(x, y)], "classification").num_data == 6


def test_examples_that_mix_before_the_first_layer_are_not_split(monkeypatch):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(x - x.mean(0))

    model, (x, y) = Centred(), data()
    whole = kronecker_factors(model, [(x, y)], "classification")
    monkeypatch.setattr(batches, "LARGEST_ACTIVATION", 1)
    assert_same(kronecker_factors(model, [(x, y)], "classification"), whole)


def test_the_proof_is_asked_for_again_after_it_failed():
    class Bypassed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.out(nn.functional.linear(x, self.fc.weight, self.fc.bias))

    curvature = CurvaturePass(Bypassed(), "classification")
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="outside of the forward"):
            curvature.add(x, y)
        with pytest.raises(RuntimeError, match="Call reset"):
            curvature.add(x, y)
        curvature.reset()


def test_a_batch_that_fails_halfway_cannot_be_skipped_in_silence():
    model, (x, y) = network(), data()
    curvature = CurvaturePass(model, "classification")
    curvature.add(x, y)
    with pytest.raises(ValueError, match="Label 3 is out of range"):
        curvature.add(x, torch.full_like(y, 3))
    for use in (lambda: curvature.add(x, y), curvature.factors):
        with pytest.raises(RuntimeError, match="The last batch of this curvature pass failed"):
            use()
    curvature.reset()
    curvature.add(x, y)
    assert_same(curvature.factors(), kronecker_factors(model, [(x, y)], "classification"))
    with pytest.raises(ValueError, match="since the last factors"):
        curvature.factors()


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 2, 4), (6, 2, 3, 2, 4)])
def test_scalars_of_any_shape_are_exact(shape, kfac_approx):
    class Scalars(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.bias, self.scale = nn.Linear(4, shape[-1]), Bias(), Scale()
            self.out = nn.Linear(1, 3)

        def forward(self, x):
            h = self.fc(x) if len(shape) > 1 else self.fc(x)[:, 0]
            h = self.scale(torch.tanh(self.bias(h)))
            return self.out(h.reshape(len(x), -1).sum(1, keepdim=True))

    torch.manual_seed(0)
    model = Scalars().double()
    x = torch.randn(6, *shape[1:-1], 4, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    exact = oracles.dense_ggn_blocks(model, x, "classification")
    for name in ("bias.bias", "scale.scale"):
        assert_close(factors.to_dense(name), exact[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
def test_batched_vectors_with_several_loss_terms(fisher, kfac_approx):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), Scale(), nn.Linear(4, 3)).double()
    x, y = torch.randn(5, 2, 3).double(), torch.randint(3, (5, 2))
    looped, batched = (
        kronecker_factors(
            model, [(x, y)], "classification", kfac_approx=kfac_approx, fisher=fisher,
            mc_samples=2, generator=torch.Generator().manual_seed(0), batched=batched,
        )
        for batched in (False, True)
    )  # fmt: skip
    assert_same(batched, looped)


@pytest.mark.parametrize("kfac_approx", MODES)
def test_batched_vectors_give_what_a_loop_gives(kfac_approx):
    model, (x, y) = network(), data()
    options = {"likelihood": "classification", "kfac_approx": kfac_approx}
    looped = kronecker_factors(model, [(x, y)], **options)
    assert_same(kronecker_factors(model, [(x, y)], batched=True, **options), looped)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_model_that_views_its_images_runs_in_their_own_memory_format(memory_format):
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(48, 3)

        def forward(self, x):
            return self.fc(torch.tanh(self.conv(x)).view(len(x), -1))

    torch.manual_seed(0)
    model, (x, y) = Viewing().double(), data()
    if memory_format == torch.channels_last:
        x = x.contiguous(memory_format=memory_format)
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            kronecker_factors(model, [(x, y)], "classification")
        return
    factors = kronecker_factors(model, [(x, y)], "classification")
    for name, (B, _) in plain_factors(model, x, "expand").items():
        assert_close(factors.blocks[name].B, B)


def test_position_sums_are_taken_once_of_a_gradient_that_did_not_change():
    sums, b = PositionSums(), torch.randn(4, 3, 2, 2)
    first = sums(b, features=1)
    assert_close(first, b.sum((2, 3)))
    assert sums(b, features=1) is first
    assert_close(sums(b, features=-1), b.sum((1, 2)))
    sums(b, features=1)
    b.mul_(2)  # as autograd adds up gradients in place
    assert_close(sums(b, features=1), 2 * first)


def test_an_input_that_is_modified_in_place_afterwards_is_an_error():
    class Modifies(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 3), Scale()

        def forward(self, x):
            h = self.fc(x)
            y = self.scale(h)
            h.mul_(2)
            return y + h

    with pytest.raises(NotImplementedError, match="'scale' \\(Scale\\) was modified in place"):
        kronecker_factors(
            Modifies(), [(torch.randn(3, 4), torch.tensor([0, 1, 2]))], "classification"
        )
