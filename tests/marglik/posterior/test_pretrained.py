"""Checkpoints as people keep them, and those that are refused, without running what is in them."""

import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from marglik.posterior.pretrained import load_pretrained

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def prefixed(prefix):
    return {prefix + name: tensor for name, tensor in network().state_dict().items()}


def check_loaded(path):
    """Load into a network with other parameters; returns the note."""
    model, wanted = network(seed=1), network().state_dict()
    assert not torch.equal(model[0].weight, wanted["0.weight"])
    note = load_pretrained(model, path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    return note


def test_safetensors(tmp_path):
    save_file(network().state_dict(), tmp_path / "net.safetensors")
    assert check_loaded(tmp_path / "net.safetensors") is None
    assert check_loaded(str(tmp_path / "net.safetensors")) is None


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_state_dict_of_torch_save(suffix, tmp_path):
    torch.save(network().state_dict(), tmp_path / f"net{suffix}")
    assert check_loaded(tmp_path / f"net{suffix}") is None


def test_state_dict_of_before_zip_files(tmp_path):
    torch.save(network().state_dict(), tmp_path / "net.pt", _use_new_zipfile_serialization=False)
    assert check_loaded(tmp_path / "net.pt") is None


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_nested_state_dicts(key, tmp_path):
    optimizer = {"state": {0: {"step": torch.tensor(3)}}, "param_groups": [{"lr": 0.1}]}
    content = {"epoch": 3, "optimizer": optimizer, key: OrderedDict(network().state_dict())}
    torch.save(content, tmp_path / "net.pt")
    assert check_loaded(tmp_path / "net.pt") is None


PREFIXES = ["module.", "_orig_mod.", "model.", "net.", "_orig_mod.module.", "model.net."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_wrappers(prefix, tmp_path):
    torch.save({"state_dict": prefixed(prefix)}, tmp_path / "net.ckpt")
    note = f"the prefix {prefix!r} was removed from all names"
    assert check_loaded(tmp_path / "net.ckpt") == note
    save_file(prefixed(prefix), tmp_path / "net.safetensors")
    assert prefix in check_loaded(tmp_path / "net.safetensors")


def test_a_real_wrapper(tmp_path):
    torch.save(nn.DataParallel(network()).state_dict(), tmp_path / "parallel.pt")
    assert "module." in check_loaded(tmp_path / "parallel.pt")


def test_a_network_that_has_the_prefix_itself(tmp_path):
    torch.save(prefixed("module."), tmp_path / "net.pt")
    model = nn.ModuleDict({"module": network(seed=1)})
    assert load_pretrained(model, tmp_path / "net.pt") is None
    assert torch.equal(model["module"][0].weight, network()[0].weight)


class Malicious:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_does_not_run(suffix, zipped, tmp_path):
    trace, path = tmp_path / "trace", tmp_path / f"net{suffix}"
    content = {"state_dict": network().state_dict(), "extra": Malicious(trace)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    model = network(seed=1)
    with pytest.raises(ValueError, match="holds .*, and loading objects can run code"):
        load_pretrained(model, path)
    assert not trace.exists()
    assert torch.equal(model[0].weight, network(seed=1)[0].weight)
    # Negative control: it would have run.
    torch.load(path, weights_only=False)
    assert trace.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_bare_pickle_does_not_run(tmp_path):
    (tmp_path / "net.bin").write_bytes(pickle.dumps(Malicious(tmp_path / "trace")))
    with pytest.raises(ValueError, match="of tensors: it is damaged, or another"):
        load_pretrained(network(), tmp_path / "net.bin")
    assert not (tmp_path / "trace").exists()


def test_a_pickled_module_is_refused(tmp_path):
    torch.save(network(), tmp_path / "net.pt")
    with pytest.raises(ValueError, match="holds torch.nn.modules.*Save the network's state_dict"):
        load_pretrained(network(), tmp_path / "net.pt")
    torch.save({"model": network(), "epoch": 3}, tmp_path / "net.pt")
    with pytest.raises(ValueError, match="holds torch.nn.modules.*Save the network's state_dict"):
        load_pretrained(network(), tmp_path / "net.pt")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_files(suffix, share, tmp_path):
    path = tmp_path / f"net{suffix}"
    if suffix == ".pt":
        torch.save(network().state_dict(), path)
    else:
        save_file(network().state_dict(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    model = network(seed=1)
    with pytest.raises(
        ValueError, match="could not be read|is not a complete safetensors file"
    ) as e:
        load_pretrained(model, path)
    assert path.name in str(e.value) and "\n" not in str(e.value)
    assert torch.equal(model[0].weight, network(seed=1)[0].weight)


@pytest.mark.parametrize("name", ["net.h5", "net.onnx", "net", "net.SAFETENSORS"])
def test_other_suffixes(name, tmp_path):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match="supported are .safetensors, .pt, .pth, .ckpt, .bin"):
        load_pretrained(network(), tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [{}, [1, 2], {"epoch": 3}, torch.zeros(3), {"state_dict": {}}, {"0.weight": [1.0]}, "text"],
)
def test_content_that_is_no_state_dict(content, tmp_path):
    torch.save(content, tmp_path / "net.pt")
    with pytest.raises(ValueError, match="holds no state dict, neither at the top nor under"):
        load_pretrained(network(), tmp_path / "net.pt")


@pytest.mark.parametrize("name", ["nothing.pt", "folder.pt"])
def test_no_file(name, tmp_path):
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(FileNotFoundError, match=f"No checkpoint at .*{name}"):
        load_pretrained(network(), tmp_path / name)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (network()[:2], "Sequential has no '2."),
        (nn.Sequential(nn.Linear(3, 5)), "'0.weight' has shape \\(4, 3\\), Sequential has \\(5, 3"),
        (nn.Sequential(*network(), nn.Linear(2, 2)), "it lacks '3.weight', which Sequential has"),
        (nn.Linear(3, 4), "it lacks 'weight', which Linear has"),
    ],
)
def test_another_network(model, message, suffix, tmp_path):
    path = tmp_path / f"net{suffix}"
    if suffix == ".pt":
        torch.save(network().state_dict(), path)
    else:
        save_file(network().state_dict(), path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="is of another network: .*" + message):
        load_pretrained(model, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_half_precision_is_widened(tmp_path):
    torch.save(network().half().state_dict(), tmp_path / "net.pt")
    model = network(seed=1)
    note = load_pretrained(model, tmp_path / "net.pt")
    assert note == "8 tensors were cast from torch.float16 to torch.float32"
    assert model[0].weight.dtype == torch.float32
    assert torch.equal(model[0].weight, network()[0].weight.half().float())


@pytest.mark.parametrize(
    "change",
    [
        lambda w: (w * 100).to(torch.int8),
        lambda w: w.to(torch.complex64),
        lambda w: w.to_sparse(),
        lambda w: w > 0,
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_weights_that_are_no_dense_real_numbers(change, tmp_path):
    """They would be cast: whole numbers unscaled, complex ones without their imaginary part."""
    state = network().state_dict()
    name = next(iter(state))
    torch.save(state | {name: change(state[name])}, tmp_path / "net.pt")
    model = network(seed=1)
    before = model.state_dict()[name].clone()
    with pytest.raises(ValueError, match=f"holds '{name}' as .*state_dict"):
        load_pretrained(model, tmp_path / "net.pt")
    assert torch.equal(model.state_dict()[name], before)
