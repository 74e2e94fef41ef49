"""Every source of images can be chosen and set up from the command line."""

from jsonargparse import ArgumentParser

from marglik.data import ImageData


def test_constructor_arguments_are_command_line_options(pets):
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageData, "data")
    arguments = [f"--data.path={pets}", "--data.max_train=9", "--data.mean=[1, 2, 3]"]
    config = parser.parse_args(["--data=marglik.data.ImageFolder", *arguments])
    splits = parser.instantiate(config).data.load()
    assert (len(splits.train), splits.mean) == (9, (1.0, 2.0, 3.0))
    for name in ("Digits", "CIFAR10", "SVHN", "Noise"):
        assert parser.parse_args([f"--data=marglik.data.{name}"]).data.init_args.seed == 0
