"""Vision transformer and language model: what does not fit is named."""

import pytest
import torch

from marglik.models import GPT, VisionTransformer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 5}, "heads=5 does not divide dim=64.* 1, 2, 4, 8, 16, 32, 64, or another dim"),
        ({"heads": 0}, "heads=0: must be at least 1"),
        ({"dim": 0}, "dim=0"),
        ({"depth": 0}, "depth=0"),
    ],
)
@pytest.mark.parametrize("model", [VisionTransformer, GPT])
def test_sizes_that_do_not_fit_are_named(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patch_size": 5}, "patch_size=5 does not divide image_size=32; choose a divisor, or"),
        ({"patch_size": 0}, "patch_size=0"),
        ({"num_classes": 0}, "num_classes=0"),
        ({"in_channels": -1}, "in_channels=-1"),
        ({"image_size": 0}, "image_size=0"),
        ({"mlp_ratio": 0.0}, "mlp_ratio=0.0 gives 0 hidden features with dim=64"),
        ({"pool": "max"}, r"pool='max' is unknown; choose one of \('mean', 'class_token'\)"),
    ],
)
def test_vision_transformer_errors_name_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**arguments)


def test_gpt_errors_name_the_value():
    for argument in ("vocab_size", "context"):
        with pytest.raises(ValueError, match=f"{argument}=0"):
            GPT(**{argument: 0})
    with pytest.raises(ValueError, match=r"shape \(2, 7\); .* at most context=6: cut"):
        GPT(context=6)(torch.zeros(2, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \(6,\)"):
        GPT(context=6)(torch.zeros(6, dtype=torch.int64))


def test_vision_transformer_names_images_of_another_shape():
    with pytest.raises(ValueError, match=r"\(1, 8, 8\) and was built for \(2, 8, 8\)"):
        VisionTransformer(in_channels=2, image_size=8)(torch.randn(2, 1, 8, 8))
