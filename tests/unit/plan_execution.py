"""Symbolic execution of step plans: a state is the tuple of tokens it has seen. Imports nothing of the planner."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from tree_oracle import Trie


def states_after(call, external_states, token_Y, chunk):
    """Run the packed sequences on token tuples; return the exported states and check what each row has seen."""
    cu, ptr = call["cu_seqlens_Q1"], call["round_ptr_R1"]
    pool = list(external_states) + [None] * len(call["export_sequence_E"])
    seen = {}
    for lo, hi in pairwise(ptr):
        made = {}
        for q in range(lo, hi):
            state = pool[call["init_state_Q"][q]] if call["init_state_Q"][q] >= 0 else ()
            assert state is not None, "a state is read before it is made"
            for i, row in enumerate(call["packed_row_P"][cu[q] : cu[q + 1]]):
                state = (*state, int(token_Y[row]))
                if i >= call["replay_Q"][q]:
                    seen[int(row)] = state
                if (i + 1) % chunk == 0 or i + 1 == cu[q + 1] - cu[q]:
                    for e in np.flatnonzero(call["export_sequence_E"] == q):
                        if -(-(i + 1) // chunk) == call["export_boundary_E"][e]:
                            made[len(external_states) + e] = state
        for e, state in made.items():
            pool[e] = state
    return pool[len(external_states) :], seen


def execute(plan, sequences):
    """Run every producer, then its consumers: each row must have seen exactly its own path."""
    made = {}
    for producer in plan.producers():
        call = producer.call.arrays()
        exported, seen = states_after(call, [], call["token_T"], plan.chunk_size)
        made[producer.window * plan.dp_degree + producer.replica] = (call, exported)
        rows_of_positions(call, seen, [sequences[x][:n] for x, n in zip(producer.trajectory_N, producer.prefix_N)], 0)
    for consumer in plan.consumers():
        (call,) = (layout.arrays() for layout in consumer.calls)
        states, external = [], np.zeros(0, np.int64)
        if consumer.producer >= 0:
            source, exported = made[consumer.producer]
            states = [exported[e] for e in consumer.export_E.tolist()]
            external = source["token_T"][consumer.external_row_X.numpy()]
        token_Y = np.concatenate([external, call["token_T"]])
        _, seen = states_after(call, states, token_Y, plan.chunk_size)
        members = [sequences[x] for x in consumer.trajectory_N.tolist()]
        rows_of_positions(call, seen, members, external.size)
        against_trie(call, members, consumer, external.size)


def rows_of_positions(call, seen, sequences, num_external):
    bound = call["position_offset_N1"]
    for n, sequence in enumerate(sequences):
        for i, row in enumerate(call["row_of_position_S"][bound[n] : bound[n + 1]].tolist()):
            if row >= num_external:
                assert seen[row] == tuple(map(int, sequence[: i + 1]))
                taps = [r for r in call["conv_tap_TW"][row - num_external] if r >= 0]
                path = call["row_of_position_S"][bound[n] : bound[n + 1]]
                assert taps == path[max(0, i + 1 - len(taps)) : i + 1].tolist()
                assert len(taps) == min(i + 1, call["conv_tap_TW"].shape[1])


def against_trie(call, members, consumer, num_external):
    trie = Trie(members)
    node_Y = np.zeros(num_external + call["token_T"].size, np.int64)
    node_Y[call["row_of_position_S"]] = [node for path in trie.path for node in path]
    assert len(np.unique(node_Y)) == len(trie) == node_Y.size
    through = [trie.through[node] for node in node_Y]
    assert consumer.multiplicity_X.tolist() + call["multiplicity_T"].tolist() == through
    tin, tout = call["tin_Y"], call["tout_Y"]
    ancestors = {node: set(path[: i + 1]) for path in trie.path for i, node in enumerate(path)}
    for q, node in enumerate(node_Y.tolist()):
        assert set(node_Y[(tin <= tin[q]) & (tin[q] < tout)].tolist()) == ancestors[node]
