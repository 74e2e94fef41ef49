"""What the command line says of a wrong option: the value, what is supported, the way out."""

import pytest

from marglik import cli
from marglik.cli import COMMANDS, main
from marglik.runs import training_setup
from tests.marglik.commands.command_line import refusal

DIGITS = ["train", "--config", "digits", "--no_progress"]
MODELS = "GCN, GPT, MLP, GraphNetwork, LeNet, VisionTransformer or WideResNetFixup"
CASES = {
    "a number": (["--epochs", "many"], "--epochs many: must be a whole number."),
    "a fraction": (["--epochs", "1.5"], "--epochs 1.5: must be a whole number."),
    "an empty one": (["--prior.lr", ""], "--prior.lr '': must be a number."),
    "a truth value": (["--curvature.batched", "3"], "batched 3: must be true or false."),
    "a flag": (["--augment", "3"], "--augment takes no value, not '3'; there is --no_augment"),
    "a flag's own": (["--augment=3"], "--augment takes no value, not '3'; there is --no_augment"),
    "a choice": (["--precision", "x"], "--precision x: must be 32-true, bf16-mixed or 16-mixed."),
    "a choice or a mapping": (
        ["--prior.structure", "foo"],
        "--prior.structure foo: must be layerwise, scalar, kind or stage, or a mapping of names to "
        "text.",
    ),
    "a number or null": (
        ["--predictive.memory", "x"],
        "memory x: must be a whole number, or null.",
    ),
    "a list": (
        ["--model", "MLP", "--model.in_features", "64", "--model.hidden", "[a]"],
        "--model.hidden a: must be a list in brackets, each item a whole number.",
    ),
    "too long": (
        ["--seed", 23 * "9"],
        f"--seed {23 * '9'}: must lie in -9223372036854775807..9223372036854775807.",
    ),
    "too long for a class": (["--model.num_classes", 23 * "9"], "--model.num_classes 9999"),
    "infinite": (["--prior.lr", "1e999"], "--prior.lr inf: must be finite."),
    "not a number": (["--prior.lr", ".nan"], "--prior.lr nan: must be finite."),
    "null": (["--data.validation", "null"], "--data.validation null: must be a number."),
    "no value": (["--seed"], "--seed needs a value."),
    "misspelt": (["--epochss", "3"], "No option --epochss; did you mean --epochs?"),
    "unknown": (["--nonsense", "3"], "No option --nonsense."),
    "unknown in a group": (["--prior", "{bar: 2}"], "No option --prior.bar; did you mean --prior"),
    "a group": (["--prior", "foo"], "--prior 'foo': no YAML file; give --prior.weight_decay, "),
    "no class": (["--model", "Foo"], f"--model Foo: no such class. It must be {MODELS}, or the"),
    "no module": (["--model", "no.such"], f"(No module named 'no'). It must be {MODELS}, or the"),
    "no network": (
        ["--model", "collections.OrderedDict"],
        f"--model collections.OrderedDict: no such class. It must be {MODELS}",
    ),
    "no data": (["--ood", "marglik.data.No"], "has no attribute 'No'). It must be CIFAR10, SVHN, "),
    "a class's argument": (["--ood.num_images", "x"], "num_images x: must be a whole number."),
    "a class's refusal": (["--ood.num_images", "0"], "error: num_images=0: must be at least 1."),
    "not the class's": (
        ["--model.foo", "3"],
        "marglik.models.LeNet has no option --model.foo; it takes --model.num_classes, "
        "--model.in_channels and --model.image_size.",
    ),
    "a class without its own": (
        ["--model", "torch.nn.Linear"],
        "--model torch.nn.Linear needs --model.in_features and --model.out_features.",
    ),
    "one too many": (["runs/digits"], "'runs/digits' belongs to no option."),
    "one that begins as another": (["--seed", "1", "1e3"], "'1e3' belongs to no option."),
}
JSONARGPARSE = ("Parser key", "<class", "typing.", "Union", "Subtypes", "class_path", "dot import")


@pytest.mark.parametrize(("options", "message"), CASES.values(), ids=CASES)
def test_value_choices_and_way_out(options, message, capsys):
    said = refusal(capsys, *DIGITS, *options)
    assert message in said
    assert not [words for words in JSONARGPARSE if words in said]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_names_itself_and_what_it_takes(command, capsys):
    """A list of mappings, which no option takes but those that are text."""
    _, parsers = cli._parsers(command)
    options = {a.option_strings[0]: a for a in parsers[command]._actions if a.option_strings}
    free = {name for name, a in options.items() if "str" in str(getattr(a, "_typehint", ""))}
    free = {name for name in free if "dict" not in str(getattr(options[name], "_typehint", ""))}
    for name in set(options) - free - {"-h", "--help", "--config", "--print_config"}:
        if name.endswith(".help"):
            continue
        said = refusal(capsys, command, *(["x"] if command == "evaluate" else []), name, "[{a: 1}]")
        assert f" {name} " in said, said
        assert any(w in said for w in ("must be", "takes no value", "give --")), said
        assert not [words for words in JSONARGPARSE if words in said], said


CONFIGS = {
    "an unknown option": (b"epochs: 3\nprior: {bar: 2}\n", "No option --prior.bar"),
    "a wrong value": (b"epochs: foo\n", "--epochs foo: must be a whole number."),
    "no mapping": (b"- 1\n", "--config takes a YAML file with a mapping of options"),
    "no YAML": (b"epochs: [1\n", "--config takes a YAML file with a mapping of options"),
    "nothing": (b"", "--config takes a YAML file with a mapping of options"),
    "a long number": (b"epochs: " + b"9" * 5000, "options.yaml is refused: it has a number of 5,0"),
    "a tag that does not fit": (
        b"epochs: !!int x\n",
        "options.yaml is refused: invalid literal for",
    ),
    "a long text": (b"word " * 1000, "Unexpected config: word word"),
    "no text": (b"\xff\xfe\x00", "must be a YAML file of options"),
}


@pytest.mark.parametrize(("content", "message"), CONFIGS.values(), ids=CONFIGS)
def test_files_of_options(content, message, tmp_path, capsys):
    path = tmp_path / "options.yaml"
    path.write_bytes(content)
    said = refusal(capsys, "train", "--config", str(path))
    assert message in said and len(said) < 400 + len(str(path))
    assert "no such file or preset" in refusal(capsys, "train", "--config", str(tmp_path))
    assert "--config '': no such file" in refusal(capsys, "train", "--config", "")


@pytest.mark.parametrize("joined", [False, True])
def test_short_names_of_our_models(joined, monkeypatch, tmp_path):
    """Torchvision has an MLP, too: ours is meant."""
    import torchvision.ops  # noqa: F401

    built = []

    def train(setup, model, *arguments):
        built.append(model)
        raise ValueError("enough")

    monkeypatch.setattr(training_setup.TrainingSetup, "train", train)
    model = ["--model=MLP"] if joined else ["--model", "MLP"]
    sizes = ["--model.in_features", "64", "--model.num_classes", "10"]
    output = ["--output", str(tmp_path / "run")]
    assert main(["train", *model, *sizes, "--data", "Digits", *output]) == 2
    (found,) = built
    assert type(found).__module__.startswith("marglik.models")


@pytest.mark.parametrize("noise", ["0", "-1"])
def test_noise_of_a_checkpoint_is_positive(noise, tmp_path, capsys):
    """Zero was taken for none given, and so for one."""
    said = refusal(capsys, "evaluate", str(tmp_path), "--sigma_noise", noise)
    assert f"sigma_noise must be positive, not {float(noise)}." in said


SEXAGESIMAL = ":".join(["59"] * 300) + ".5"


def test_numbers_in_base_60_that_no_float_holds(tmp_path, capsys):
    (tmp_path / "options.yaml").write_text(f"epochs: {SEXAGESIMAL}\n")
    message = refusal(capsys, "train", "--config", str(tmp_path / "options.yaml"))
    assert "options.yaml is refused" in message
    assert "too large" in refusal(capsys, *DIGITS, "--prior.lr", SEXAGESIMAL)
