"""(I + A)⁻¹ of many small matrices, in fp32 and in batched products alone.

`torch.linalg.solve_triangular` would do, but on a CPU it opens a parallel region for each matrix: 2048 matrices took
9 s on two contended cores, and take 0.1 s this way.  The error of outputs and states is the same (measured to 2048
tokens with random, correlated and nearly equal keys, beta in [0, 1], in [0, 2] and 2).
"""

from __future__ import annotations

import torch


def unit_lower_inverse(a: torch.Tensor) -> torch.Tensor:
    """(I + L)⁻¹ [P, n, n] for L, the part of a [P, n, n] strictly below its diagonal; n is a power of two.

    By doubling: diagonal blocks of twice the size are [[T1, 0], [−T2 L21 T1, T2]].
    """
    size, block = a.shape[-1], 1
    t = torch.eye(size, dtype=a.dtype, device=a.device).repeat(a.shape[0], 1, 1)
    while block < size:
        a_blocks, t_blocks = _diagonal_blocks(a, 2 * block), _diagonal_blocks(t, 2 * block)
        lower, upper = slice(block, None), slice(None, block)
        product = _matmul(a_blocks[..., lower, upper], t_blocks[..., upper, upper])
        t_blocks[..., lower, upper] = -_matmul(t_blocks[..., lower, lower], product)
        block *= 2
    return t


def _diagonal_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """A view [P, n / size, size, size] of the blocks on the diagonal of x [P, n, n]."""
    n = x.shape[-1] // size
    return x.view(-1, n, size, n, size).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:])).view(a.shape)
