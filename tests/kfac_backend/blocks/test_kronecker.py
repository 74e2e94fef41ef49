"""Blocks and factors: algebra against dense matrices, eigenvalues, files."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.testing import assert_close

from kfac_backend import KroneckerBlock, KroneckerFactors, corrected_factors, kronecker_factors
from kfac_backend.atomic_files import write_tensors
from kfac_backend.blocks import block
from kfac_backend.blocks.block import CorrectedBlock
from kfac_backend.layers.gram import Factor
from tests.kfac_backend.networks import random_model
from tests.random_numbers import normal


def gram(*shape, seed=0):
    rows = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows.mT @ rows


BLOCKS = {
    "B and A": KroneckerBlock("w", gram(9, 3), gram(9, 4), 9),
    "groups": KroneckerBlock("w", gram(2, 9, 3), gram(2, 9, 4, seed=1), 9),
    "B alone": KroneckerBlock("b", gram(9, 3)),
    "diagonal": KroneckerBlock("d", gram(5, 1, 1)),
    "singular": KroneckerBlock("w", gram(2, 3), gram(1, 4), 9),
    "rows": KroneckerBlock("w", Factor(rows=normal(1, 4)), Factor(rows=normal(2, 5)), 2),
    "rows of B in groups": KroneckerBlock("w", Factor(rows=normal(2, 1, 3)), gram(2, 9, 4), 9),
    "no rows": KroneckerBlock("w", gram(9, 3), Factor(rows=normal(0, 6).double()), 0),
}


def corrected(block: KroneckerBlock) -> CorrectedBlock:
    """With eigenvalues that are no products."""
    eigen = block.decompose()
    values = normal(*eigen.spectrum_shape).square()
    eigen = replace(eigen, corrected=values)
    return CorrectedBlock(block.name, block.B, block.A, block.num_terms, eigen=eigen)


BLOCKS |= {f"corrected {name}": corrected(BLOCKS[name]) for name in ("B and A", "groups")}


@pytest.mark.parametrize("case", BLOCKS)
def test_block_is_its_dense_matrix(case):
    block = BLOCKS[case]
    dense = block.to_dense()
    P = block.numel
    assert dense.shape == (P, P)
    v = torch.randn(2, P, dtype=torch.float64)
    assert_close(block.matvec(v), v @ dense.T)
    assert_close(
        block.eigenvalues().sort().values,
        torch.linalg.eigvalsh(dense).clamp(min=0),
        atol=1e-10,
        rtol=1e-10,
    )
    eigen, delta = block.decompose(), torch.tensor(0.7, dtype=torch.float64)
    spectrum = eigen.spectrum(delta)
    regular = dense + 0.7 * torch.eye(P, dtype=torch.float64)
    assert_close(eigen.power_matvec(v, spectrum, 1.0), v @ regular)
    assert_close(eigen.power_matvec(v, spectrum, -1.0), torch.linalg.solve(regular, v.T).T)
    root = eigen.power_matvec(eigen.power_matvec(v, spectrum, -0.5), spectrum, -0.5)
    assert_close(root, torch.linalg.solve(regular, v.T).T)
    assert_close(eigen.diagonal(spectrum, -1.0), torch.linalg.inv(regular).diagonal())


@pytest.mark.parametrize(
    ("B", "A"),
    [((3, 4), None), ((3,), None), ((3, 3), (2, 4, 4)), ((2, 3, 3), (3, 4, 4)), ((3, 3), (4, 5))],
)
def test_factors_that_do_not_fit_are_named(B, A):
    with pytest.raises(ValueError, match="Factors of 'w' have shapes"):
        KroneckerBlock("w", torch.zeros(B), None if A is None else torch.zeros(A))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    ).double()


def batch(n=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 3, 3, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (n,), generator=generator)


def factors_of(model, n=5, seed=0, **options):
    return kronecker_factors(model, [batch(n, seed)], "classification", **options)


def dense(factors):
    return torch.block_diag(*(factors.to_dense(name) for name in factors.blocks))


def test_log_det_and_matvec(model):
    factors = factors_of(model)
    deltas = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
    sizes = [block.numel for block in factors.blocks.values()]
    H = dense(factors)
    expected = torch.linalg.slogdet(H + torch.diag(deltas.repeat_interleave(torch.tensor(sizes))))
    assert_close(factors.log_det(deltas), expected.logabsdet)
    assert gradcheck(factors.log_det, deltas.requires_grad_())
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    flat = torch.cat([t.flatten() for t in v.values()])
    assert_close(torch.cat([t.flatten() for t in factors.matvec(v).values()]), H @ flat)


@pytest.mark.parametrize("is_corrected", [False, True])
def test_operator_is_that_of_the_dense_matrix(model, is_corrected):
    factors = factors_of(model)
    if is_corrected:
        factors = corrected_factors(factors, model, [batch()])
    H = dense(factors)
    assert_close(factors.trace(), H.trace())
    assert_close(factors.frobenius_norm(), H.norm())
    few = replace(factors, blocks={"bias": factors.blocks["3.bias"]})
    assert_close(few.det(), torch.linalg.det(factors.to_dense("3.bias")), atol=1e-12, rtol=1e-6)
    v = {name: normal(*p.shape) for name, p in model.named_parameters()}
    flat = torch.cat([t.flatten() for t in v.values()])
    products = factors.damped_inverse(0.3)(v)
    assert {name: t.shape for name, t in products.items()} == {n: t.shape for n, t in v.items()}
    product = torch.cat([t.flatten() for t in products.values()])
    assert_close(product, torch.linalg.solve(H + 0.3 * torch.eye(len(H)).double(), flat))
    # Negative control: another damping.
    other = torch.linalg.solve(H + 0.4 * torch.eye(len(H)).double(), flat)
    assert (product - other).norm() > 1e-2 * product.norm()
    with pytest.raises(ValueError, match="damping"):
        factors.damped_inverse(0.0)


def test_products_and_what_cannot_be_added(model):
    first = factors_of(model, 5, 0)
    assert_close(dense(first * 2.5), 2.5 * dense(first))
    assert_close(dense(0 * first), 0 * dense(first))
    with pytest.raises(ValueError, match="by a finite number ≥ 0, not by -1"):
        first * -1.0
    with pytest.raises(ValueError, match="kfac_approx 'expand' and 'reduce'"):
        first + factors_of(model, kfac_approx="reduce")
    other = factors_of(nn.Sequential(*model[:1], *model[2:]))
    with pytest.raises(ValueError, match="different parameters"):
        first + other


WEIGHED = ("num_data", "num_loss_terms", "loss")


@pytest.fixture
def attention():
    """Cross-attention, whose packed weight has one number of terms for queries, one for keys."""

    def attends(m, x):
        keys = x.flatten(2).mT  # (N, 9, 2)
        return m.attention(keys[:, :4], keys, keys, need_weights=False)[0].mean(1)

    return random_model(attends, attention=nn.MultiheadAttention(2, 1, batch_first=True))


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["model", "attention"])
def test_weighted_sums_are_the_factors_of_repeated_data(name, kfac_approx, request):
    model = request.getfixturevalue(name)
    options = {"kfac_approx": kfac_approx}
    first, second = ((normal(n, 2, 3, 3, seed=n), torch.zeros(n).long()) for n in (5, 2))
    F, G = (kronecker_factors(model, [d], "classification", **options) for d in (first, second))
    repeated = kronecker_factors(model, [first, first, second], "classification", **options)
    assert name == "model" or F.blocks["attention.in_proj_weight"].num_terms[0] < 45

    def assert_same(found, expected):
        assert_close(dense(found), dense(expected))
        for name, of_all in expected.blocks.items():
            of_sum = found.blocks[name]
            assert_close(of_sum.B, of_all.B)
            assert_close(of_sum.A, of_all.A)
            if of_all.A is not None:
                assert of_sum.num_terms == pytest.approx(of_all.num_terms, rel=1e-9, abs=0)
        for field in WEIGHED:
            assert getattr(found, field) == pytest.approx(
                getattr(expected, field), rel=1e-9, abs=0
            ), field

    assert_same(2 * F + G, repeated)
    assert_same(F + 0.5 * G + F * 1.0 + G * 0.5, repeated)
    assert_same(1e-6 * (2e-3 * F + 1e-3 * G), repeated * 1e-9)
    assert_same(0 * F + G, G)
    assert isinstance((2 * F).num_data, int)
    mixed = 0.95 * F + 0.05 * G
    assert mixed.num_data == pytest.approx(0.95 * 5 + 0.05 * 2)
    plain = F + G  # the control: without weights the mean is another one
    weight = list(F.blocks)[0]
    assert (mixed.blocks[weight].A - plain.blocks[weight].A).norm() > 0.01 * plain.blocks[
        weight
    ].A.norm()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_means_without_a_count_cannot_be_added(device):
    """On no rank, with values or with shapes alone; a count of zero is one, on all ranks."""
    for factor in (torch.eye, torch.zeros):
        B, A = factor(2, 2, device=device), factor(3, 3, device=device)
        block = KroneckerBlock("w", B, A)
        with pytest.raises(ValueError, match="'w' needs num_terms"):
            block.add(block.replace(num_terms=5))
        assert block.replace(num_terms=0).add(block.replace(num_terms=5)).num_terms == 5


@pytest.mark.parametrize("is_corrected", [False, True])
def test_saved_factors_load_equal(model, tmp_path, is_corrected):
    factors = factors_of(model, kfac_approx="reduce", fisher="empirical")
    if is_corrected:
        factors = corrected_factors(factors, model, [batch()])
    factors = 0.3 * factors
    path = tmp_path / "factors.safetensors"
    factors.save(path)
    loaded = KroneckerFactors.load(path)
    assert_close(dense(loaded), dense(factors), rtol=0, atol=0)
    for field in (*WEIGHED, "num_outputs", "likelihood", "options"):
        assert getattr(loaded, field) == getattr(factors, field)
    for name, of_name in loaded.blocks.items():
        saved = factors.blocks[name]
        assert type(of_name) is type(saved) and of_name.num_terms == saved.num_terms
        assert torch.equal(of_name.eigenvalues(), saved.eigenvalues())
    if not is_corrected:
        assert_close(dense(loaded + loaded), dense(factors + factors))
        return
    state, name = factors.state_dict(), "0.weight/corrected.eigen"
    changed = state["tensors"] | {name: -state["tensors"][name]}
    with pytest.raises(ValueError, match="contains incomplete.*negative"):
        KroneckerFactors.from_state_dict(state | {"tensors": changed})


def test_a_file_has_half_of_each_factor_and_equal_ones_once(model, tmp_path):
    """B of a weight and of its bias, in groups; A of two; one that is not symmetric is whole."""
    B, A, other = gram(2, 9, 30), gram(20, 40), gram(20, 40, seed=1)
    B, A = B + B.mT, A + A.mT  # which makes them symmetric to the bit, as the engine's are
    blocks = [
        KroneckerBlock("w", B, A, 9),
        KroneckerBlock("b", B),
        KroneckerBlock("v", other.triu(), A.clone(), 9),
    ]
    factors = replace(factors_of(model), blocks={b.name: b for b in blocks})
    factors.save(path := tmp_path / "factors.safetensors")
    entries = 2 * 30 * 31 // 2 + 40 * 41 // 2 + 40 * 40
    assert 0 < path.stat().st_size - 8 * entries < 4096  # the header
    loaded = KroneckerFactors.load(path)
    for saved in blocks:
        again = loaded.blocks[saved.name].factors
        assert again.keys() == saved.factors.keys()
        assert all(torch.equal(again[k].matrix, F.matrix) for k, F in saved.factors.items())
    assert loaded.blocks["b"].B is loaded.blocks["w"].B  # solved once
    for forged in ({"w/B.triangle": B[..., 0, :17]}, {"w/A.triangle": A[0, 0]}, {}):
        state = factors.state_dict()
        state["tensors"] = (state["tensors"] | forged) if forged else {}
        with pytest.raises(ValueError, match="contains incomplete Kronecker factors"):
            KroneckerFactors.from_state_dict(state)
    # The negative control is the state above, and rounding errors of a tenth of the tolerance.
    state, name = factors.state_dict(), "w/A.triangle"
    values = state["tensors"][name]
    for number, words in ((float("nan"), "NaN"), (-1.0, "not positive")):
        changed = state["tensors"] | {name: number * values}
        with pytest.raises(ValueError, match=f"contains incomplete.*{words}"):
            KroneckerFactors.from_state_dict(state | {"tensors": changed})
    rounded = state["tensors"] | {name: values + 1e-4 * values.amax()}
    KroneckerFactors.from_state_dict(state | {"tensors": rounded})


def test_corrected_factors_have_weights_but_no_sums(model):
    factors = factors_of(model)
    corrected = corrected_factors(factors, model, [batch()])
    scaled = 0.3 * corrected
    assert scaled.is_corrected
    assert_close(dense(scaled), 0.3 * dense(corrected))
    for name, values in corrected.eigenvalues().items():
        assert_close(scaled.blocks[name].eigenvalues(), 0.3 * values)
    for first, second in ((factors, corrected), (corrected, factors), (corrected, corrected)):
        with pytest.raises(ValueError, match="corrected eigenvalues.*correct the sum with all"):
            first + second
    with pytest.raises(ValueError, match="damping=False"):
        corrected.blocks["0.weight"].decompose().spectrum(0.1, damping=True)


def test_files_of_others_are_one_clear_error(model, tmp_path):
    """That every damaged byte is noticed is a property of all files, see `test_atomic_files`."""
    path = tmp_path / "factors.safetensors"
    write_tensors(path, {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="contains no Kronecker factors.*format is None"):
        KroneckerFactors.load(path)
    state = factors_of(model).state_dict()
    state["header"]["version"] += 1
    with pytest.raises(ValueError, match="factors of version 10, .* version 11"):
        KroneckerFactors.from_state_dict(state)


def test_blocks_of_another_shape_do_not_fit_a_model(model):
    """A product of the right size, of factors that are not those of the weight."""
    factors = factors_of(model)
    factors.check_alignment(model)
    for shapes in ((16, 3), (6, 8), (24, 2)):
        forged = KroneckerBlock("3.weight", *(torch.eye(n) for n in shapes))
        assert forged.numel == factors.blocks["3.weight"].numel
        with pytest.raises(ValueError, match="these have none: 3.weight"):
            replace(factors, blocks=factors.blocks | {"3.weight": forged}).check_alignment(model)


@pytest.fixture
def sizes(monkeypatch):
    """The sizes of matrices that are solved for their eigenvalues."""
    sizes, solver = [], torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda M: sizes.append(M.shape[-1]) or solver(M))
    return sizes


def wide(which):
    """A layer with 18 inputs or outputs; its B under "empirical" has a row for each example."""
    torch.manual_seed(0)
    return nn.Linear(*((18, 2) if which == "A" else (2, 18))).double()


def factors_of_rows(layer, n, kfac_approx="expand", seed=0):
    """In two batches; and B = Σ g gᵀ of each example's gradient in the bias, A, by loops."""
    x, y = normal(n, 3, layer.in_features, seed=seed), normal(n, layer.out_features, seed=seed + 1)
    x = x if kfac_approx == "reduce" else x[:, 0]
    data = [(x[:3], y[:3]), (x[3:], y[3:])]
    model = nn.Sequential(layer, MeanOverPositions())
    options = {"kfac_approx": kfac_approx, "fisher": "empirical"}
    B, A = 0, 0
    for x_n, y_n in zip(x, y, strict=True):
        loss = 0.5 * (model(x_n[None])[0] - y_n).square().sum()
        (g,) = torch.autograd.grad(loss, layer.bias)
        a = x_n.reshape(-1, layer.in_features).mean(0)
        B, A = B + torch.outer(g, g), A + torch.outer(a, a) / n
    return kronecker_factors(model, data, "regression", **options), {"B": B, "A": A}


class MeanOverPositions(nn.Module):
    def forward(self, x):
        return x.mean(1) if x.dim() > 2 else x


def assert_eigenvalues(block, which, matrix, digits=1e-12):
    values = block.factor_eigenvalues()[which == "A"]
    expected = torch.linalg.eigvalsh(matrix).clamp(min=0)
    assert_close(values, expected, rtol=0, atol=digits * float(matrix.trace()))


@pytest.mark.parametrize("num_data", [13, 14])
@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("which", ["B", "A"])
def test_few_rows_are_solved_by_their_inner_products(which, kfac_approx, num_data, sizes):
    """M×M instead of d×d, with the eigenvalues of the factor; a bias has those of its weight's."""
    factors, dense = factors_of_rows(wide(which), num_data, kfac_approx)
    weight, bias = factors.blocks.values()
    few = 13 if num_data == 13 else 18  # at most 3d / 4 rows are few
    factors.eigenvalues()
    assert sorted(sizes) == [2, few]  # a B that two blocks have is solved once
    assert weight.factors["B"] is bias.factors["B"]
    assert_eigenvalues(weight, which, dense[which])
    assert_close(bias.eigenvalues(), weight.factor_eigenvalues()[0], rtol=0, atol=0)
    assert (bias.eigenvalues()[-1] - torch.linalg.eigvalsh(dense["A"])[-1]).abs() > 1e-3
    for name in ("B", "A"):
        assert_close(getattr(weight, name), dense[name])
    H = torch.block_diag(torch.kron(dense["B"], dense["A"]), dense["B"])
    regular = H + 0.3 * torch.eye(len(H)).double()
    assert_close(factors.log_det(0.3), torch.linalg.slogdet(regular).logabsdet)
    # With a weight, a B is solved by its rows, and the mean A is the same: it is not solved again.
    sizes.clear()
    scaled = factors * 3
    scaled.eigenvalues()
    assert sizes == [few if which == "B" else 2]
    factor = 3.0 if which == "B" else 1.0
    assert_eigenvalues(scaled.blocks["0.weight"], which, factor * dense[which])


@pytest.mark.parametrize("which", ["B", "A"])
def test_rows_are_kept_by_sums_and_files(which, tmp_path, sizes):
    """A weighted sum has both blocks' rows; a file has them for the matrix, and gives its bits."""
    layer = wide(which)
    (first, of_first), (second, of_second) = (factors_of_rows(layer, n, seed=n) for n in (4, 5))
    both = 0.3 * first + 0.7 * second
    if which == "B":
        by_hand = 0.3 * of_first["B"] + 0.7 * of_second["B"]
    else:
        by_hand = (0.3 * 4 * of_first["A"] + 0.7 * 5 * of_second["A"]) / (0.3 * 4 + 0.7 * 5)
    matrix = getattr(both.blocks["0.weight"], which)
    assert_close(matrix, by_hand)
    path = tmp_path / "factors.safetensors"
    both.save(path)
    loaded = KroneckerFactors.load(path)
    assert loaded.blocks["0.weight"].factors["B"] is loaded.blocks["0.bias"].factors["B"]
    assert loaded.blocks["0.weight"].factors[which].rows.shape == (9, 18)
    assert torch.equal(getattr(loaded.blocks["0.weight"], which), matrix)
    single, half = both.to(dtype=torch.float32), both.to(dtype=torch.bfloat16)
    for factors, digits in ((both, 1e-12), (loaded, 1e-12), (single, 1e-6), (half, 1e-2)):
        sizes.clear()
        factors.blocks["0.weight"].eigenvalues()
        assert max(sizes) == 9
        assert_eigenvalues(factors.blocks["0.weight"], which, by_hand, digits)
        in_dtype = getattr(factors.blocks["0.weight"], which)
        assert_close(in_dtype.double(), by_hand, rtol=0, atol=digits * float(by_hand.trace()))
    assert in_dtype.dtype == torch.bfloat16
    for saved, again in zip(both.blocks.values(), loaded.blocks.values(), strict=True):
        assert torch.equal(saved.eigenvalues(), again.eigenvalues())


def test_a_matrix_of_finite_rows_that_overflows_is_named():
    of_rows = KroneckerBlock("weight", Factor(rows=1e25 * torch.ones(2, 10)))
    with pytest.raises(ValueError, match="'weight, B' is not finite"):
        of_rows.decompose()


def test_factors_of_equal_sizes_go_to_the_solver_together(monkeypatch):
    """One call for each size; one that it fails for does not spoil the others."""
    shapes, solver = [], torch.linalg.eigvalsh

    def fails_for_several(M):
        shapes.append(tuple(M.shape))
        if M.dim() == 3 and M.shape[-1] == 3:
            raise torch.linalg.LinAlgError
        return solver(M)

    monkeypatch.setattr(torch.linalg, "eigvalsh", fails_for_several)
    grams = [normal(9, d, seed=d + i) for i in range(2) for d in (5, 3)]
    blocks = [KroneckerBlock(f"{i}", a.mT @ a) for i, a in enumerate(grams)]
    block.compute_eigenvalues(blocks)
    assert sorted(shapes) == [(2, 3, 3), (2, 5, 5), (3, 3), (3, 3)]
    for of_one in blocks:
        assert_close(of_one.eigenvalues(), solver(of_one.B))


@pytest.mark.parametrize("which", ["B", "A"])
@pytest.mark.parametrize("reads_first", [True, False])
def test_eigenvalues_follow_changes_in_place(which, reads_first):
    """Those of a factor that is changed after they were read, and of one whose rows are few."""
    block = KroneckerBlock("w", Factor(rows=normal(2, 6)), Factor(rows=normal(1, 3)), 2)
    before = block.eigenvalues() if reads_first else torch.zeros(18).double()
    for _ in range(2):
        getattr(block, which).add_(torch.ones_like(getattr(block, which)))
        dense = torch.linalg.eigvalsh(block.to_dense()).clamp(min=0)
        assert_close(block.eigenvalues().sort().values, dense, rtol=1e-9, atol=1e-9)
    assert (block.eigenvalues() - before).norm() > 0.1 * before.norm()
    assert block.factors[which].rows is None and block.scale(2.0).factors[which].rows is None


def test_a_line_of_the_representation_stands_for_ten_blocks():
    """A factor that blocks share counts once: 36 parameters of two factors of 6×6 in float64."""
    x = normal(9, 6).double()
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(11)]).double()
    factors = kronecker_factors(model, [(x, x)], "regression", kfac_approx="expand")
    head, *lines = repr(factors).splitlines()
    assert head == "KroneckerFactors(22 blocks, 'regression', 9 examples, 6 outputs)"
    number, memory = 5 * (36 + 6), 5 * 2 * 36 * 8 / 2**20
    assert lines[0] == f"  0.weight to 4.bias: {number} parameters, {memory:.1f} MiB"
    assert [line.split(":")[0] for line in lines[1:]] == [
        "  5.weight to 9.bias",
        "  10.weight to 10.bias",
    ]
