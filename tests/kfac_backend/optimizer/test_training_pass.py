"""Factors of a step of training are those of a pass over the same batch."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from experiments.models import GPT
from kfac_backend import kronecker_factors
from kfac_backend.layers import Scale
from kfac_backend.optimizer.training_pass import TrainingPass
from kfac_backend.options import CurvatureOptions
from tests.kfac_backend.block_checks import MODES, randomize
from tests.kfac_backend.networks import convolution_flops, data, network
from tests.random_numbers import error, normal


def training_pass(model, **options):
    options = CurvatureOptions(**{"fisher": "exact", **options})
    generator = torch.Generator().manual_seed(0)
    return TrainingPass(model, "classification", options, generator)


def loss_of(f, y):
    return F.cross_entropy(f.flatten(0, -2), y.flatten())


def in_training(model, x, y, **options):
    """The blocks of one step."""
    curvature = training_pass(model, **options)
    loss_of(model(x), y).backward()
    blocks = curvature.mean_blocks()
    curvature.detach()
    return blocks


@pytest.mark.parametrize("kfac_approx", MODES)
def test_a_loss_term_for_each_position_of_which_some_do_not_count(kfac_approx):
    """Seen by their gradients: they count neither in the vectors nor in the number of terms."""
    model = randomize(GPT(vocab_size=5, context=4, dim=8, depth=1, heads=2, tied=False))
    x = torch.tensor([[1, 2, 3, 0], [4, 4, 0, 1]])
    y = torch.tensor([[2, -100, 0, 1], [-100, -100, 3, -100]])
    options = {"kfac_approx": kfac_approx, "fisher": "exact"}
    blocks = in_training(model, x, y, **options)
    factors = kronecker_factors(model, [(x, y)], "classification", ignore_index=-100, **options)
    for name, block in blocks.items():
        assert_close(block.to_dense(), factors.to_dense(name) / 4)
    model.zero_grad()
    all_count = in_training(model, x, y.clamp(min=0), **options)
    name = list(blocks)[-1]
    assert error(all_count[name].to_dense(), blocks[name].to_dense()) > 0.02


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, attention_mask):
        x = torch.tanh(self.first(x)) * attention_mask[..., None]
        return self.head(x.sum(1) / attention_mask.sum(1, keepdim=True))


@pytest.mark.parametrize("kfac_approx", MODES)
def test_positions_that_a_mask_hides(kfac_approx):
    model, mask = randomize(Masked()), torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    x, y = normal(3, 3, 3), torch.tensor([0, 1, 1])
    curvature = training_pass(model, kfac_approx=kfac_approx)
    loss_of(model(x, attention_mask=mask), y).backward()
    blocks = curvature.mean_blocks()
    batch = {"x": x, "attention_mask": mask, "labels": y}
    factors = kronecker_factors(model, [batch], "classification", kfac_approx=kfac_approx)
    for name, block in blocks.items():
        assert_close(block.to_dense(), factors.to_dense(name) / 3)
    other = torch.ones_like(mask)
    loss_of(model(x, attention_mask=other), y).backward()
    unmasked = curvature.mean_blocks()
    assert error(unmasked["first.weight"].to_dense(), blocks["first.weight"].to_dense()) > 0.05


@pytest.mark.parametrize("kfac_approx", MODES)
def test_monte_carlo_in_the_mean(kfac_approx):
    exact = in_training(network(), *data(), kfac_approx=kfac_approx)
    for samples, is_near in ((300, True), (1, False)):  # a single sample is not enough
        options = {"kfac_approx": kfac_approx, "fisher": "mc", "mc_samples": samples}
        found = in_training(network(), *data(), **options)
        errors = [error(found[name].B, block.B) for name, block in exact.items()]
        assert max(errors) < 0.25 if is_near else max(errors) > 0.25
        for name, block in exact.items():
            assert_close(found[name].A, block.A)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("kfac_approx", MODES)
def test_gradient_accumulation_is_one_batch(kfac_approx, fisher):
    model, (x, y) = network(), data(6)
    model[0].requires_grad_(fisher == "exact")  # what is frozen has no block
    options = {"kfac_approx": kfac_approx, "fisher": fisher}
    factors = kronecker_factors(model, [(x, y)], "classification", **options)
    curvature = training_pass(model, **options)
    for x_i, y_i in zip(x.split(2), y.split(2), strict=True):
        (loss_of(model(x_i), y_i) / 3).backward()
    blocks = curvature.mean_blocks()
    assert list(blocks) == list(factors.blocks)
    for name, block in blocks.items():
        assert_close(block.to_dense(), factors.to_dense(name) / 6)


@pytest.mark.parametrize(("fisher", "vectors"), [("exact", 2), ("mc", 1), ("empirical", 0)])
def test_costs_no_forward_pass_and_backward_passes_to_inputs_only(fisher, vectors):
    model, (x, y) = network(), data()
    plain = convolution_flops(lambda: loss_of(model(x), y).backward())
    first, _ = convolution_flops(lambda: model[0](x))
    forward = plain[0]
    curvature = training_pass(model, fisher=fisher)
    loss_of(model(x), y).backward()  # which makes the proof, too
    curvature.mean_blocks()
    found = convolution_flops(lambda: loss_of(model(x), y).backward())
    assert found == (forward, plain[1] + vectors * (forward - first))


def test_train_mode_and_random_numbers_stay():
    """Dropout draws what it draws without the hooks, and the proof leaves no trace."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).train()
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 0, 1])
    outputs, curvature = [], None
    for hooked in (False, True):
        curvature = training_pass(model) if hooked else None
        torch.manual_seed(3)
        outputs.append(model(x))
        loss_of(outputs[-1], y).backward()
        assert model.training and model[1].training
    assert torch.equal(*outputs)
    assert curvature.mean_blocks()["2.weight"].B.any()


def test_batch_norm_in_train_mode_passes_gradients_through_its_statistics():
    """B = Σ_n Σ_m J_mnᵀ Λ_m J_mn of the batch's function, as an expectation over all labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, labels = normal(4, 3), torch.cartesian_prod(*4 * [torch.arange(2)])
    p = model(x).softmax(-1).detach()
    found, z = 0.0, model[0](x).detach()
    for y in labels:  # fisher="mc" draws these, each with its probability
        blocks = in_training(model, x, y, fisher="empirical")
        found = found + p[torch.arange(4), y].prod() * blocks["0.weight"].B
    Lambda = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    J = torch.autograd.functional.jacobian(model[1:], z)  # (m, c, n, d)
    assert_close(found, torch.einsum("mcnd,mck,mkne->de", J, Lambda, J) / 4)
    J = J.diagonal(dim1=0, dim2=2)  # (c, d, n): without what n does to the others' outputs
    alone = torch.einsum("cdn,nck,ken->de", J, Lambda, J)
    assert (alone / 4 - found).norm() > 0.1 * found.norm()


def test_exact_vectors_of_different_examples_would_mix_in_batch_norm():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    training_pass(model)
    with pytest.raises(ValueError, match="'1' .BatchNorm1d.*fisher='mc'"):
        model(torch.randn(6, 3))
    model.eval()(torch.randn(6, 3))


class Checkpointed(nn.Module):
    """A block between two layers that runs a second time in the backward pass."""

    def __init__(self, block, in_eval_mode=False, use_reentrant=False):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(3, 4), block, nn.Linear(4, 2)
        self.in_eval_mode, self.use_reentrant = in_eval_mode, use_reentrant
        self.runs = 0

    def run_block(self, h):
        self.runs += 1
        return torch.tanh(self.block(torch.tanh(h)))

    def forward(self, x):
        h = self.first(x)
        if self.training or self.in_eval_mode:
            h = checkpoint(self.run_block, h, use_reentrant=self.use_reentrant)
        else:
            h = self.run_block(h)
        return self.head(h if h.dim() == 2 else h.mean(1))


CHECKPOINTED = {
    "shared axis": (lambda: nn.Linear(4, 4), (5, 3)),
    "used twice": (lambda: nn.Sequential(*2 * [nn.Linear(4, 4)]), (3,)),
    "scale": (Scale, (3,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (3,)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (3,)),
    "by parts": (lambda: nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True), (5, 3)),
}


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpoints_change_no_number(name, fisher, monkeypatch):
    make, shape = CHECKPOINTED[name]
    torch.manual_seed(0)
    model = Checkpointed(make()).double()
    x, y = normal(6, *shape), torch.tensor([0, 1, 1, 0, 1, 0])
    results = {}
    for kind in ("checkpoint", "none"):
        model.runs = 0
        model.zero_grad()
        torch.manual_seed(1)  # of dropout
        blocks = in_training(model, x, y, fisher=fisher)
        results[kind] = model.runs, blocks, [p.grad.clone() for p in model.parameters()]
        monkeypatch.setitem(globals(), "checkpoint", lambda f, h, **options: f(h))
    (runs, blocks, gradients), (plain_runs, expected, plain_gradients) = results.values()
    assert runs > plain_runs  # it did run again
    for block, other in zip(blocks.values(), expected.values(), strict=True):
        assert block.to_dense().any()
        assert_close(block.to_dense(), other.to_dense(), rtol=1e-12, atol=0)
    assert_close(gradients, plain_gradients, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_checkpoints_of_hugging_face_change_no_number():
    """Their models have a hook by which an embedding's output always requires a gradient."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=7, n_positions=6, n_embd=4, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 5, 1, 1, 0], [3, 3, 2, 6, 4]])
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).double().train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        curvature = training_pass(model)
        loss_of(model(input_ids=ids).logits, ids).backward()
        found.append({name: b.to_dense() for name, b in curvature.mean_blocks().items()})
    assert found[0].keys() == {name for name, _ in model.named_parameters()}
    assert_close(found[1], found[0], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_eval_mode": True}, "Layer 'block' .* only in train mode"),
        ({"use_reentrant": True}, "Layer 'block' .* use_reentrant=False"),
    ],
)
def test_other_checkpoints_are_named_errors_in_the_first_forward_pass(options, message):
    model = Checkpointed(nn.Linear(4, 4), **options)
    training_pass(model)
    with pytest.raises(NotImplementedError, match=message):
        model(torch.randn(5, 3))


class Compiling:
    """A backend of torch.compile that counts what it compiles, and how often that runs."""

    def __init__(self):
        self.compiled = self.runs = 0

    def __call__(self, graph, inputs):
        self.compiled += 1

        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


def small_network():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), block, nn.Linear(4, 2)).double()


@pytest.fixture
def compiling():
    torch.compiler.reset()
    yield Compiling()
    torch.compiler.reset()


NEEDS_2_10 = pytest.mark.skipif(torch.__version__ < "2.10", reason="not compiled in place before")


@pytest.mark.parametrize("what", ["model", "part", pytest.param("part in place", marks=NEEDS_2_10)])
def test_compiled_steps_change_no_number(what, compiling):
    """Steps with new factors run as Python, all others compiled, and nothing is compiled anew."""
    x, y = normal(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])
    model, plain = small_network(), small_network()
    if what == "model":
        model = torch.compile(model, backend=compiling)
    elif what == "part":
        model[2] = torch.compile(model[2], backend=compiling)
    else:
        model[2].compile(backend=compiling)
    curvature, runs = training_pass(model), []
    for step in range(6):
        curvature.is_scheduled = step % 2 == 0
        before = compiling.runs
        loss_of(model(x), y).backward()
        runs.append(compiling.runs - before)
        if curvature.is_due:
            blocks, expected = curvature.mean_blocks().values(), in_training(plain, x, y).values()
            for block, other in zip(blocks, expected, strict=True):
                assert_close(block.to_dense(), other.to_dense(), rtol=1e-12, atol=0)
        with torch.no_grad():
            for p in (*model.parameters(), *plain.parameters()):
                p.mul_(1.1)
    assert runs == [0, 1] * 3 and compiling.compiled == 1


@pytest.mark.parametrize("how", ["before", "in place"])
def test_a_model_in_compiled_code_is_a_named_error(how, compiling):
    model = small_network()
    called = torch.compile(model, backend=compiling) if how == "before" else model
    curvature = training_pass(model)
    if how == "in place":
        model.compile(backend=compiling)
    with pytest.raises(NotImplementedError, match=r"\(Sequential\) .*torch.compile"):
        called(normal(6, 3))
    curvature.is_scheduled = False
    called(normal(6, 3))


def test_a_pass_of_its_own_compiles_nothing(compiling):
    model = small_network()
    data = [(normal(6, 3), torch.tensor([0, 1, 1, 0, 1, 0]))]
    expected = kronecker_factors(model, data, "classification")
    model[2] = torch.compile(model[2], backend=compiling)
    factors = kronecker_factors(model, data, "classification")
    assert compiling.compiled == 0
    for block, other in zip(factors.blocks.values(), expected.blocks.values(), strict=True):
        assert_close(block.to_dense(), other.to_dense(), rtol=1e-12, atol=0)
    model(data[0][0])
    assert compiling.compiled == compiling.runs == 1  # and what there was is there again


def test_forward_passes_without_a_backward_pass_are_forgotten():
    model, (x, y) = network(), data()
    whole = in_training(model, x, y)
    curvature = training_pass(model)
    model(2 * x)  # for whatever reason
    with torch.no_grad():
        model(3 * x)
    kronecker_factors(model, [(x, y)], "classification")  # a Laplace pass in between
    loss_of(model(x), y).backward()
    for name, block in curvature.mean_blocks().items():
        assert_close(block.to_dense(), whole[name].to_dense())
    # But not those between accumulated ones, whose inputs are in the sums.
    loss_of(model(x), y).backward()
    model(x)
    with pytest.raises(RuntimeError, match=r"without a backward pass.*no_grad\(\)"):
        model(x)
    curvature.reset()
    loss = loss_of(model(x), y) + loss_of(model(2 * x), y)
    with pytest.raises(RuntimeError, match="one backward pass after each forward pass"):
        loss.backward()


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_backward_pass_that_fails_leaves_nothing_of_its_batch(fisher):
    """Memory that is exhausted in the middle; the batch is then made again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = normal(6, 4), torch.arange(6) % 3
    expected, fails = in_training(model, x, y, fisher=fisher), []

    def fail_once(g):
        if fails:
            fails.clear()
            raise torch.OutOfMemoryError("once")

    def add(output):
        if output.requires_grad:
            output.register_hook(fail_once)

    curvature = training_pass(model, fisher=fisher)
    model[1].register_forward_hook(lambda _, inputs, output: add(output))
    loss_of(model(x), y).backward()
    curvature.mean_blocks()
    fails.append(True)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(model(x), y).backward()
    model.zero_grad()
    loss_of(model(x), y).backward()
    for name, block in curvature.mean_blocks().items():
        assert_close(block.to_dense(), expected[name].to_dense())


def test_hooks_that_observe_some_batches_of_a_step():
    """Such as a log of the first batch, with accumulated gradients."""
    model, (x, y) = network(), data()
    expected = in_training(copy.deepcopy(model), x, y)
    curvature = training_pass(model)
    for half in (slice(None, len(x) // 2), slice(len(x) // 2, None)):
        hook = model[0].register_forward_hook(lambda m, args, output: None)
        loss_of(model(x[half]), y[half]).backward()
        hook.remove()
    for name, block in curvature.mean_blocks().items():
        assert_close(block.to_dense(), expected[name].to_dense())


def test_two_losses_of_one_output():
    """The curvature is that of the output, whatever its losses, unless it is made of these."""
    model, (x, y) = network(), data()
    whole = in_training(model, x, y)
    curvature = training_pass(model)
    f = model(x)
    (0.3 * loss_of(f, y)).backward(retain_graph=True)
    (0.7 * loss_of(f, y)).backward()
    assert_close(curvature.mean_blocks()["10.weight"].B, whole["10.weight"].B)
    training_pass(other := network(), fisher="empirical")
    f = other(x)
    loss_of(f, y).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="for a second time"):
        loss_of(f, y).backward()


def test_detach_and_copies():
    model, (x, y) = network(), data()
    curvature = training_pass(model)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        loss_of(other(x), y).backward()
        with pytest.raises(RuntimeError, match="no backward pass"):
            curvature.mean_blocks()
    loss_of(model(x), y).backward()  # after the error a right step is one
    assert curvature.mean_blocks()
    curvature.detach()
    assert not model._forward_hooks and not model._forward_pre_hooks
