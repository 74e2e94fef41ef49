"""The fast pass against the plain one, and that it does no work that it need not do."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from experiments.timing import peak_memory
from kfac_backend import batches, kronecker_factors, weight_sharing
from kfac_backend.curvature_pass import CurvaturePass
from kfac_backend.kronecker import KroneckerFactors
from kfac_backend.layers import Bias, Scale
from kfac_backend.loss_hessian import loss_hessian_root
from kfac_backend.precision import _fp32_precision
from marglik.models import WideResNetFixup
from tests import oracles
from tests.plain_curvature import plain_factors

MODES = ["expand", "reduce"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), Bias(), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 2, groups=2),
        Scale(), Bias(), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 5), nn.ReLU(),
        nn.Linear(5, 3),
    ).double()  # fmt: skip


def data(n=7):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, 4, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (n,), generator=generator)


def wide_resnet(width=1, dtype=torch.float64):
    torch.manual_seed(0)
    model = WideResNetFixup(widen_factor=width).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model.to(dtype)


def images(n, dtype=torch.float64, size=16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, size, size, generator=generator).to(dtype)
    return x, torch.randint(10, (n,), generator=generator)


def assert_same(first, second, **tolerances):
    assert list(first.blocks) == list(second.blocks)
    for name, block in first.blocks.items():
        assert_close(block.B, second.blocks[name].B, **tolerances)
        if block.A is not None:
            assert_close(block.A, second.blocks[name].A, **tolerances)


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize(
    ("dtype", "width", "tolerance"), [(torch.float64, 1, 1e-12), (torch.float32, 4, 1e-4)]
)
def test_wide_resnet_equals_the_plain_implementation(kfac_approx, dtype, width, tolerance):
    model, (x, y) = wide_resnet(width, dtype), images(4, dtype)
    factors = kronecker_factors(model, [(x, y)], "classification", kfac_approx=kfac_approx)
    plain = plain_factors(model, x, kfac_approx)
    assert set(plain) == set(factors.blocks) and len(plain) == (50 if width == 4 else 49)
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
    assert sizes == [1, 2, 2, 3, 3, 3, 3, 1]  # the plan, the proof (twice), the parts


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


def test_layers_that_see_the_same_gradient_sum_it_once(monkeypatch):
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), Bias(), Bias(), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    )
    x, y = torch.randn(4, 2, 4, 4), torch.zeros(4, dtype=torch.long)
    curvature = CurvaturePass(model, "classification", kfac_approx="reduce")
    curvature.add(x, y)
    calls, over_positions = [], weight_sharing._over_positions
    monkeypatch.setattr(
        weight_sharing, "_over_positions", lambda *a: calls.append(a) or over_positions(*a)
    )
    curvature.add(x, y)
    assert len(calls) == 2 * 2  # for each vector: the linear layer, and the three others


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


# --- precision of the backward passes ---


def bf16_makes_a_difference():
    a = torch.randn(4, 16, 8, 8)
    convolution = nn.Conv2d(16, 16, 3)
    with torch.no_grad(), _fp32_precision("ieee", "ieee"):
        full = convolution(a)
    with torch.no_grad(), _fp32_precision("bf16", "ieee"):
        return not torch.equal(convolution(a), full)


def test_bf16_backward_passes_change_B_by_a_percent_and_A_not_at_all():
    model, (x, y) = wide_resnet(4, torch.float32), images(8, torch.float32)
    if not bf16_makes_a_difference():
        pytest.skip("this CPU multiplies float32 in full all the same")
    before = torch.backends.mkldnn.conv.fp32_precision
    full, low = (
        kronecker_factors(model, [(x, y)], "classification", backward_precision=precision)
        for precision in ("float32", "bf16")
    )
    assert torch.backends.mkldnn.conv.fp32_precision == before
    assert low.loss == full.loss
    errors = [(low.blocks[n].B - b.B).norm() / b.B.norm() for n, b in full.blocks.items()]
    assert max(errors) > 1e-5
    for name, block in full.blocks.items():
        assert (low.blocks[name].B - block.B).norm() <= 0.02 * block.B.norm(), name
        if block.A is not None:
            assert torch.equal(low.blocks[name].A, block.A)


def test_the_user_s_precision_is_not_used():
    model, (x, y) = wide_resnet(2, torch.float32), images(4, torch.float32)
    reference = kronecker_factors(model, [(x, y)], "classification")
    matmul, conv = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision = conv.fp32_precision = "bf16"
        factors = kronecker_factors(model, [(x, y)], "classification")
        assert matmul.fp32_precision == conv.fp32_precision == "bf16"
        control = plain_factors(model, x, "expand")
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
    errors = [(factors.blocks[n].B - b.B).norm() / b.B.norm() for n, b in reference.blocks.items()]
    assert max(errors) < 1e-5
    if bf16_makes_a_difference():
        wrong = [(control[n][0] - b.B).norm() / b.B.norm() for n, b in reference.blocks.items()]
        assert max(wrong) > 1e-4


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_a_precision_that_the_device_lacks_is_an_error(precision):
    with pytest.raises(ValueError, match=f"backward_precision='{precision}'"):
        kronecker_factors(network(), [data()], "classification", backward_precision=precision)


# --- rank_tolerance ---


def confident():
    """A network whose predictions are close to certain, for most examples."""
    model = network()
    with torch.no_grad():
        model[-1].weight.mul_(40)
    return model


def test_leading_columns_are_those_of_each_example():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), Bias(), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    model, (x, y) = model.double(), data(20)
    with torch.no_grad():
        model[-1].weight.mul_(8)
    columns = torch.stack(list(loss_hessian_root(model(x).detach(), "classification")), -1)
    energies = columns.square().sum(1)  # (N, C - 1)
    first_is_enough = energies[:, 1] <= 0.2 * energies.sum(1)
    assert first_is_enough.any() and not first_is_enough.all()
    columns[first_is_enough, :, 1] = 0.0

    factors = kronecker_factors(model, [(x, y)], "classification", rank_tolerance=0.2)
    plain = plain_factors(model, x, "expand", vectors=list(columns.unbind(-1)))
    for name, (B, _) in plain.items():
        assert_close(factors.blocks[name].B, B)
    missing = energies[first_is_enough, 1].sum() / energies.sum()
    assert factors.left_out_share == pytest.approx(missing.item())


@pytest.mark.parametrize("batched", [False, True])
def test_predictions_that_are_certain_to_rounding(batched):
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([300.0, 0.0, 0.0]))
    x, y = data()
    factors = kronecker_factors(
        model, [(x.float(), y)], "classification", rank_tolerance=0.1, batched=batched
    )
    assert factors.left_out_share == 0.0
    assert factors.blocks["1.weight"].B.shape == (3, 3) and not factors.blocks["1.weight"].B.any()


def test_what_was_left_out_is_in_the_factors_and_their_file(tmp_path):
    model, (x, y) = confident(), data(20)
    exact = kronecker_factors(model, [(x, y)], "classification")
    assert exact.left_out_share == exact.rank_tolerance == 0.0
    factors = kronecker_factors(model, [(x, y)], "classification", rank_tolerance=0.3)
    assert 0 < factors.left_out_share <= 0.3
    p = torch.softmax(model(x).detach(), -1)
    assert factors.trace == pytest.approx((1 - p.square().sum(-1)).sum().item(), rel=1e-10)
    factors.save(tmp_path / "factors.safetensors")
    loaded = KroneckerFactors.load(tmp_path / "factors.safetensors")
    assert loaded.left_out_share == factors.left_out_share
    both = factors + factors
    assert both.left_out_share == pytest.approx(factors.left_out_share)
    with pytest.raises(ValueError, match="rank_tolerance 0.3 and 0.0"):
        factors + exact


def test_fewer_columns_are_fewer_backward_passes():
    model, (x, y) = confident(), data(3)
    passes = []
    for tolerance in (0.0, 0.9):
        curvature = CurvaturePass(model, "classification", rank_tolerance=tolerance)
        curvature.add(x, y)
        vectors = []
        handle = model[-1].register_forward_hook(
            lambda layer, args, output, vectors=vectors: (
                output.register_hook(vectors.append) and None
            )
        )
        curvature.add(x, y)
        handle.remove()
        passes.append(len(vectors))
    assert passes == [2, 1]


@pytest.mark.parametrize("tolerance", [-0.1, 1.0])
def test_a_wrong_tolerance(tolerance):
    with pytest.raises(ValueError, match=f"rank_tolerance must be in \\[0, 1\\), not {tolerance}"):
        CurvaturePass(network(), "classification", rank_tolerance=tolerance)


@pytest.mark.parametrize(
    ("likelihood", "fisher"), [("regression", "exact"), ("classification", "mc")]
)
def test_a_tolerance_where_all_vectors_are_alike(likelihood, fisher):
    with pytest.raises(ValueError, match="rank_tolerance=0.1 needs likelihood 'classification'"):
        CurvaturePass(network(), likelihood, fisher=fisher, rank_tolerance=0.1)


# --- memory ---


@pytest.mark.parametrize("kfac_approx", MODES)
def test_peak_memory_is_that_of_a_training_step_and_the_factors(kfac_approx):
    model, (x, y) = wide_resnet(2, torch.float32), images(16, torch.float32, size=32)
    cpu = torch.device("cpu")

    def step():
        nn.functional.cross_entropy(model(x), y).backward()
        model.zero_grad()

    curvature = CurvaturePass(model, "classification", kfac_approx=kfac_approx)
    curvature.add(x, y)
    factors = curvature.factors()
    size = sum(F.nbytes for b in factors.blocks.values() for F in (b.B, b.A) if F is not None)

    def work():
        curvature.add(x, y)
        curvature.factors()

    step()
    assert peak_memory(work, cpu) <= 1.3 * peak_memory(step, cpu) + size


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS")
def test_out_of_memory_names_a_batch_size_that_fits():
    code = """
import re, resource, torch
from torch import nn
from kfac_backend import batches, kronecker_factors

batches.LARGEST_ACTIVATION = 2**40  # no parts: they would fit
model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32768, 2))
x, y = torch.randn(512, 3, 32, 32), torch.zeros(512, dtype=torch.long)
kronecker_factors(model[:1].append(nn.Flatten()), [(x[:2], torch.zeros(2, dtype=torch.long))],
                  "classification", fisher="mc", kfac_approx="reduce")
model[-1].requires_grad_(False)
used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 250 * 2**20, resource.RLIM_INFINITY))
try:
    kronecker_factors(model, [(x, y)], "classification")
except torch.OutOfMemoryError as error:
    print(error)
    fitting = int(re.search(r"Batches of (\\d+) fit", str(error))[1])
    data = zip(x.split(fitting), y.split(fitting))
    print("seen", kronecker_factors(model, data, "classification").num_data)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Out of memory on cpu in a curvature pass with batches of 512" in done.stdout, (
        done.stderr
    )
    assert "seen 512" in done.stdout, done.stdout + done.stderr
