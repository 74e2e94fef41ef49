"""A choice of Fisher of one's own is one class."""

from itertools import product

import pytest
from torch.testing import assert_close

from kfac_backend import CurvatureOptions, kronecker_factors
from kfac_backend.fisher import Fisher
from tests.kfac_backend.block_checks import assert_same
from tests.kfac_backend.networks import data, network


@pytest.fixture
def every_sign(monkeypatch):
    """The root's columns s_c, summed with each of their signs: Σ_σ (Σ_c σ_c s_c)² / 2^C = Λ."""
    monkeypatch.setattr(Fisher, "by_name", dict(Fisher.by_name))

    class EverySign(Fisher):
        name = "every sign"
        patterns = slice(None)

        def columns(self, likelihood, f, y, generator):
            columns = list(likelihood.root(f, y))
            signs = list(product((-1, 1), repeat=len(columns)))
            for pattern in signs[self.patterns]:
                total = sum(sign * s for sign, s in zip(pattern, columns, strict=True))
                yield total / len(signs) ** 0.5

    return EverySign


def test_a_class_is_one_more_choice(every_sign):
    batch = [data()]
    exact = kronecker_factors(network(), batch, "classification")
    found = kronecker_factors(network(), batch, "classification", fisher="every sign")
    assert_same(found, exact)
    assert CurvatureOptions(**found.options.to_json()) == found.options
    every_sign.patterns = slice(1)  # control: the products of different columns stay
    some = kronecker_factors(network(), batch, "classification", fisher="every sign")
    with pytest.raises(AssertionError):
        assert_close(some.blocks["8.weight"].B, exact.blocks["8.weight"].B, rtol=0.1, atol=0)


def test_a_choice_that_there_is_not():
    with pytest.raises(
        ValueError, match="fisher='every sign'.*'exact', 'mc', 'random_signs', 'empirical'"
    ):
        CurvatureOptions(fisher="every sign")
