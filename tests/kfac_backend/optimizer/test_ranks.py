"""K-FAC steps on several ranks are those of one process with the batches of all."""

import pytest
from torch.testing import assert_close

WORLDS = (1, 2, 4)


@pytest.fixture(scope="module")
def found(worlds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    use = "tests.kfac_backend.optimizer.steps_on_ranks:trained_anew_and_resumed"
    return {world: worlds.all(world, use, folder) for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS[1:])
def test_steps_are_those_of_one_process(found, world):
    (alone,) = found[1]
    for of_rank in found[world]:
        for name, tensor in of_rank.items():
            if not name.startswith("resumed"):
                assert_close(tensor, alone[name], rtol=1e-9, atol=1e-10, msg=name)
    assert {name.split(",")[0] for name in found[2][0] if name in alone} >= {"factors", "product"}
    assert any(name.startswith("product, exact") for name in found[4][0])


@pytest.mark.parametrize("world", WORLDS[1:])
def test_a_state_goes_on_with_twice_the_ranks(found, world):
    (alone,) = found[1]
    for of_rank in found[world]:
        resumed = [name for name in of_rank if name.startswith("resumed")]
        assert resumed
        for name in resumed:
            expected = alone[name.removeprefix("resumed, ")]
            assert_close(of_rank[name], expected, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_ranks_stay_together(found, world):
    for of_rank in found[world][1:]:
        for name, tensor in found[world][0].items():
            # Each multiplies by the inverses itself, and a product's last bit may depend on where
            # its matrices lie in memory.
            assert_close(of_rank[name], tensor, rtol=1e-13, atol=1e-14, msg=name)
