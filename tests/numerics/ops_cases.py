"""Small trees with hand-built packed layouts, and naive float64 oracles that walk them token by token.

Independent of harts_titan.tree on purpose: the ops are tested against their own contract. The rounds are legal but not
minimal: the first child continues its parent's sequence, every other child starts from its anchor's state.
"""

import random

import torch

from harts_titan.ops.attention import TreeMask
from harts_titan.ops.kda import PackedSequences


class TreeCase:
    """A forest of (parent, length) segments, laid out round after round."""

    def __init__(self, segments, chunk_size):
        self.segments, self.chunk_size = segments, chunk_size
        self.start, self.end, self.children = [], [], [[] for _ in segments]
        for v, (p, length) in enumerate(segments):
            self.start.append(self.end[p] if p >= 0 else 0)
            self.end.append(self.start[v] + length)
            if p >= 0:
                self.children[p].append(v)
        self._pack()
        self.seg_row, self.num_rows = [0] * len(segments), 0
        for s in self.sequences:
            for v in s["segments"]:
                self.seg_row[v] = self.num_rows
                self.num_rows += segments[v][1]
        self.leaves = [v for v in range(len(segments)) if not self.children[v]]

    def _pack(self):
        size, host_of, sequences = self.chunk_size, {}, []
        todo = [v for v, (p, _) in enumerate(self.segments) if p < 0]
        while todo:
            v = todo.pop(0)
            anchor, source, rnd = self.start[v] // size * size, None, 0
            if anchor:
                u = self.segments[v][0]
                while self.start[u] >= anchor:
                    u = self.segments[u][0]
                host = host_of[u]
                source, rnd = (host, (anchor - host["start"]) // size), host["round"] + 1
            sequence = {"start": anchor, "source": source, "round": rnd, "segments": []}
            sequences.append(sequence)
            while True:
                sequence["segments"].append(v)
                host_of[v] = sequence
                if not self.children[v]:
                    break
                todo += self.children[v][1:]
                v = self.children[v][0]
        self.sequences = sorted(sequences, key=lambda s: s["round"])

    def path_segments(self, v):
        path = []
        while v >= 0:
            path.append(v)
            v = self.segments[v][0]
        return path[::-1]

    def rows(self, v):
        """Rows of the path from the root to the end of segment v."""
        return torch.cat(
            [torch.arange(self.seg_row[u], self.seg_row[u] + self.segments[u][1]) for u in self.path_segments(v)]
        )

    def own(self, v):
        return torch.arange(self.seg_row[v], self.seg_row[v] + self.segments[v][1])

    def parent(self):
        parent = torch.full((self.num_rows,), -1)
        for v in range(len(self.segments)):
            rows = self.rows(v)
            parent[rows[1:]] = rows[:-1]
        return parent

    def taps(self, num_taps):
        return taps_of(self.parent(), num_taps)

    def intervals(self):
        """Depth-first tin and tout of every row."""
        tin, tout, clock = torch.zeros(self.num_rows, dtype=torch.long), torch.zeros(self.num_rows, dtype=torch.long), 0

        def visit(v):
            nonlocal clock
            rows = self.own(v)
            tin[rows] = torch.arange(clock, clock + len(rows))
            clock += len(rows)
            for u in self.children[v]:
                visit(u)
            tout[rows] = clock

        for v, (p, _) in enumerate(self.segments):
            if p < 0:
                visit(v)
        return tin, tout

    def mask(self):
        tin, tout = self.intervals()
        return TreeMask.build(
            tin=tin,
            tout=tout,
            seg_parent=[p for p, _ in self.segments],
            seg_start=self.start,
            seg_length=[length for _, length in self.segments],
            seg_row=self.seg_row,
        )

    def compact(self):
        index = {id(s): i for i, s in enumerate(self.sequences)}
        exports, packed, kept, cu, init = {}, [], [], [0], []
        for s in self.sequences:
            rows = self.rows(s["segments"][-1])[s["start"] :]
            replay = self.start[s["segments"][0]] - s["start"]
            kept += range(cu[-1] + replay, cu[-1] + len(rows))
            packed.append(rows)
            cu.append(cu[-1] + len(rows))
            init.append(-1)
            if s["source"] is not None:
                key = (index[id(s["source"][0])], s["source"][1])
                init[-1] = exports.setdefault(key, len(exports))
        rounds = [s["round"] for s in self.sequences]
        return PackedSequences.build(
            chunk_size=self.chunk_size,
            cu_seqlens=cu,
            packed_row=torch.cat(packed),
            kept=kept,
            init_state=init,
            export_sequence=[n for n, _ in exports],
            export_boundary=[c for _, c in exports],
            round_ptr=[sum(r < i for r in rounds) for i in range(max(rounds) + 2)],
            num_path_rows=self.num_rows,
        )

    def nodewise(self):
        """One sequence and one round per segment, chunk grid restarted, final states handed over; needs rows in segment
        order, so returns also the permutation from nodewise rows to this case's rows."""
        lengths = [length for _, length in self.segments]
        cu = torch.tensor([0, *lengths]).cumsum(0)
        parents = [p for p, _ in self.segments]
        rows = torch.cat([self.own(v) for v in range(len(lengths))])
        sequences = PackedSequences.build(
            chunk_size=self.chunk_size,
            cu_seqlens=cu,
            packed_row=range(self.num_rows),
            kept=range(self.num_rows),
            init_state=parents,
            export_sequence=range(len(lengths)),
            export_boundary=[-(-n // self.chunk_size) for n in lengths],
            round_ptr=range(len(lengths) + 1),
            num_path_rows=self.num_rows,
        )
        return sequences, rows


def taps_of(parent, num_taps):
    taps = torch.full((parent.numel(), num_taps), -1)
    current = torch.arange(parent.numel())
    for j in reversed(range(num_taps)):
        taps[:, j] = current
        current = torch.where(current >= 0, parent[current.clamp(min=0)], -1)
    return taps


def packed(lengths, chunk_size, exports=(), init=None, num_external_states=0):
    """Independent sequences of the given lengths in one round; exports: (sequence, boundary) pairs."""
    total = sum(lengths)
    return PackedSequences.build(
        chunk_size=chunk_size,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        packed_row=range(total),
        kept=range(total),
        init_state=init or [-1] * len(lengths),
        export_sequence=[n for n, _ in exports],
        export_boundary=[c for _, c in exports],
        round_ptr=[0, len(lengths)],
        num_external_states=num_external_states,
        num_path_rows=total,
    )


def random_segments(rng, chunk_size, num_segments):
    """Forks anywhere, on the chunk grid, and after one or two tokens; at times several roots."""
    segments = [(-1, rng.randint(1, 3 * chunk_size))]
    end = [segments[0][1]]
    for v in range(1, num_segments):
        parent = -1 if rng.random() < 0.1 else rng.randrange(v)
        start = end[parent] if parent >= 0 else 0
        length = rng.choice([1, 2, rng.randint(1, chunk_size), rng.randint(1, 3 * chunk_size)])
        if rng.random() < 0.3:
            length += -(start + length) % chunk_size
        segments.append((parent, length))
        end.append(start + length)
    return segments


def random_case(seed, chunk_size, num_segments=9):
    return TreeCase(random_segments(random.Random(seed), chunk_size, num_segments), chunk_size)


def kda_inputs(num_rows, *, heads=2, key=6, value=5, seed=0, dtype=torch.float64, gate=-6.2, slope=0.3):
    """q, k, v, f, b, A_log, dt_bias; gate -6.2 decays by exp(-0.01) a token, so errors of old states stay visible."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = (
        randn(num_rows, heads, key),
        randn(num_rows, heads, key),
        randn(num_rows, heads, value),
        randn(num_rows, heads, key),
        randn(num_rows, heads),
        slope * randn(heads),
        slope * randn(heads, key) + gate,
    )
    return [t.to(dtype) for t in tensors]


def oracle_kda(q, k, v, f, b, A_log, dt_bias, parent, *, lower_bound=-5.0, initial=None):
    """KDA by token in float64 along parent pointers; returns outputs by row and the state after every row.

    ``initial``: state in front of rows whose parent is -1; default zero.
    """
    q, k, v, f, b, A_log, dt_bias = (x.double() for x in (q, k, v, f, b, A_log, dt_bias))
    states, outputs = [None] * len(parent), [None] * len(parent)
    # Rows in any order, parents first along every path.
    depth_first, todo = [], [r for r, p in enumerate(parent) if p < 0]
    children = [[] for _ in parent]
    for r, p in enumerate(parent):
        if p >= 0:
            children[p].append(r)
    while todo:
        r = todo.pop()
        depth_first.append(r)
        todo += children[r]
    for r in depth_first:
        if parent[r] >= 0:
            state = states[parent[r]]
        elif initial is not None:
            state = initial.double()
        else:
            state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        query = q[r] / (q[r].pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / q.shape[2] ** 0.5
        key = k[r] / (k[r].pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        gate = lower_bound / (1 + torch.exp(-A_log.exp()[:, None] * (f[r] + dt_bias)))
        beta = 1 / (1 + torch.exp(-b[r]))
        state = gate.exp()[:, :, None] * state
        error = v[r] - (key[:, :, None] * state).sum(1)
        state = state + beta[:, None, None] * key[:, :, None] * error[:, None, :]
        states[r], outputs[r] = state, (query[:, :, None] * state).sum(1)
    return torch.stack(outputs), states


def exported_oracle(sequences, states):
    """The oracle's values of every export: the state after the packed row in front of the boundary."""
    values = []
    for n, c in zip(sequences.export_sequence_host, sequences.export_boundary_host):
        begin, end = sequences.cu_seqlens_host[n : n + 2]
        last = min(begin + c * sequences.chunk_size, end) - 1
        values.append(states[int(sequences.packed_row_P[last])])
    return torch.stack(values)


def relative(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
