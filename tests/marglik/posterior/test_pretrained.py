"""Networks trained elsewhere: their checkpoints, and no code of them; the last layer."""

from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from marglik.posterior.posterior import last_layer
from marglik.storage.model_state import load_pretrained

PREFIXES = ["module.", "net.", "_orig_mod.module."]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def state(prefix=""):
    return {prefix + name: tensor for name, tensor in network().state_dict().items()}


def saved(content, path, **options):
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path, **options)
    return path


KEPT = {
    "safetensors": (state(), ".safetensors", {}),
    ".bin": (state(), ".bin", {}),
    "before zip files": (state(), ".pt", {"_use_new_zipfile_serialization": False}),
    **{
        key: ({"epoch": 3, "optimizer": {"lr": 0.1}, key: OrderedDict(state())}, ".pt", {})
        for key in ("state_dict", "model_state_dict", "model")
    },
    **{prefix: ({"state_dict": state(prefix)}, ".ckpt", {}) for prefix in PREFIXES},
    "a prefix in safetensors": (state("module."), ".safetensors", {}),
}


@pytest.mark.parametrize("case", KEPT)
def test_checkpoints_as_people_keep_them(case, tmp_path):
    content, suffix, options = KEPT[case]
    path = saved(content, tmp_path / f"net{suffix}", **options)
    model = network(seed=1)
    note = load_pretrained(model, str(path))
    assert all(torch.equal(tensor, state()[n]) for n, tensor in model.state_dict().items())
    prefix = case if case in PREFIXES else "module." if "prefix" in case else None
    assert note == (prefix and f"the prefix {prefix!r} was removed from all names")


def test_half_precision_is_widened(tmp_path):
    model = network(seed=1)
    path = saved(network().half().state_dict(), tmp_path / "net.pt")
    assert "were cast from torch.float16 to torch.float32" in load_pretrained(model, path)
    assert torch.equal(model[0].weight, network()[0].weight.half().float())


def wrong(name, tensor):
    return state() | {name: tensor}


REFUSED = {
    "a module": (network(), "Save the network's state_dict"),
    **{
        f"{type(content).__name__} {i}": (content, "contains no state dict")
        for i, content in enumerate([{}, [1, 2], {"epoch": 3}, {"0.weight": [1.0]}])
    },
    "int8": (
        wrong("0.weight", torch.ones(4, 3, dtype=torch.int8)),
        "'0.weight' .* of whole numbers",
    ),
    "wider": (wrong("0.weight", torch.ones(5, 3)), r"'0.weight' has shape \(5, 3\) there"),
    "more": (state() | {"3.weight": torch.ones(2)}, "'3.weight' .* does not exist in Seq"),
    "less": ({"0.weight": torch.ones(4, 3)}, "'0.bias' does not exist there"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_the_network(case, tmp_path):
    content, message = REFUSED[case]
    model = network(seed=1)
    with pytest.raises(ValueError, match=message) as caught:
        load_pretrained(model, saved(content, tmp_path / "net.pt"))
    assert "\n" not in str(caught.value) and "net.pt" in str(caught.value)
    before = network(seed=1).state_dict()
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())


def test_other_paths(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"x")
    with pytest.raises(ValueError, match="net.onnx cannot be read as a file of tensors"):
        load_pretrained(network(), tmp_path / "net.onnx")
    with pytest.raises(FileNotFoundError, match="No checkpoint at .*nothing.pt"):
        load_pretrained(network(), tmp_path / "nothing.pt")


# --- the last layer ---


class Reversed(nn.Module):
    """Runs its layers from the last to the first; one only in training."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5))
        self.auxiliary = nn.Linear(3, 3)
        self.spare = nn.Linear(3, 3)  # never runs

    def forward(self, x):
        f = self.head(self.body(x))
        return self.auxiliary(f) if self.training else f


class OwnParameters(nn.Module):
    """Holds parameters of its own beside its layers, as vision transformers do."""

    def __init__(self):
        super().__init__()
        self.token, self.inner, self.head = nn.Parameter(torch.ones(6)), Reversed(), nn.Linear(3, 2)

    def forward(self, batch):
        return self.head(self.inner(batch["a"] + batch["b"] + self.token))


X = torch.randn(4, 6)
MAPPING = {"a": X, "b": X}


@pytest.mark.parametrize(
    ("model", "x", "expected"),
    [
        (nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2), nn.Softplus()), X, "2"),
        (nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3)), X, "1"),
        (nn.Linear(6, 3), X, ""),
        (Reversed(), X, "head"),
        (OwnParameters(), MAPPING, "head"),
        (nn.Sequential(nn.Linear(6, 6), Reversed()), X, "1.head"),
    ],
)
def test_runs_last(model, x, expected):
    assert last_layer(model.train(), x) == expected


def test_frozen_layers_do_not_count():
    model = Reversed()
    model.head.requires_grad_(False)
    assert last_layer(model, X) == "body.0"
    model.body.requires_grad_(False)
    with pytest.raises(ValueError, match="Reversed runs no layer with trainable parameters"):
        last_layer(model, X)
