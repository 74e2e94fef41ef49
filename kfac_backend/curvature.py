"""`kronecker_factors`: compute factors by a pass over data.

`CurvaturePass` does the same for single batches. Both use a `Driver` to run the model, and
`FactorSums` to sum.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.engine.driver import Driver
from kfac_backend.engine.factor_sums import FactorSums, assemble_blocks, check_memory
from kfac_backend.engine.proof import Proof
from kfac_backend.engine.rule_assignment import assign_rules
from kfac_backend.likelihoods import Likelihood
from kfac_backend.options import CurvatureOptions, KfacApprox
from kfac_backend.ranks import ProcessGroupOption


@torch.inference_mode(False)  # gradients are needed in any mode of the caller
def kronecker_factors(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood | str,
    options: CurvatureOptions = CurvatureOptions(kfac_approx="expand"),  # noqa: B008
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
    process_group: ProcessGroupOption = "default",
    **keywords: Any,
) -> KroneckerFactors:
    """Return the Kronecker-factored GGN (K-FAC) of a model on data, B ⊗ A per parameter tensor.

    Expand is exact for deep linear networks, Gaussian likelihood and one loss term per position.
    Reduce is exact for them if positions are summed or averaged into one output per example.
    Source: Eschenhagen et al. 2023 (arXiv:2311.00636), sections 3.2 and 3.3.

    The model runs in its present mode (train or eval), and active dropout stays active. The model
    must not be used by another thread during the pass.

    Before the pass, up to eight examples of the first batch run a few times through the model (the
    whole batch, if the model does not accept a smaller one). This proves that the hooks capture all
    uses of the parameters and that these examples do not mix. If the first batch has one example, a
    part of the proof waits for the first larger batch.

    Args:
        model: any model of the supported layers (`kfac_backend.layers`); a layer may run several
            times, and layers may share a tensor. Parameters with ``requires_grad=False`` have no
            block and cost nothing. The model's parameters, their flags and its mode are not
            changed.
        data: batches (x, y), or mappings with targets under ``dict_key_y``. The model gets a
            mapping whole, or its entries by name if its forward has these names. Batches are moved
            to the model's device. The first axis is the examples; batches may differ in size.
        likelihood: "classification": logits (N, ..., C), labels (N, ...) in 0..C-1. "regression":
            outputs and targets (N, ..., C), noise 1. "bernoulli": C independent logits, targets in
            [0, 1]. Or another of `kfac_backend.likelihoods`.
        options: all options of the pass: mode, Fisher, targets that count; see `CurvatureOptions`.
        generator: random numbers for fisher="mc" or "random_signs", on the model's device.
        progress: whether to show a progress bar over the batches.
        process_group: the ranks of `torch.distributed`. Each rank has a shard of the data and must
            call this function. One rank, the owner, stores each block of all the data;
            `KroneckerFactors.gathered` brings all blocks to all ranks. Shards may differ in size,
            or be empty, but must not overlap (``DistributedSampler`` repeats examples if the ranks
            do not divide their number). None uses this process alone. All ranks that share a model
            under `torch.distributed.fsdp.fully_shard` must pass together.
        keywords: single options that override fields of ``options``: ``kfac_approx="reduce"``.

    If a Fisher draws, each rank draws different numbers, from the generator's state and its rank.
    If all ranks have the same seed, the same seed and number of ranks give the same factors.

    The factors are the sum over the given batches. If the number of positions R depends on a
    batch's padding, the factors depend on it, too. A mask, or `counted_positions`, gives each
    example its own R.

    On a CPU convolutions run in channels_last, which changes only rounding.

    Raises:
        ValueError: there is no data or no trainable parameter; targets do not fit; the model's own
            loss differs from the likelihood's; outputs contain NaN or infinity (the error also
            names a parameter or input with NaN or infinity); BatchNorm is in train mode; or an
            option is not supported.
        TypeError: inputs are not floating point, outputs are not a tensor, labels are not integers,
            or batches are neither (x, y) nor a mapping.
        KeyError: a mapping has no ``dict_key_y``.
        NotImplementedError: a parameter has no rule, or an unsupported use.
        torch.OutOfMemoryError: a batch is too large; or, before the first batch, the factors do not
            fit for any batch size.
        RankError: another rank has another model or other options.
    """
    curvature = CurvaturePass(
        model, likelihood, options, generator=generator, process_group=process_group, **keywords
    )
    curvature.driver.add_all(data, "Curvature", progress)
    return curvature.factors()


class CurvaturePass:
    """Compute factors from single batches; the parameters must not change between them.

    The object can be used again for the same model, without another proof. It has the arguments of
    `kronecker_factors`.

    Raises:
        ValueError: options do not fit the likelihood, the device or the model's layers.
        NotImplementedError: a layer has no rule.
        torch.OutOfMemoryError: the factors do not fit the device.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        options: CurvatureOptions = CurvatureOptions(kfac_approx="expand"),  # noqa: B008
        *,
        generator: torch.Generator | None = None,
        process_group: ProcessGroupOption = "default",
        **keywords: Any,
    ) -> None:
        options = options.replace(**keywords)
        self.driver = Driver(
            model, likelihood, options, generator=generator, process_group=process_group,
            sink=FactorSums(options),
        )  # fmt: skip
        # Report wrong names of layers, and factors that do not fit, before any data is read.
        check_memory(self.driver.proof.assignment, options, self.driver.device)

    def reset(self) -> None:
        """Discard the batches so far, and any failure; the proof stays valid."""
        self.driver.start()

    def add(self, x: Any, y: Any) -> None:
        """Add one batch; see `Driver.add`."""
        self.driver.add(x, y)

    def factors_of(
        self,
        data: Iterable[Any],
        progress: bool = False,
        likelihood: Likelihood | None = None,
        *,
        kfac_approx: KfacApprox | None = None,
        fisher: str | None = None,
        mc_samples: int | None = None,
        repeat_proof: bool = True,
    ) -> KroneckerFactors:
        """Return the factors of data at the model's present parameters; see `kronecker_factors`.

        A later pass proves again, on two examples, only facts that other values of the parameters
        can change, if the model's structure is unchanged. Without ``repeat_proof`` it proves
        nothing. This is for passes whose numbers a later pass with a proof replaces. ``likelihood``
        is the same likelihood with other options, such as noises. The options ``kfac_approx``,
        ``fisher`` and ``mc_samples`` select another matrix, for which the same proof holds. All of
        these apply from now on.
        """
        driver = self.driver
        if likelihood is not None:
            driver.task.likelihood = likelihood
        matrix = {"kfac_approx": kfac_approx, "fisher": fisher, "mc_samples": mc_samples}
        changes = {name: value for name, value in matrix.items() if value is not None}
        if changes:
            driver.options = driver.options.replace(**changes)
            driver.fisher = driver.options.make_fisher()
        stays = not repeat_proof and driver.proof.is_of_this_structure()
        if not stays and not driver.proof.renew():
            assignment = assign_rules(driver.model, driver.options.unsupported)
            driver.proof = Proof(driver.model, assignment)
        driver.kfac_approx = driver.options.kfac_approx
        driver.start()
        driver.add_all(data, "Curvature", progress)
        return self.factors()

    def factors(self) -> KroneckerFactors:
        """Return the factors of all batches: A is a mean over its terms, B a sum over the data.

        The sums become the factors in place, and the next batch starts another pass.
        """
        driver = self.driver
        # Sum over ranks first: means and scalings of single shards would weight them by their
        # sizes. Until then A is a sum over terms, too, so all sums of all ranks and batches add up.
        sums = driver.finish(by_owners=True)
        if not sums.num_data:
            raise ValueError(
                "The data is empty: no batch was added since the start or since the last call of "
                "factors(). Likely causes: an empty data set, drop_last=True with fewer examples "
                "than a batch, or a generator that was already read."
            )
        blocks = assemble_blocks(driver.model, sums)
        return KroneckerFactors(
            blocks,
            num_data=sums.num_data,
            num_outputs=sums.num_outputs,
            num_loss_terms=sums.num_loss_terms,
            loss=sums.loss,
            likelihood=driver.task.likelihood,
            options=driver.options.replace(kfac_approx=sums.kfac_approx),
        )
