"""Models that compute a loss of labels and take masks of padding, in the style of Hugging Face.

The stand-in is a Transformer of plain torch. Its references are pairs (x, y) of examples alone,
without padding, with labels that are shifted by hand.
"""

import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.laplace_torch.interface import KfacGGN
from kfac_backend.optimizer import KFAC
from marglik import KronLaplace, map_predictive, marglik_training, predict_all
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.networks import Model
from tests.random_numbers import normal

V = 7
IGNORED = -100


@dataclass
class Output:
    """What such models return."""

    logits: Tensor
    loss: Tensor | None = None


class Block(nn.Module):
    """Attention and a hidden layer; in float64 hidden keys have the weight zero exactly."""

    def __init__(self, d, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm, self.hidden = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, x, visible):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k)
        p = scores.masked_fill(~visible[:, None], torch.finfo(x.dtype).min).softmax(-1)
        x = x + self.out(torch.einsum("nhqk,nkhd->nqhd", p, v).flatten(2))
        return x + torch.tanh(self.hidden(x))


class Transformer(nn.Module):
    """Language model ("causal", "masked") or classifier ("first", "mean", "all").

    Args:
        kind: what it is; "all" is a classifier that takes padding into its mean.
        label_smoothing: of its own loss.
    """

    def __init__(self, kind, label_smoothing=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.label_smoothing = kind, label_smoothing
        self.tokens, self.positions = nn.Embedding(V, 4), nn.Embedding(16, 4)
        self.block = Block(4)
        self.head = nn.Linear(4, V if kind in ("causal", "masked") else 3)
        for p in self.parameters():
            nn.init.normal_(p, std=0.7)
        self.double()

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None):
        N, R = input_ids.shape
        mask = torch.ones(N, R) if attention_mask is None else attention_mask
        visible = mask.bool()[:, None].expand(N, R, R)
        if self.kind == "causal":
            visible = visible & torch.ones(R, R).tril().bool()
        position_ids = torch.arange(R)[None] if position_ids is None else position_ids
        x = self.block(self.tokens(input_ids) + self.positions(position_ids), visible)
        if self.kind == "first":
            x = x[:, 0]
        elif self.kind == "mean":
            x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        elif self.kind == "all":
            x = x.mean(1)
        f = self.head(x)
        return Output(f, None if labels is None else self.loss(f, labels))

    def loss(self, f, labels):
        if self.kind == "causal":
            f, labels = f[:, :-1], labels[:, 1:]
        return F.cross_entropy(
            f.flatten(0, -2), labels.flatten(), label_smoothing=self.label_smoothing
        )


def plain(model):
    """The logits as a function of the tokens alone."""
    return Model(lambda m, x: m.model(x).logits, model=model)


LENGTHS = [5, 3, 2, 4]


def sentences(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, V, (n,), generator=generator) for n in lengths]


def padded(sequences, length, left=False, pad=0):
    """Tokens, mask and numbers of positions (N, length)."""
    N = len(sequences)
    ids, mask = torch.full((N, length), pad), torch.zeros(N, length, dtype=torch.long)
    positions = torch.zeros(N, length, dtype=torch.long)
    for n, sequence in enumerate(sequences):
        R = len(sequence)
        where = slice(length - R, None) if left else slice(R)
        ids[n, where], mask[n, where], positions[n, where] = sequence, 1, torch.arange(R)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def batch_of(kind, length=5, left=False, pad=0):
    """A batch as a user of such models has it."""
    batch = padded(sentences(), length, left, pad)
    if kind in ("causal", "masked"):
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        if kind == "masked":
            labels = labels.masked_fill(labels % 2 == 0, IGNORED)
    else:
        labels = torch.tensor([0, 2, 1, 1])
    return batch | {"labels": labels}


def alone(kind):
    """Examples (x, y), one by one, without padding; labels as the outputs predict them."""
    if kind not in ("causal", "masked"):
        return [
            (x[None], torch.tensor([y])) for x, y in zip(sentences(), [0, 2, 1, 1], strict=True)
        ]
    pairs = []
    for x in sentences():
        if kind == "causal":
            y = torch.cat([x[1:], torch.tensor([IGNORED])])
        else:
            y = x.masked_fill(x % 2 == 0, IGNORED)
        pairs.append((x[None], y[None]))
    return pairs


def factors(model, batches, mode="expand", **options):
    return kronecker_factors(model, batches, "classification", kfac_approx=mode, **options)


def assert_same_loss_and_blocks(first, second, prefix=""):
    assert first.num_loss_terms == second.num_loss_terms
    assert_close(first.loss, second.loss)
    for name, block in first.blocks.items():
        assert_close(block.to_dense(), second.to_dense(prefix + name))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["causal", "masked", "first", "mean"])
def test_a_batch_with_padding_is_its_examples_alone(kind, mode):
    model = Transformer(kind)
    ignored = IGNORED if kind in ("causal", "masked") else None
    expected = factors(plain(model), alone(kind), mode, ignore_index=ignored)
    batches = [batch_of(kind), batch_of(kind, 9), batch_of(kind, 9, pad=3)]
    if kind == "causal":
        batches += [batch_of(kind, 5, left=True), batch_of(kind, 8, left=True)]
    for batch in batches:
        assert_same_loss_and_blocks(factors(model, [batch], mode), expected, "model.")
    # Negative control: padding that counts.
    counted = factors(model, [batch_of(kind, 9)], mode, dict_key_mask=None)
    wrong = counted.to_dense("block.qkv.weight")
    right = expected.to_dense("model.block.qkv.weight")
    assert (wrong - right).norm() > 0.1 * right.norm()


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_a_causal_model_is_its_own(mode):
    model, batch = Transformer("causal"), batch_of("causal")
    found = factors(model, [batch], mode)
    own = model(**batch).loss
    assert_close(found.loss / found.num_loss_terms, own.item())
    # Negative control, what labels against outputs at the same position give.
    unshifted = factors(model, [batch], mode, shift_labels=False, ignore_index=IGNORED)
    assert abs(unshifted.loss / unshifted.num_loss_terms - own.item()) > 0.1
    said = factors(model, [batch], mode, shift_labels=True)
    assert_same_loss_and_blocks(found, said)


@pytest.mark.parametrize("mode", MODES)
def test_labels_that_the_mask_hides_do_not_count(mode):
    model = Transformer("causal")
    expected = factors(model, [batch_of("causal")], mode)
    with pytest.warns(UserWarning, match="Labels at positions that 'attention_mask' hides do not"):
        labels = batch_of("causal", 8, left=True)
        labels["labels"] = labels["input_ids"]  # padding is marked nowhere
        assert_same_loss_and_blocks(factors(model, [labels], mode), expected)


@pytest.mark.parametrize("kind", ["causal", "first"])
def test_another_loss_is_a_named_error(kind):
    model, batch = Transformer(kind, label_smoothing=0.1), batch_of(kind)
    two = {k: v[:2] for k, v in batch.items()}
    calls = [
        lambda **o: factors(model, [batch], **o),
        lambda **o: KronLaplace(model, "classification", **o).fit([batch]),
        lambda **o: marglik_training(model, [batch], n_epochs=1, n_hypersteps=1, **o),
        lambda **o: predict_all(map_predictive(model), [batch], **o),
        lambda **o: KfacGGN(model, "classification", **o).kron(batch, batch["labels"], 4),
    ]
    for call in calls:
        own = f"{model(**two).loss.item():.6g}"  # training changes it
        with pytest.raises(ValueError, match=f"labels: {own} .*label smoothing.*shift_labels="):
            call()
        call(shift_labels=kind == "causal")


def test_a_loss_that_does_not_tell_is_a_named_error():
    model = Transformer("causal")
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    with pytest.raises(ValueError, match="Both fit.*shift_labels=False if.*, True if"):
        factors(model, [batch_of("causal")])
    assert factors(model, [batch_of("causal")], shift_labels=True).num_loss_terms == 10


def test_options_that_are_not_supported():
    model, batch = Transformer("first"), batch_of("first")
    with pytest.raises(ValueError, match="shift_labels='yes' is not supported"):
        factors(model, [batch], shift_labels="yes")
    with pytest.raises(ValueError, match=r"shift_labels=True needs labels \(N, R\)"):
        factors(model, [batch], shift_labels=True)
    with pytest.raises(ValueError, match="shift_labels=True needs .*'classification'"):
        kronecker_factors(model, [batch], "regression", shift_labels=True)
    half = batch | {"attention_mask": batch["attention_mask"] * 0.5}
    with pytest.raises(ValueError, match="'attention_mask' has entries other than 0"):
        factors(model, [half], shift_labels=False)


@pytest.mark.parametrize("mode", MODES)
def test_padding_that_reaches_the_output_is_a_named_error(mode):
    model, batch = Transformer("all"), batch_of("all")
    full = {k: v[:1] for k, v in batch.items()}  # it hides nothing
    for batches in ([batch], [full, batch]):
        with pytest.raises(NotImplementedError, match="do not count reach .*dict_key_mask=None"):
            factors(model, batches, mode)
    factors(model, [full], mode)
    factors(model, [batch], mode, dict_key_mask=None)


def test_labels_of_models_without_a_loss_are_taken_as_they_are():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, (pair, *_) = plain(Transformer("causal")), alone("causal")
        ids = pair[0]
        f = factors(model, [(ids, ids)])
    own = F.cross_entropy(model(ids)[0], ids[0], reduction="sum")
    assert_close(f.loss, own.item())


class Trims(nn.Module):
    """A convolution over positions, of which a batch has as many as its longest sequence."""

    def __init__(self, sees_padding: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 2)
        self.conv = nn.Conv1d(2, 2, 3 if sees_padding else 1, padding="same")

    def forward(self, x, attention_mask):
        longest = int(attention_mask.sum(1).max())
        x, counts = x[:, :longest], attention_mask[:, :longest, None]
        y = self.conv(self.first(x).mT).mT
        return (y * counts).sum(1) / counts.sum(1)


@pytest.mark.filterwarnings("ignore:The mask of positions does not fit the inputs of 'conv'")
def test_masks_are_proved_again_where_they_hide_other_layers_rows():
    """A mask fits no layer of a trimmed batch, so that such a batch proves nothing of masks."""
    whole = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    batches = [
        {"x": normal(2, 4, 2).float(), "attention_mask": mask, "labels": torch.tensor([0, 1])}
        for mask in (whole[[1, 1]], whole)
    ]
    words = "'first' .*rows that do not count reach"
    with pytest.raises(NotImplementedError, match=words):
        kronecker_factors(Trims(True), batches, "classification")
    kronecker_factors(Trims(True), batches[:1], "classification")
    kronecker_factors(Trims(False), batches, "classification")  # negative control
    model = Trims(True)
    optimizer = KFAC(model, "classification", lr=0.1, factor_every=1)
    with pytest.raises(NotImplementedError, match=words):
        for batch in batches:
            f = model(batch["x"], batch["attention_mask"])
            F.cross_entropy(f, batch["labels"]).backward()
            optimizer.step()
