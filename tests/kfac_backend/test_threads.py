"""What is done otherwise with several threads, and beside other threads, gives the same numbers."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.blocks.block import KroneckerBlock, compute_eigenvalues
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.layers.gram.gram import DenseGram, is_tall, tall_product
from kfac_backend.threads import SharedSetting, turn_of
from tests.kfac_backend.covariance.posteriors import precision_of
from tests.kfac_backend.networks import assert_same_factors


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("M", [32 * 8, 32 * 8 + 1])
def test_products_of_tall_factors(M):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(M, 8, generator=generator, dtype=torch.float64)
    right = torch.randn(M, 5, generator=generator, dtype=torch.float64)
    assert is_tall(left)
    assert_close(tall_product(left, right), left.mT @ right)
    gram = DenseGram()
    gram.add(left[None])
    gram.add(left[None])
    assert_close(gram.total(), 2 * (left.mT @ left)[None])


def test_eigenvalues_of_several_factors_at_once():
    generator = torch.Generator().manual_seed(0)
    roots = [torch.randn(d, d, generator=generator, dtype=torch.float64) for d in (300, 10, 260)]
    B, A, C = (root @ root.mT for root in roots)
    blocks = [KroneckerBlock("weight", B, A), KroneckerBlock("other", C)]
    compute_eigenvalues(blocks)
    for factor, (found, clipped) in zip((B, A), blocks[0].__dict__["_known"], strict=True):
        assert_close(found, torch.linalg.eigvalsh(factor), rtol=1e-8, atol=1e-8)
        assert clipped == 0
    assert_close(blocks[1].eigenvalues(), torch.linalg.eigvalsh(C), rtol=1e-8, atol=1e-8)


def settings():
    """The process's settings that a pass changes."""
    return (
        torch.backends.mkldnn.conv.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.backends.mha.get_fastpath_enabled(),
    )


class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, watch):
        ctx.watch = watch
        watch("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.watch("backward")
        return grad, None


class Watching(nn.Module):
    """A network that calls back in the middle of each forward and backward pass."""

    def __init__(self, watch=lambda when: None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()
        self.watch = watch

    def forward(self, x):
        return self.last(Watched.apply(self.first(x).tanh(), self.watch))


def batches(n=4):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(5, 3), draw(5, 3)) for _ in range(n)]


def in_threads(*functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(f) for f in functions]]


def test_passes_of_two_precisions_beside_each_other():
    before, seen = settings(), {"float32": set(), "bf16": set()}

    def run(precision):
        def watch(when):
            for _ in range(2):
                # The fused path is off in forward passes; backward passes know none.
                seen[precision].add((when, *settings()[: 3 if when == "forward" else 2]))
                time.sleep(0.001)

        return kronecker_factors(
            Watching(watch), batches(8), "regression", backward_precision=precision
        )

    in_threads(*(lambda p=p: run(p) for p in ("float32", "bf16") * 2))
    full = {("forward", "ieee", "ieee", False), ("backward", "ieee", "ieee")}
    assert seen["float32"] == full
    # The proof's own backward passes are in float32.
    assert seen["bf16"] == full | {("backward", "bf16", "bf16")}
    assert settings() == before


def test_passes_over_one_model_take_turns():
    """Hooks would see each other's batches, and the model be left with other tensors."""
    model = Watching(lambda when: time.sleep(0.002))
    parameters = list(model.parameters())
    data = batches()
    alone = [kronecker_factors(model, [batch], "regression") for batch in data]
    precision = precision_of(alone[0])
    covariance = OutputCovariance(model, precision)(data[0][0])[1]
    found = in_threads(
        *(lambda b=b: kronecker_factors(model, [b], "regression") for b in data),
        *[lambda: OutputCovariance(model, precision)(data[0][0])[1]] * 2,
    )
    for one, expected in zip(found[:4], alone, strict=True):
        assert_same_factors(one, expected, rtol=0, atol=0)
    assert all(torch.equal(one, covariance) for one in found[4:])
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not any(m._forward_hooks for m in model.modules())


def test_passes_over_two_models_do_not_wait():
    barrier = threading.Barrier(2)
    wait = lambda when: barrier.wait(timeout=30)  # noqa: E731
    in_threads(
        *(
            lambda m=m: kronecker_factors(m, batches(), "regression")
            for m in (Watching(wait), Watching(wait))
        )
    )


def test_a_pass_that_fails_ends_its_turn():
    def fail(when):
        raise KeyboardInterrupt

    before = settings()
    for precision in ("float32", "bf16"):
        with pytest.raises(KeyboardInterrupt):
            kronecker_factors(Watching(fail), batches(), "regression", backward_precision=precision)
        assert settings() == before
        in_threads(lambda: kronecker_factors(Watching(), batches(), "regression"))


def test_a_turn_within_a_turn_never_waits():
    model, other = Watching(), Watching()
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with turn_of(other):
            entered.set()
            leave.wait(timeout=30)

    with ThreadPoolExecutor(1) as pool:
        with turn_of(model), turn_of(model.first, alone=True):
            waits = pool.submit(kronecker_factors, other, batches(), "regression")
            time.sleep(0.05)
            assert not waits.done()
        waits.result(timeout=30)
    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert entered.wait(timeout=30)
        with turn_of(model), turn_of(model):
            for wanted in ((other, False), (model, True)):
                with pytest.raises(RuntimeError, match="Watching is run by another thread"):
                    turn_of(*wanted).__enter__()
    finally:
        leave.set()
        thread.join()
    with turn_of(other, alone=True):
        pass


def test_a_setting_is_put_back_though_an_interrupt_meets_it():
    value, interrupts = ["before"], ["one"]

    def write(new):
        if new == "before" and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt  # before anything is written
        value[0] = new

    setting = SharedSetting(lambda: value[0], write, "held")
    with pytest.raises(KeyboardInterrupt), setting.held():
        assert value == ["held"]
    assert value == ["before"] and not interrupts
    with setting.held():
        assert value == ["held"]
    assert value == ["before"]
