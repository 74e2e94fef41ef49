"""Updates on a random sample: which examples, that they stand for all, and what stays as it was."""

import math
from itertools import islice

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from kfac_backend.engine import driver
from kfac_backend.ranks import Ranks
from marglik import OnlineTraining, Posterior, PriorLearner
from marglik.data.batches import Batches
from marglik.loaders import EpochBatches, count_examples, own_iteration
from marglik.posterior.prior import Hyperparameters, PriorGroups, update_prior
from marglik.training.algorithm import end_of_epoch, finish
from marglik.training.decay_policy import skips_update
from marglik.training.samples import curvature_plan, examples_for_gamma, sample_size, sampled

ALONE = Ranks(None)
N = 1000
X, Y = torch.arange(N, dtype=torch.float32)[:, None], torch.arange(N) % 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(zip(X, Y, strict=True)))


def loaders():
    """Name -> a loader of N examples, or of 600 of them; and those that it may give."""
    some = torch.arange(0, N, 2)[:480]
    return {
        "batches": (Batches(X, Y, 16, shuffle=True), set(range(N))),
        "shuffled": (DataLoader(TensorDataset(X, Y), 16, shuffle=True), set(range(N))),
        "subset": (DataLoader(Subset(TensorDataset(X, Y), some.tolist()), 16), set(some.tolist())),
        "list": ([(X[i : i + 16], Y[i : i + 16]) for i in range(0, N, 16)], set(range(N))),
    }


def examples_of(batches):
    return [int(number) for x, _ in batches for number in x[:, 0]]


@pytest.mark.parametrize("name", loaders())
def test_a_sample_has_other_examples_each_time_and_none_twice(name):
    loader, allowed = loaders()[name]
    batches = sampled(loader, 300, len(allowed), ALONE, 1)
    first = examples_of(batches)
    assert len(set(first)) == len(first) and allowed.issuperset(first)
    assert 300 <= len(first) < (316 if name == "list" else 301)
    assert examples_of(batches) == first  # a second pass over the same sample
    assert examples_of(sampled(loader, 300, len(allowed), ALONE, 1)) == first
    assert set(examples_of(sampled(loader, 300, len(allowed), ALONE, 2))) != set(first)
    if name != "list":
        assert max(len(x) for x, _ in batches) == 256  # not nineteen batches of 16


@pytest.mark.parametrize("name", ["list", "subset", "in order"])
def test_a_sample_of_limited_epochs_is_of_their_batches(name):
    loader = Batches(X, Y, 16) if name == "in order" else loaders()[name][0]
    read = examples_of([*loader][:20])
    some = examples_of(sampled(loader, 100, len(read), ALONE, 1, limit=20))
    assert 100 <= len(some) < 116 and set(read).issuperset(some)


def test_a_limit_of_all_batches_draws_examples_and_not_batches():
    loader = Batches(X, Y, 16)
    limited = sampled(loader, 100, N, ALONE, 1, limit=len(loader))
    assert examples_of(limited) == examples_of(sampled(loader, 100, N, ALONE, 1))


@pytest.mark.parametrize("name", ["batches", "shuffled"])
def test_the_loaders_own_random_numbers_stay(name):
    def order(uses_sample):
        torch.manual_seed(0)
        loader, _ = loaders()[name]
        if uses_sample:
            examples_of(sampled(loader, 100, N, ALONE, 1))
        return examples_of(loader)

    assert order(True) == order(False)


def test_a_trainers_epochs_have_one_order_and_leave_the_loaders_own():
    """In passes, because BatchNorm's statistics depend on the order."""

    def orders(passes):
        own = torch.Generator().manual_seed(5)
        loader = DataLoader(TensorDataset(X, Y), 16, shuffle=True, generator=own)
        epoch = EpochBatches(lambda: loader, lambda batch, number: batch)
        return [examples_of(batches) for batches in (loader, *[epoch] * passes, loader)]

    first, *of_passes, last = orders(2)
    assert of_passes[0] == of_passes[1] not in (first, last)
    assert [first, last] == orders(0)


class Scaled(DataLoader):
    def __iter__(self):
        return ((x / 255, y) for x, y in super().__iter__())


@pytest.mark.parametrize("kind", ["batches changed by the loader", "batches of the user's sampler"])
def test_batches_that_others_cannot_replace_stay_as_they_are(kind):
    data, groups = TensorDataset(X, Y), [[i, (i + 7) % N, i // 2] for i in range(0, N, 2)]
    loader = DataLoader(data, batch_sampler=groups) if "user" in kind else Scaled(data, 3)
    whole = [tuple(x[:, 0].tolist()) for x, _ in loader]
    some = [tuple(x[:, 0].tolist()) for x, _ in sampled(loader, 300, N, ALONE, 1)]
    assert len(some) < len(whole) and set(whole).issuperset(some)
    assert sampled(loader, N, N, ALONE, 1) is loader


def test_data_without_a_length_is_read_whole():
    loader = DataLoader(Stream(), 16)
    assert examples_of(sampled(loader, 100, N, ALONE, 1)) == list(range(N))


class Slow(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return X[i], Y[i]


def test_an_iterator_of_persistent_workers_that_is_in_use_goes_on():
    loader = DataLoader(Slow(), 2, num_workers=1, persistent_workers=True)
    seen = []
    for x, _ in loader:
        seen += x[:, 0].tolist()
        if len(seen) == 4:
            assert len(examples_of(own_iteration(loader))) == 8
            assert len(examples_of(sampled(loader, 4, 8, ALONE, 0))) == 4
    assert seen == list(range(8))


def test_the_size_is_a_tenth_of_the_steps():
    assert sample_size(200, 1e6, 1) == 200  # all
    assert sample_size(50_000, 50_000, 1) == 5_000
    assert sample_size(50_000, 150_000, 1) == 15_000
    assert sample_size(50_000, 50_000, 9) == 789  # nine backward passes each
    assert sample_size(1_600, 1_600, 1) == 256  # the floor


def drawn():
    """Name -> a sampler that repeats examples or leaves some out, and an example's mean draws."""
    weights = torch.ones(40).double()
    weights[:4] = 9
    data = range(40)
    return {
        "more than there are": (WeightedRandomSampler(weights.tolist(), 80), weights / 72 * 80),
        "a part of each epoch": (RandomSampler(data, num_samples=20), torch.full((40,), 0.5)),
        "with replacement": (RandomSampler(data, True, 100), torch.full((40,), 2.5)),
    }


@pytest.mark.parametrize("name", drawn())
def test_samples_of_drawn_examples_are_unbiased(name):
    """N/M times its draws in a sample is, on average, how often an epoch draws an example."""
    sampler, times = drawn()[name]
    loader = DataLoader(
        TensorDataset(torch.arange(40)[:, None], torch.zeros(40)), 16, sampler=sampler
    )
    draws, M, counts = count_examples(loader), 10, torch.zeros(40)
    assert draws == round(times.sum().item())
    for seed in range(500):
        torch.manual_seed(seed)  # the sampler's numbers, which go on in a training
        own = examples_of(sampled(loader, M, draws, ALONE, seed))
        assert len(own) == M
        counts += torch.tensor(own).bincount(minlength=40) / 500
    # The variance of a count is at most its mean.
    z = (draws / M * counts - times) / (draws / M * (M / draws * times / 500).sqrt())
    assert z.square().mean() < 2 and z.abs().max() < 4
    # Negative control: if the draws of one epoch stood for all, without reseeding.
    once = torch.tensor(examples_of(loader)).bincount(minlength=40)
    assert (once - times).square().mean() > 0.1


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(N, 4).double()
    return model, x, model(x).detach().argmax(1)


def test_a_sample_stands_for_all_data():
    model, x, y = problem()
    whole, part = (Posterior(model, "classification") for _ in range(2))
    whole.fit([(x, y)])
    halves = torch.arange(N).view(2, -1)
    evidences = []
    for half in halves:
        part.fit([(x[half], y[half])], stands_for=N)
        assert part.n_data == N
        evidences.append(part.log_marginal_likelihood())
        # By definition: B of the half counts twice, A is its mean.
        for name, block in part.fitted_factors().blocks.items():
            alone = Posterior(model, "classification")
            alone.fit([(x[half], y[half])])
            of_half = alone.fitted_factors().blocks[name]
            assert_close(block.to_dense(), 2 * of_half.to_dense())
    mean, exact = sum(evidences) / 2, whole.log_marginal_likelihood()
    assert abs(mean / exact - 1) < 0.02
    # Negative control: without the factor N/M.
    part.fit([(x[halves[0]], y[halves[0]])])
    assert abs(part.log_marginal_likelihood() / exact - 1) > 0.2


class EveryThird(BatchSampler):
    """With its own length; the sampler has three times as many examples."""

    def __iter__(self):
        return islice(super().__iter__(), 0, None, 3)

    def __len__(self):
        return -(-super().__len__() // 3)


def test_batches_of_some_of_a_samplers_examples_are_counted():
    loader = DataLoader(TensorDataset(X, Y), batch_sampler=EveryThird(range(N), 16, False))
    assert count_examples(loader) == sum(len(y) for _, y in loader) == 21 * 16
    whole = DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(range(N), 16, True))
    assert count_examples(whole) == N // 16 * 16


def without_odd(examples):
    return default_collate([example for example in examples if example[0] % 2 == 0])


class EverySecond(BatchSampler):
    def __iter__(self):
        return islice(super().__iter__(), 0, None, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 16, "collate_fn": without_odd}, r"read \d+ examples of a sample of 256"),
        ({"batch_sampler": EverySecond(range(N), 16, False)}, r"32 batches, but .* at least 5\d"),
    ],
)
def test_a_sample_of_fewer_examples_than_the_sampler_promises_is_an_error(options, words):
    """N would be wrong; the update is not made."""
    model, loader = nn.Linear(1, 3), DataLoader(TensorDataset(X, Y), **options)
    prior = PriorLearner("classification", every=1)
    prior.start(model, torch.optim.SGD(model.parameters()), loader, 5)
    prior.state.steps = [9]
    before = prior.weight_decays()
    with pytest.raises(ValueError, match=words):
        end_of_epoch(prior.problem, prior.state, 1)
    assert torch.equal(prior.weight_decays(), before) and prior.state.epoch == 0


@pytest.mark.parametrize("curvature_from", ["auto", "pass"])
def test_updates_see_a_sample_and_the_last_one_all(curvature_from, monkeypatch):
    model, x, y = problem()
    seen, sizes = [], []
    fit = Posterior.fit

    def counted(self, data, *args, **keywords):
        batches = list(data)
        sizes.append(len(batches[0][1]))
        seen.append(sum(len(y) for _, y in batches))
        fit(self, batches, *args, **keywords)

    monkeypatch.setattr(Posterior, "fit", counted)
    loader = DataLoader(TensorDataset(x, y), 50, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prior = PriorLearner("classification", every=1, curvature_from=curvature_from)
    prior.start(model, optimizer, loader, 4)
    for _ in range(4):
        for xs, ys in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(xs), ys).backward()
            optimizer.step()
    prior.finish()
    assert seen[-1] == prior.posterior.n_data == N
    assert set(seen[:-1]) == ({256} if curvature_from == "auto" else {N})
    assert set(sizes) == ({256} if curvature_from == "auto" else {50})
    # Of all data the factors are the same in batches of any size.
    whole = Posterior(model, "classification")
    fit(whole, loader)
    for name, block in whole.fitted_factors().blocks.items():
        assert_close(prior.posterior.fitted_factors().blocks[name].to_dense(), block.to_dense())


def test_more_draws_of_each_example_leave_time_for_fewer_examples():
    network = nn.Linear(4, 3)
    x, y = torch.randn(4_000, 4), torch.arange(4_000) % 3
    numbers = []
    for draws in (1, 4):
        options = {"fisher": "mc", "mc_samples": draws, "epochs": 10, "every": 5}
        prior = PriorLearner("classification", **options)
        loader = DataLoader(TensorDataset(x, y), 100)
        prior.start(network, torch.optim.SGD(network.parameters(), 0.1), loader)
        prior.state.steps, prior.state.epoch = [200], 5
        for prior.state.steps_at_update in (None, 150):
            numbers.append(curvature_plan(prior.problem, prior.state, is_last=False).num_examples)
        prior.detach()
    # Passes 1 + 2 · 1 and 1 + 2 · 4, a tenth of 3 · 20,000, or of a quarter since an update.
    assert numbers == [2_000, 500, 667, 256]


def test_samples_grow_where_gamma_comes_near_what_their_rows_can_show():
    """256 rows show 768 of the weight's 1,200 directions, nearly all of which the data determines.

    They underrate γ; a sample of the size that this γ asks for does not, if the update corrects it.
    All data is the oracle. Negative control: without the correction, γ lacks a tenth.
    """
    torch.manual_seed(0)
    d, M = 400, 256
    x = torch.randn(4_000, d) * 10 ** -torch.linspace(0, 1, d)
    y = torch.arange(4_000) % 3
    model = nn.Linear(d, 3)
    prior = PriorLearner("classification", epochs=20, every=1, weight_decay=1e-3)
    loader = DataLoader(TensorDataset(x, y), 100)
    prior.start(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    prior.state.steps, prior.state.epoch = [1], 0

    def update(number, vectors=None):
        posterior = Posterior(model, "classification")
        hyper = Hyperparameters(PriorGroups.from_model(model), 5.0)
        _, record = update_prior(
            hyper, posterior, [(x[:number], y[:number])], len(x), 0,
            is_sample=number < len(x), num_vectors=vectors,
        )  # fmt: skip
        return posterior, record["effective_parameters"]["weight"]

    plan = curvature_plan(prior.problem, prior.state, is_last=False)
    assert (plan.num_examples, plan.corrects_gamma) == (M, False)
    posterior, gamma = update(M)
    needed = examples_for_gamma(posterior, {"weight": gamma, "bias": 3.0})
    assert needed == math.ceil(gamma / (0.3 * 3)) > 1.5 * M
    prior.state.measures.examples_for_gamma = needed
    plan = curvature_plan(prior.problem, prior.state, is_last=False)
    assert (plan.num_examples, plan.corrects_gamma) == (needed, True)
    of_all, plain = update(len(x))[1], update(needed)[1]
    corrected = update(needed, prior.problem.vectors)[1]
    assert gamma < 0.8 * of_all and plain < 0.92 * of_all
    assert abs(corrected - of_all) < 0.4 * abs(plain - of_all)
    # Up to 1.5 times the usual sample, samples are large enough without a correction.
    for needed, plan in {85: (M, False), 128: (384, False), 129: (384, True)}.items():
        prior.state.measures.examples_for_gamma = needed
        found = curvature_plan(prior.problem, prior.state, is_last=False)
        assert (found.num_examples, found.corrects_gamma) == plan
    assert not curvature_plan(prior.problem, prior.state, is_last=True).corrects_gamma
    # There are no more than N examples.
    prior.state.measures.examples_for_gamma = 10**6
    plan = curvature_plan(prior.problem, prior.state, is_last=False)
    assert (plan.num_examples, plan.corrects_gamma) == (len(x), False)
    prior.detach()


@pytest.mark.parametrize("rule", [{}, {"rest": None}, {"every": 1}, {"curvature_from": "pass"}])
def test_an_update_that_needs_a_large_sample_waits_for_more_steps(rule):
    """400 examples take a tenth of an epoch's time. 601 wait for two epochs, 600 for one."""
    model, x, y = nn.Linear(4, 3), torch.randn(4_000, 4), torch.arange(4_000) % 3
    prior = PriorLearner("classification", **rule)
    loader = DataLoader(TensorDataset(x, y), 100)
    prior.start(model, torch.optim.SGD(model.parameters(), 0.1), loader, 20)
    problem, state = prior.problem, prior.state
    state.steps_at_update, found = 400, []
    state.measures.last_changes = [0.4, -0.4]
    for needed in (0, 600, 601, 1_201, 5_000):
        state.measures.examples_for_gamma = needed
        for epoch in (11, 12):  # one epoch after the last update, and two
            state.epoch, state.steps = epoch, [40 * epoch]
            found.append(skips_update(problem, state))
    waits = [False, False, False, False, True, False, True, True, True, True]
    assert found == (waits if not rule else [False] * 10)
    # As many steps must follow.
    state.measures.examples_for_gamma, state.epoch, state.steps = 601, 19, [760]
    assert skips_update(problem, state) == (not rule)
    # No update waits while the weight decays still change, or before the first update.
    for changes in ([1.0, -0.2], []):
        state.measures.last_changes = changes
        assert not skips_update(problem, state)
    # Skipped updates do not make the next sample larger.
    state.measures.examples_for_gamma = 0
    size = curvature_plan(problem, state, is_last=False).num_examples
    assert size == (4_000 if "curvature_from" in rule else 400)
    prior.detach()


def test_rounds_of_a_stream_are_shorter_than_its_data():
    """Between two updates are two rounds of 1,000 examples, less than an exact pass takes."""
    model, x, y = nn.Linear(4, 3), torch.randn(4_000, 4), torch.arange(4_000) % 3
    prior = PriorLearner("classification", updates=10)
    loader = DataLoader(TensorDataset(x, y), 100)
    prior.start(model, torch.optim.SGD(model.parameters(), 0.1), loader, 20)
    problem, state = prior.problem, prior.state
    state.epoch, state.steps = 10, [100]
    whole = curvature_plan(problem, state, is_last=False)
    problem.examples_per_epoch = 1_000
    assert (whole.fisher, curvature_plan(problem, state, is_last=False).fisher) == (
        "exact", "random_signs",
    )  # fmt: skip
    prior.detach()


@pytest.mark.parametrize(("updates", "size"), [(4, 1_200), (40, 400)])
def test_samples_of_the_usual_size_never_wait(updates, size):
    """Of five epochs exact passes (two vectors) take a tenth, of one epoch estimates do."""
    model, x, y = nn.Linear(4, 3), torch.randn(4_000, 4), torch.arange(4_000) % 3
    prior = PriorLearner("classification", updates=updates)
    loader = DataLoader(TensorDataset(x, y), 100)
    prior.start(model, torch.optim.SGD(model.parameters(), 0.1), loader, 20)
    problem, state = prior.problem, prior.state
    state.steps_at_update, state.epoch, state.steps = 400, 19, [760]
    assert curvature_plan(problem, state, is_last=False).num_examples == size
    assert not skips_update(problem, state)
    prior.detach()


@pytest.mark.parametrize(
    ("layer", "shape", "directions", "groups"),
    [
        (nn.Linear(7, 3, bias=False), (7,), 3, 1),
        (nn.Linear(3, 7, bias=False), (3,), 3, 1),
        (nn.Conv2d(8, 12, 3, groups=4, bias=False), (8, 4, 4), 3, 4),
        (nn.ConvTranspose2d(2, 5, 3, bias=False), (2, 4, 4), 2, 1),  # stored inputs first
        (nn.Embedding(50, 6), None, 6, 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_an_example_shows_a_direction_for_each_row_of_the_smaller_factor(
    layer, shape, directions, groups
):
    """The oracle is the rank of the block, dense, of as many examples as that factor has rows."""
    torch.manual_seed(0)
    M = directions
    x = torch.arange(M)[:, None] if shape is None else torch.randn(M, *shape).double()
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(20)).double()
    model(x)
    posterior = Posterior(model, "classification", fisher="random_signs", kfac_approx="reduce")
    posterior.fit([(x, torch.arange(M))])
    gamma = {name: 0.0 for name, _ in model.named_parameters()} | {"0.weight": 1_000.0}
    expected = 1_000 / (0.3 * directions * groups)
    assert examples_for_gamma(posterior, gamma) == math.ceil(expected)
    block = posterior.factors.blocks["0.weight"].to_dense()
    assert torch.linalg.matrix_rank(block) == M * directions * groups


def test_each_loss_term_shows_directions_of_its_own():
    """Of 20 tokens an example, whatever the loss divides by: a twentieth of the examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 8)).double()
    x = torch.randint(50, (40, 20))
    posterior = Posterior(model, "classification", fisher="random_signs", kfac_approx="expand")
    posterior.fit([(x, x % 8)])
    gamma = {name: 0.0 for name, _ in model.named_parameters()} | {"1.weight": 100.0}
    assert examples_for_gamma(posterior, gamma) == math.ceil(100 / (0.3 * 6 * 20))


def test_a_last_update_that_is_an_estimate_says_so():
    _, x, y = problem()
    records = {}
    for epochs in (2, 6):
        torch.manual_seed(0)
        model = nn.Linear(4, 30).double()
        loader = Batches(x.repeat(5, 1), y.repeat(5), 100)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        prior = PriorLearner("classification", epochs=epochs, every=1)
        result = OnlineTraining(model, optimizer, loader, prior).run()
        records[epochs] = [r for r in result.records if r["kind"] == "update"][-1]
        assert result.laplace.options.fisher == "random_signs"
        assert result.laplace.n_data == records[epochs]["num_data"] == 5 * N
        of = f"fitted to {records[epochs]['num_examples']} of {5 * N} examples"
        assert of in repr(result.laplace)
    assert {record["fisher"] for record in records.values()} == {"random_signs"}
    assert records[2]["num_examples"] < records[6]["num_examples"] < 5 * N


class Gated(nn.Module):
    """Examples mix behind a gate that is shut at first."""

    def __init__(self):
        super().__init__()
        self.fc, self.gate = nn.Linear(4, 3), nn.Buffer(torch.zeros(()))

    def forward(self, x):
        f = self.fc(x)
        return f + self.gate * f.mean(0)


def test_the_first_update_and_the_last_prove_the_model():
    """Also if the last sees a sample, and the model is in train mode."""
    _, x, y = problem()
    for opens_at in (2, 4):
        torch.manual_seed(0)
        model = Gated().double()
        loader = Batches(x.repeat(5, 1), y.repeat(5), 100)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        prior = PriorLearner("classification", epochs=4, every=1, rest=None)
        training = OnlineTraining(model, optimizer, loader, prior)
        with pytest.raises(NotImplementedError, match="rows of different examples mix"):  # noqa: PT012
            for epoch in range(1, 5):
                if epoch == opens_at:
                    model.gate.fill_(1)
                training.train_epoch()
                end_of_epoch(prior.problem, prior.state, epoch)
            assert prior.state.record["num_examples"] < 5 * N
            finish(prior.problem, prior.state)
        assert prior.state.epoch == 4  # later than the updates that did not see it
    # Another structure is proved at once.
    model.fc.bias.requires_grad_(False)
    with pytest.raises(NotImplementedError, match="rows of different examples mix"):
        prior.state.posterior.fit([(x, y)], repeat_proof=False)


def test_samples_take_the_modes_of_the_first_update_also_after_a_resume(monkeypatch):
    decisions, decide = [], driver.mode_and_traces

    def counted(*args, **keywords):
        decisions.append(1)
        return decide(*args, **keywords)

    monkeypatch.setattr(driver, "mode_and_traces", counted)

    def run(saved=None, epochs=3):
        decisions.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
        x = torch.randn(N, 1, 4, 4)
        loader = Batches(x, x.mean((1, 2, 3)).sign().long() + 1, 64)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        prior = PriorLearner("classification", epochs=3, average=None, rest=None)
        training = OnlineTraining(model, optimizer, loader, prior)
        if saved is not None:
            training.load_state_dict(saved)
        for epoch in range(training._epoch, epochs):
            training.train_epoch()
            end_of_epoch(prior.problem, prior.state, epoch + 1)
        if epochs == 3:
            finish(prior.problem, prior.state)
        return training

    whole = run()
    assert len(decisions) == 2  # by the first update, and by the last, which sees all data
    assert whole.learner.state.kfac_approx != "auto"
    resumed = run(run(epochs=1).state_dict())
    assert len(decisions) == 1
    assert torch.equal(resumed.learner.weight_decays(), whole.learner.weight_decays())


@pytest.mark.parametrize("scaling", ["positions", "examples"])
def test_samples_of_tensors_without_a_correction_are_larger(scaling):
    """Embeddings as a head have no number of rows, and expand_scaling="examples" has another."""
    x = y = torch.arange(300) % 6
    needed = []
    for is_tied in (False, True):
        model = nn.Sequential(nn.Embedding(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False))
        if is_tied:
            model[2].weight = model[0].weight
        options = {"kfac_approx": "expand", "expand_scaling": scaling}
        posterior = Posterior(model, "classification", **options)
        posterior.fit([(x, y)])
        assert (posterior.fitted_factors().blocks["0.weight"].num_terms is None) == is_tied
        needed.append(examples_for_gamma(posterior, {"0.weight": 30, "2.weight": 3}))
    largest = 0.1 if scaling == "examples" else 0.3
    assert needed == [math.ceil(30 / 6 / largest), 50]
