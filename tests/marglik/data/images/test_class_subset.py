"""Some classes of a source: the right images, numbered anew, everything else as it was."""

import pytest
import torch
from jsonargparse import ArgumentParser

from marglik.data import ClassSubset, Digits, ImageData, ImageFolder
from tests.marglik.data.image_helpers import splits_of


@pytest.mark.parametrize("classes", [["3", "1", "7"], ["1", "3", "7"], ["9"]])
def test_images_of_the_classes_keep_their_order_and_get_new_numbers(classes):
    digits = Digits(validation=0.2)
    everything, some = digits.load(), ClassSubset(digits, classes).load()
    assert some.classes == tuple(classes)
    assert some.name == f"digits ({', '.join(classes)})"
    for all_of_split, kept in zip(splits_of(everything), splits_of(some), strict=True):
        expected = [
            (image, classes.index(str(int(label))))
            for image, label in zip(all_of_split.images, all_of_split.labels, strict=True)
            if str(int(label)) in classes
        ]
        assert torch.equal(kept.images, torch.stack([image for image, _ in expected]))
        assert kept.labels.tolist() == [label for _, label in expected]


def test_statistics_stay_those_of_the_whole_data():
    digits, zeros = Digits().load(), ClassSubset(Digits(), ["0"]).load()
    assert (zeros.mean, zeros.std) == (digits.mean, digits.std)
    own = zeros.train.images.double()
    assert zeros.mean != pytest.approx([own.mean().item()], rel=1e-3)  # negative control


@pytest.mark.parametrize("classes", [[], ["1", "2", "1"], [1, "1"], "12"])
def test_impossible_classes_are_named_at_once(classes):
    with pytest.raises(ValueError, match="pass a list of names"):
        ClassSubset(Digits(), classes)


def test_unknown_class_is_named_with_those_there_are(pets):
    with pytest.raises(ValueError, match=r"pets has no class \['cow', 'Dog'\], but \['cat', 'dog'"):
        ClassSubset(ImageFolder(pets), ["cat", "cow", "Dog"]).load()


@pytest.mark.parametrize("classes", ['["4","1"]', "[4, 1]", "['4', 1]"])
def test_command_line(classes):
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageData, "data")
    options = ["--data=ClassSubset", "--data.data=Digits", "--data.data.seed=2"]
    config = parser.parse_args([*options, f"--data.classes={classes}"])
    source = parser.instantiate(config).data
    assert source.data.seed == 2
    assert source.load().classes == ("4", "1")
    assert source.load().name == "digits (4, 1)"
