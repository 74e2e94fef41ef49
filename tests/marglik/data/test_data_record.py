"""Other data meets a network in the form of its training data, or is refused."""

import json
from dataclasses import replace

import pytest
import torch

from kfac_backend.files import sha256_of_tensors
from marglik.data import ImageSet, ImageSplits, TensorSplits
from marglik.data.record import as_trained, data_record, is_held_out, tensors_in
from marglik.graphs import Graphs


def images(name="pets", classes=("cat", "dog"), shape=(1, 4, 4), mean=(9.0,), std=(3.0,)):
    mean, std = (values * shape[0] for values in (mean, std))
    pixels = torch.randint(256, (6, *shape), dtype=torch.uint8)
    part = ImageSet(pixels, torch.arange(6) % len(classes))
    return ImageSplits(part, None, part, classes, mean, std, name)


def tensors(name="waves"):
    pair = torch.zeros(3, 2), torch.zeros(3, 1)
    return TensorSplits(pair, None, pair, name)


def graphs(name="molecules", features=3, classes=("inert", "active")):
    counts, empty = torch.tensor([2, 2]), torch.zeros(0, dtype=torch.int64)
    x = Graphs(torch.zeros(4, features), torch.zeros(0, 1), empty, empty, counts, 0 * counts)
    pair = x, torch.tensor([0, 1])
    return TensorSplits(pair, None, pair, name, classes)


def words(name="words", classes=("a", "b")):
    pair = torch.zeros(3, 2).long(), torch.tensor([[0, 1], [1, 0], [1, -1]])
    return TensorSplits(pair, None, pair, name, classes, ignore_index=-1)


def of_training(splits):
    return sha256_of_tensors(tensors_in(splits.train))


def recorded(splits, source=None):
    """The record after its way through a file."""
    return json.loads(json.dumps(data_record(splits, source)))


def test_record_of_images():
    source = {"class_path": "marglik.data.Digits", "init_args": {"seed": 1}}
    pets = images()
    assert recorded(pets, source) == {
        "name": "pets", "source": source, "train_sha256": of_training(pets),
        "classes": ["cat", "dog"], "image_shape": [1, 4, 4], "mean": [9.0], "std": [3.0],
    }  # fmt: skip


def test_record_of_tensors():
    waves = tensors()
    assert recorded(waves) == {"name": "waves", "source": None, "train_sha256": of_training(waves)}


def test_what_was_not_trained_on():
    pets = images()
    record, none = recorded(pets), replace(pets, validation=None)
    with_some = replace(pets, validation=pets.test)
    assert is_held_out(with_some, record) and not is_held_out(none, record)
    assert not is_held_out(with_some, None) and not is_held_out(with_some, {"name": "pets"})
    other = replace(pets.train, labels=1 - pets.train.labels)
    assert not is_held_out(replace(with_some, train=other), record)


def test_record_of_graphs_and_of_sequences():
    of_graphs, of_words = recorded(graphs()), recorded(words())
    assert of_graphs == {
        "name": "molecules", "source": None, "train_sha256": of_training(graphs()),
        "classes": ["inert", "active"], "graphs": "graphs with 3 features per node and 1 per edge",
    }  # fmt: skip
    assert of_words == {
        "name": "words", "source": None, "train_sha256": of_training(words()),
        "classes": ["a", "b"],
    }  # fmt: skip


def test_data_of_the_same_kind_stays_as_it_is():
    for make in (graphs, words):
        splits = make("other")
        assert as_trained(splits, recorded(make())) is splits
    # What a file's labels are called, nobody knows.
    assert as_trained(words(classes=None), recorded(words())).classes is None
    assert as_trained(words(), recorded(tensors())).classes == ("a", "b")


def test_images_are_normalised_as_in_training():
    trained = images(mean=(77.98472270514604,), std=(1 / 3,))
    other = images("other pets", mean=(10.0,), std=(20.0,))
    adapted = as_trained(other, recorded(trained))
    assert (adapted.mean, adapted.std) == (trained.mean, trained.std)  # to the bit
    assert adapted.name == "other pets"
    assert adapted.train is other.train and adapted.test is other.test
    assert other.mean == (10.0,)


@pytest.mark.parametrize(
    ("splits", "trained", "message"),
    [
        (tensors(), images(), "waves holds no images, unlike pets, .*Pass data of its kind"),
        (images(), tensors(), "pets holds images, unlike waves, .*Pass data of its kind"),
        (
            images("zoo", classes=("cat", "dog", "emu", "fox", "gnu")),
            images(),
            "zoo has 5 classes \\(cat, dog, emu, fox, ...\\), .* 2 of pets \\(cat, dog\\). .*--ood",
        ),
        (images(classes=("dog", "cat")), images(), "pets has 2 classes \\(dog, cat\\)"),
        (graphs(), images(), "molecules holds no images, unlike pets"),
        (graphs(), words(), "molecules holds graphs, unlike words, .*Pass data of its kind"),
        (words(), graphs(), "words holds no graphs, unlike molecules"),
        (
            graphs(features=4),
            graphs(),
            "molecules has graphs with 4 features per node .*, the network was trained on graphs "
            "with 3",
        ),
        (words(classes=("a", "b", "c")), words(), "words has 3 classes \\(a, b, c\\), .* on 2 of"),
        (images(shape=(3, 4, 4)), images(), "shape \\(3, 4, 4\\), .* trained on \\(1, 4, 4\\)"),
        (images(shape=(1, 8, 8)), images(), "shape \\(1, 8, 8\\), .* trained on \\(1, 4, 4\\)"),
    ],
)
def test_data_of_another_form(splits, trained, message):
    with pytest.raises(ValueError, match=message):
        as_trained(splits, recorded(trained))
