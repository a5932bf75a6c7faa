"""Operations that torch counts on the CPU path, and what its counter and that path add or leave out."""

from __future__ import annotations

from ling_cases import CHUNK, build
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.models.ling import LingArgs
from harts_titan.models.ling.cost import row_operations
from harts_titan.models.ling.flops import CallWork
from harts_titan.ops.attention.reference import QUERY_TILE
from harts_titan.ops.kda.reference import GROUP_ROWS
from harts_titan.tree import CallLayout


def counted(args: LingArgs, layouts: tuple[CallLayout, ...], *, recompute: bool) -> tuple[int, int]:
    """Operations that torch sees in forward and backward of the calls on the CPU path."""
    model = build(args)
    model.recompute_layers = recompute
    total = [0, 0]
    for layout in layouts:
        # The path computes no padding that the formula lacks: whole chunks, in whole groups of chunks.
        length_Q = layout.cu_seqlens_Q1.diff()
        assert not (length_Q % CHUNK).any() and length_Q.sum() % GROUP_ROWS == 0
        inputs = TreeInputs.from_layout(layout)
        # Early stopping would leave out a layer's last product, whose result the backward pass does not need.
        with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as forward:
            output = model(inputs)
        with FlopCounterMode(display=False) as backward:
            output.logprob_S.sum().backward()
        total[0] += forward.get_total_flops()
        total[1] += backward.get_total_flops()
    return total[0], total[1]


def unseen(args: LingArgs, work: CallWork, *, recompute: bool) -> tuple[int, int]:
    """What the counter cannot see less what the CPU path does twice, in forward and backward."""
    one = row_operations(args, chunk_size=CHUNK)
    heads = args.n_heads * sum(not args.is_mla(layer) for layer in range(args.n_layers))
    width = args.kda_head_dim
    # Triangular solves of a chunk: [W | U] has two heads' width; in backward they are solved again and transposed.
    solve = 4 * CHUNK * width * heads
    # The state scan runs apart from the outputs: W S and the update of S' twice; in backward two products with dO.
    scan = 4 * width**2 * heads
    scan_backward = (2 * CHUNK * width + 2 * width**2) * heads
    # The counter knows no elementwise products: the convolution's are counted by hand. Nor does it know addmm in place,
    # which adds up the head's weight gradient.
    forward = one.convolution * work.rows + (solve - scan) * work.packed_rows
    backward = 2 * one.convolution * work.rows + (2 * solve - scan_backward) * work.packed_rows
    return forward, backward + one.head * work.head_rows + recompute * forward


def tile_pairs(layouts: tuple[CallLayout, ...]) -> int:
    """Pairs that the CPU path reads for the causal ones: whole query tiles, keys up to the end of the tile."""
    total = 0
    for layout in layouts:
        for start, length in zip(layout.seg_start_V.tolist(), layout.seg_length_V.tolist()):
            first = start // QUERY_TILE * QUERY_TILE
            total += sum(QUERY_TILE * (tile + QUERY_TILE) for tile in range(first, start + length, QUERY_TILE))
    return total
