"""K-FAC-expand and K-FAC-reduce: from a layer's inputs and output gradients to its block B ⊗ A.

The rest of this package computes these numbers faster. Fast methods are tested against this file,
and this file against explicit loops.

The setting. A layer applies one weight W (d_out, d_in) at R positions of each of N examples: the
pixels of an image, the tokens of a sequence, the nodes of a graph; R = 1 for a plain linear layer.
Two arrays describe it:

- ``a`` (N, R, d_in): its inputs. For a convolution these are patches, d_in = channels × kernel.
- ``b`` (V, N, R, d_out): gradients with respect to its outputs, for V vectors v with Σ_v v vᵀ = Λ.
  Λ (C, C) is the Hessian of the loss in the network's outputs. The backward pass of a column v of
  its root gives b = (∂f/∂s)ᵀ v, so that Σ_v b bᵀ is the paper's b Λ bᵀ. If examples have a loss
  term for each position, every term has its own vectors.

The block of W is a block of the generalised Gauss-Newton matrix Σ_n Jᵀ Λ J (the paper's eq. 4), a
sum over the data. W is flattened row by row, as in PyTorch, which gives B ⊗ A with B first. (The
paper flattens columns, which gives A ⊗ B.) An example's gradient is Σ_r b_nr a_nrᵀ. Its outer
product is not a Kronecker product; the two modes approximate it differently by one:

- **expand** treats each position as a separate example: it drops terms with r ≠ r'. It is exact for
  deep linear networks and a Gaussian likelihood, if there is a loss term for each position. The
  paper's appendix has another scaling, R times this block, for networks that mix positions.
- **reduce** first takes the mean of the inputs and the sum of the gradients. It is exact for deep
  linear networks and a Gaussian likelihood, if the network sums or averages the positions.

A is a mean and B a sum, so the product is a sum over the data. A bias, which is added at each
position, has the block B alone; it has the mode of its layer.

Source: Eschenhagen et al. 2023, "Kronecker-Factored Approximate Curvature for Modern Neural Network
Architectures" (arXiv:2311.00636), sections 3.2 and 3.3.
"""

from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor


def expand_factors(
    a: Float[Tensor, "N R d_in"],
    b: Float[Tensor, "V N R d_out"],
    scaling: Literal["positions", "examples"] = "positions",
) -> tuple[Float[Tensor, "d_out d_out"], Float[Tensor, "d_in d_in"]]:
    """B = Σ_v Σ_n Σ_r b_vnr b_vnrᵀ and A = 1/(N R) Σ_n Σ_r a_nr a_nrᵀ (the paper's eq. 7).

    With the scaling "examples" A = 1/N Σ_n Σ_r a_nr a_nrᵀ (the paper's appendix on expand).
    """
    N, R, _ = a.shape
    return gram(b), gram(a) / (N * R if scaling == "positions" else N)


def reduce_factors(
    a: Float[Tensor, "N R d_in"], b: Float[Tensor, "V N R d_out"]
) -> tuple[Float[Tensor, "d_out d_out"], Float[Tensor, "d_in d_in"]]:
    """B = Σ_v Σ_n b̂_vn b̂_vnᵀ and A = 1/N Σ_n â_n â_nᵀ (the paper's eq. 10).

    With the mean over positions â_n = 1/R Σ_r a_nr and the sum b̂_vn = Σ_r b_vnr.
    """
    return gram(b.sum(-2)), gram(a.mean(-2)) / len(a)


def reduce_factors_of_graphs(
    a: Float[Tensor, "M d_in"],
    b: Float[Tensor, "V M d_out"],
    graph: Int[Tensor, "M"],
    num_graphs: int,
) -> tuple[Float[Tensor, "d_out d_out"], Float[Tensor, "d_in d_in"]]:
    """Reduce where example n has R_n positions: both sums are divided by √R_n.

    Dividing only the sum of inputs, by R_n, would weight the examples in A and not those in B (the
    paper's appendix on K-FAC-reduce for GraphNetworks). Expand needs no separate formula: all M
    positions are examples, ``expand_factors(a[None], b[:, None])``.

    Args:
        a: inputs at all nodes or edges, with the graphs concatenated.
        b: gradients with respect to the outputs there.
        graph: the graph of each position, 0..N-1; -1 for a position that does not count.
        num_graphs: N, including graphs without a position.
    """
    counted = graph >= 0
    a, b, graph = a[counted], b[:, counted], graph[counted]
    roots = graph.bincount(minlength=num_graphs).clamp(min=1).to(a.dtype).sqrt()[:, None]
    of_inputs = a.new_zeros(num_graphs, a.shape[-1]).index_add(0, graph, a) / roots
    of_gradients = b.new_zeros(len(b), num_graphs, b.shape[-1]).index_add(1, graph, b) / roots
    return gram(of_gradients), gram(of_inputs) / num_graphs


def layer_factors(
    a: Float[Tensor, "N R d_in"], b: Float[Tensor, "V N R d_out"], mode: Literal["expand", "reduce"]
) -> tuple[Float[Tensor, "d_out d_out"], Float[Tensor, "d_in d_in"]]:
    """B and A in either mode."""
    return expand_factors(a, b) if mode == "expand" else reduce_factors(a, b)


def gram(x: Float[Tensor, "*rows d"]) -> Float[Tensor, "d d"]:
    """Σ x xᵀ over all rows."""
    rows = x.flatten(0, -2)
    return rows.mT @ rows
