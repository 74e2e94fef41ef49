"""Learned invariances: augmentation ranges that the evidence learns while a network trains."""

from marglik.augmentation.learned import LearnedAugmentation
from marglik.augmentation.ranges import evidence_gradient
from marglik.augmentation.transforms import Affine, Color, Flip, Noise, TimeShift, Transform

__all__ = [
    "Affine",
    "Color",
    "Flip",
    "LearnedAugmentation",
    "Noise",
    "TimeShift",
    "Transform",
    "evidence_gradient",
]
