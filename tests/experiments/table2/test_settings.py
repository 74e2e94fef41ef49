"""The settings of the paper's Table 2: the presets', at another size."""

from dataclasses import replace

from experiments.table2.marglik_cifar10 import _parser, configs
from experiments.table2.settings import PROTOCOLS, Config, Settings


def options(*arguments):
    return _parser().parse_args(arguments)


def test_full_size_is_the_papers():
    """Against peers.md's list of the paper's settings, by hand."""
    settings = Settings.of(Config("full", approach="expand", source="original"))
    assert settings.model["class_path"] == "marglik.models.WideResNetFixup"
    assert settings.model["init_args"] == {"depth": 16, "widen_factor": 4, "num_classes": 10}
    assert settings.data["init_args"] == {"max_train": None, "max_test": None}
    assert settings.batch_size == 128
    optimizer, prior = settings.optimizer, settings.prior
    assert (optimizer.name, optimizer.lr, optimizer.min_lr) == ("sgd", 0.1, 1e-6)
    assert (optimizer.momentum, optimizer.nesterov) == (0.9, True)
    assert optimizer.scalar_lr_factor == 0.1
    assert (prior.weight_decay * 50_000, prior.structure) == (250, "layerwise")
    assert (prior.every, prior.steps, prior.lr, prior.burn_in) == (5, 100, 0.1, 0)
    assert (prior.method, prior.temperature) == ("adam", 1.0)
    assert (settings.curvature.kfac_approx, settings.curvature.fisher) == ("expand", "exact")
    assert settings.curvature.augment
    assert PROTOCOLS["full"].epochs == 100
    predecessor = Settings.of(Config("full", preset="redux")).prior
    assert (predecessor.weight_decay * 50_000, predecessor.burn_in) == (25, 20)


def test_scaled_differs_in_size_alone():
    full, scaled = (
        Settings.of(Config(protocol, "redux", source="original")) for protocol in ("full", "scaled")
    )
    assert replace(scaled, model=full.model, data=full.data, prior=full.prior) == full
    assert replace(scaled.prior, burn_in=20) == full.prior
    assert scaled.prior.burn_in / PROTOCOLS["scaled"].epochs == 0.2


def test_fixed_never_updates():
    fixed, learned = (Settings.of(Config(approach=a)).prior for a in ("fixed", "reduce"))
    assert not any(fixed.schedule(30).is_due(epoch) for epoch in range(1, 31))
    assert replace(fixed, method="adam") == learned


def test_images_say_what_they_are():
    jpeg = Settings.of(Config(source="jpeg")).data
    assert jpeg["init_args"]["name"] == "CIFAR-10 (JPEG)"
    assert jpeg["class_path"].endswith("CIFAR10Archive")
    assert Settings.of(Config(source="original")).data["class_path"] == "marglik.data.CIFAR10"


def test_all_settings_with_three_seeds():
    asked = configs(options())
    assert len(asked) == len({config.name for config in asked}) == 18
    assert [config.seed for config in asked] == 6 * [0] + 6 * [1] + 6 * [2]
    assert {(c.approach, c.augment) for c in asked[:6]} == {
        (approach, augment)
        for approach in ("expand", "reduce", "fixed")
        for augment in (True, False)
    }
    assert all(bool(config.predictives) == (config.seed == 0) for config in asked)


def test_options_select():
    asked = configs(
        options(
            *("--presets", "redux", "--approaches", "reduce", "--augment", "off"),
            *("--seeds", "3", "--protocol", "full", "--source", "jpeg"),
        )
    )
    assert [config.name for config in asked] == ["full/redux/reduce_plain_seed3"]
