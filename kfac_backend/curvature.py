"""`kronecker_factors`: a pass over data, batches in, factors out.

`CurvaturePass` is the same for batches that come one by one. Both let a `Driver` run the model, and
sum up what it sees in `FactorSums`.
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


@torch.inference_mode(False)  # gradients are needed, whatever the caller needs
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
    """Kronecker-factored GGN (K-FAC) of a model on data, B ⊗ A per parameter tensor.

    Expand is exact for deep linear networks, Gaussian likelihood and one loss term per position;
    reduce where positions are summed or averaged into one output per example. Source: Eschenhagen
    et al. 2023 (arXiv:2311.00636), sections 3.2 and 3.3.

    The model runs in the mode (train or eval) it is in; dropout that is on stays on. No other
    thread may use the model meanwhile.

    Before the pass, up to eight examples of the first batch run a few times through the model (the
    whole batch, if the model takes no smaller one). They prove that the hooks see all uses of the
    parameters and that no examples mix. (If the first batch has one example, a part of the proof
    waits for the first batch of several.)

    Args:
        model: any model of the supported layers (`kfac_backend.layers`); a layer may run several
            times, and layers may share a tensor. Parameters with ``requires_grad=False`` have no
            block and cost nothing. Its parameters, their flags and its mode are not changed.
        data: batches (x, y), or mappings with targets under ``dict_key_y``, which go to the model
            whole, or by their entries' names if its forward has those; they are moved to the
            model's device. Examples come first; batches may differ in size.
        likelihood: "classification": logits (N, ..., C), labels (N, ...) in 0..C-1. "regression":
            outputs and targets (N, ..., C), noise 1. "bernoulli": C independent logits, targets in
            [0, 1]. Or another of `kfac_backend.likelihoods`.
        options: all choices of the pass: mode, Fisher, which targets count; see `CurvatureOptions`.
        generator: source of what fisher="mc" or "random_signs" draws, on the model's device.
        progress: whether to show a progress bar over the batches.
        process_group: the ranks of `torch.distributed` that have a shard of the data each. Every
            rank must call this function. Each block of all the data is kept by one of them, its
            owner; `KroneckerFactors.gathered` brings all to all ranks. Shards may differ in size,
            or be empty, but must not overlap (``DistributedSampler`` repeats examples where the
            ranks do not divide their number). None: this process alone. Over a model under
            `torch.distributed.fsdp.fully_shard` all ranks that share it pass together.
        keywords: single options, in place of those of ``options``: ``kfac_approx="reduce"``.

    Where a Fisher draws, each rank has draws of its own, from the generator's state and its rank.
    If all ranks have the same seed, the same seed and number of ranks give the same factors.

    The factors are the sum over the batches as they are given. Where the
    number of positions R depends on a batch's padding, so do the factors: a mask, or
    `counted_positions`, makes R each example's own.

    On a CPU convolutions run in channels_last, which changes only rounding.

    Raises:
        ValueError: no data, no trainable parameter, targets that do not fit, a model whose own loss
            differs from ours, NaN or infinity in outputs (it names the parameter or the inputs that
            have it, too), BatchNorm in train mode, an option that is not supported.
        TypeError: inputs that are not of floating point, outputs that are not a tensor, labels
            that are not integers, batches that are neither (x, y) nor a mapping.
        KeyError: a mapping without ``dict_key_y``.
        NotImplementedError: a parameter without a rule, or used in a way that cannot be followed.
        torch.OutOfMemoryError: a batch that is too large; factors that do not fit whatever the
            batch size, before the first batch.
        RankError: another rank has another model or other options.
    """
    curvature = CurvaturePass(
        model, likelihood, options, generator=generator, process_group=process_group, **keywords
    )
    curvature.driver.add_all(data, "Curvature", progress)
    return curvature.factors()


class CurvaturePass:
    """Factors of batches that come one by one; the parameters must not change between them.

    It can be used again for the same model, without another proof. Arguments are those of
    `kronecker_factors`.

    Raises:
        ValueError: options that are not for the likelihood, the device or the model's layers.
        NotImplementedError: a layer without a rule.
        torch.OutOfMemoryError: factors that the device cannot hold.
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
        # Wrong names of layers and factors that cannot fit are reported before any data is read.
        check_memory(self.driver.proof.assignment, options, self.driver.device)

    def reset(self) -> None:
        """Forget the batches seen so far, and any failure; what is proved stays proved."""
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
        """The factors of some data at the model's present parameters; see `kronecker_factors`.

        A pass that is used again proves again, on two examples, only what other values of the
        parameters can change, as long as the model's structure is the same. Without
        ``repeat_proof`` it proves nothing then, for passes whose numbers a later one replaces that
        proves all. ``likelihood`` is the same with other options, such as noises; the options
        ``kfac_approx``, ``fisher`` and ``mc_samples`` say that another matrix is computed, of which
        the same proof holds. All of these hold from now on.
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
        """The factors of all batches: A is a mean over its terms, B a sum over the data.

        The sums become the factors in place, and the next batch begins another pass.
        """
        driver = self.driver
        # Over ranks first: means and scalings of single shards would weigh them by their sizes.
        # Until then A is a sum over terms, too, and all sums of all ranks and batches just add.
        sums = driver.finish(by_owners=True)
        if not sums.num_data:
            raise ValueError(
                "The data is empty: no batch was added since the pass began, or since the last "
                "factors()."
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
