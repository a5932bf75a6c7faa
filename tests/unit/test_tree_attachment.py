"""Layouts of consumers whose ancestors live in a producer: external rows, attach points, handed-over states."""

import numpy as np
import pytest
from tree_oracle import Trie, flat, random_sequences

from harts_titan.tree import Attachment, CallLayout, ExternalRows, Forest, build_layout, check_call, plan_forest_rounds


def build(forest, attachment, sequences, *, chunk, mode="compact"):
    tokens, offsets = flat(sequences)
    rounds = plan_forest_rounds(forest, chunk_size=chunk, mode=mode)
    arrays = build_layout(
        forest,
        rounds,
        tokens,
        offsets,
        np.arange(len(sequences)),
        chunk_size=chunk,
        restart_chunks=mode != "compact",
        attachment=attachment,
    )
    layout = CallLayout.from_arrays(arrays, chunk_size=chunk, num_external_states=len(attachment.state_row_E))
    return layout, tokens, offsets


def prove(layout, tokens, offsets, attachment, token_X, mode="compact"):
    external = ExternalRows(token_X, attachment.parent_X, attachment.position_X, attachment.state_row_E)
    check_call(layout.arrays(), tokens, offsets, chunk_size=layout.chunk_size, mode=mode, external=external)


def hand_made():
    # Producer rows 0-6 = tokens 1..7; rows 7, 8 = the branch 9 9 behind token 4 (row 3). Chunk 4.
    token_X = np.array([1, 2, 3, 4, 5, 6, 7, 9, 9])
    parent_X = np.array([-1, 0, 1, 2, 3, 4, 5, 3, 7])
    position_X = np.array([0, 1, 2, 3, 4, 5, 6, 4, 5])
    sequences = [
        [1, 2, 3, 4, 5, 6, 7, 10, 11],  # attaches at row 6, position 7: replays rows 4..6
        [1, 2, 3, 4, 5, 6, 7, 12],  # the same attach point
        [1, 2, 3, 4, 9, 9, 13, 13, 13, 14],  # attaches at row 8 and forks at position 9
        [1, 2, 3, 4, 9, 9, 13, 13, 13, 15],
        [1, 2, 3, 4, 16],  # attaches at row 3 on the chunk boundary: no replay
        [1, 2, 17],  # attaches inside the first chunk: zero state
        [1, 2, 3],  # wholly in the producer
        [20, 21],  # a root of its own
    ]
    forest = Forest(
        parent_V=np.array([-1, 0, 0, -1, -1, -1, -1, -1]),
        start_V=np.array([6, 9, 9, 7, 7, 4, 2, 0]),
        length_V=np.array([3, 1, 1, 2, 1, 1, 1, 2]),
        source_V=np.array([2, 2, 3, 0, 1, 4, 5, 7]),
        depth_V=np.array([0, 1, 1, 0, 0, 0, 0, 0]),
        end_segment_N=np.array([3, 4, 1, 2, 5, 6, -1, 7]),
        end_position_N=np.array([len(s) for s in sequences]),
    )
    attachment = Attachment(
        parent_X=parent_X,
        position_X=position_X,
        state_row_E=np.array([3]),
        attach_row_V=np.array([8, -1, -1, 6, 6, 3, 1, -1]),
        end_row_N=np.array([-1, -1, -1, -1, -1, -1, 2, -1]),
    )
    return forest, attachment, sequences, token_X


def test_hand_made_attachment():
    forest, attachment, sequences, token_X = hand_made()
    layout, tokens, offsets = build(forest, attachment, sequences, chunk=4)
    prove(layout, tokens, offsets, attachment, token_X)
    assert (layout.num_external_rows, layout.num_external_states, layout.num_rows) == (9, 1, 12)
    call = layout.arrays()
    # Round 0: every root. The fork of segment 0 at position 9 starts from the boundary at 8, made in round 0.
    assert layout.num_rounds == 2 and call["round_ptr_R1"].tolist() == [0, 6, 7]
    by_start = dict(zip(call["seg_start_V"][forest.parent_V < 0].tolist(), call["seg_sequence_V"][forest.parent_V < 0]))
    packed = [call["packed_row_P"][lo:hi].tolist() for lo, hi in zip(call["cu_seqlens_Q1"], call["cu_seqlens_Q1"][1:])]
    own = 9 + call["seg_row_V"]
    assert packed[by_start[6]][:2] == [7, 8] and packed[by_start[6]][2:5] == list(range(own[0], own[0] + 3))
    assert [p for p in packed if p[:3] == [4, 5, 6]] == [[4, 5, 6, own[3], own[3] + 1], [4, 5, 6, own[4]]]
    assert packed[by_start[4]] == [own[5]] and packed[by_start[2]] == [0, 1, own[6]]
    init = call["init_state_Q"]
    assert init[by_start[4]] == init[by_start[6]] == init[by_start[7]] == 0 and init[by_start[2]] == -1
    assert init[-1] == 1 and call["export_boundary_E"].tolist() == [1]
    assert call["conv_tap_TW"][call["seg_row_V"][5]].tolist() == [1, 2, 3, own[5]]
    assert call["row_of_position_S"][call["position_offset_N1"][6] :][:3].tolist() == [0, 1, 2]


def test_missing_state_is_refused():
    forest, attachment, sequences, _ = hand_made()
    attachment = Attachment(**{**vars(attachment), "state_row_E": np.array([2])})
    with pytest.raises(ValueError, match="behind producer row 3, whose state is not handed over"):
        build(forest, attachment, sequences, chunk=4)


def test_wrong_hand_over_is_caught():
    forest, attachment, sequences, token_X = hand_made()
    layout, tokens, offsets = build(forest, attachment, sequences, chunk=4)
    wrong = token_X.copy()
    wrong[5] = 8
    with pytest.raises(ValueError, match="row prefix equals trajectory prefix"):
        prove(layout, tokens, offsets, attachment, wrong)
    other = Attachment(**{**vars(attachment), "state_row_E": np.array([4])})
    with pytest.raises(ValueError, match="an anchor is a state of the same path"):
        prove(layout, tokens, offsets, other, token_X)


def test_consumer_wholly_in_the_producer():
    _, attachment, _, token_X = hand_made()
    none = np.zeros(0, np.int64)
    sequences = [[1, 2, 3], [1, 2, 3, 4, 9]]
    forest = Forest(none, none, none, none, none, np.full(2, -1), np.array([3, 5]))
    attachment = Attachment(
        attachment.parent_X, attachment.position_X, attachment.state_row_E, none, end_row_N=np.array([2, 7])
    )
    layout, tokens, offsets = build(forest, attachment, sequences, chunk=4)
    prove(layout, tokens, offsets, attachment, token_X)
    assert (layout.num_rows, layout.num_rounds, layout.num_sequences, layout.num_positions) == (0, 0, 0, 8)


def residual(sequences, trie, in_producer, *, chunk, mode):
    """Cut a trie into producer rows and the consumer's own forest, node by node."""
    parent = np.full(len(trie) + 1, -1)
    position = np.full(len(trie) + 1, -1)
    source = np.zeros(len(trie) + 1, np.int64)
    for n, path in enumerate(trie.path):
        for i, node in enumerate(path):
            parent[node], position[node], source[node] = path[i - 1] if i else -1, i, n
    nodes = [v for v in range(1, len(trie) + 1) if in_producer[v]]
    row = {v: x for x, v in enumerate(nodes)}
    segments, seg_of, attach = [], {}, []
    roots = [v for v in range(1, len(trie) + 1) if not in_producer[v] and (parent[v] < 0 or in_producer[parent[v]])]
    todo = [(v, -1) for v in roots]
    while todo:
        head, above = todo.pop()
        run = [head]
        while len(trie.children[run[-1]]) == 1:
            run.append(next(iter(trie.children[run[-1]].values())))
        for v in run:
            seg_of[v] = len(segments)
        attach.append(row[parent[head]] if above < 0 and parent[head] >= 0 else -1)
        todo += [(child, len(segments)) for child in trie.children[run[-1]].values()]
        segments.append((above, position[head], len(run), source[run[-1]], 0 if above < 0 else segments[above][4] + 1))
    table = np.array(segments, np.int64).reshape(-1, 5).T
    ends = [path[-1] for path in trie.path]
    forest = Forest(
        *table,
        end_segment_N=np.array([seg_of.get(v, -1) for v in ends]),
        end_position_N=np.array([len(path) for path in trie.path]),
    )
    states = set()
    for x in {a for a in attach if a >= 0}:
        path = trie.path[source[nodes[x]]][: position[nodes[x]] + 1]
        handed = len(path) if mode != "compact" else len(path) // chunk * chunk
        if handed:
            states.add(row[path[handed - 1]])
    token = np.array([sequences[source[v]][position[v]] for v in nodes], np.int64)
    attachment = Attachment(
        parent_X=np.array([row.get(parent[v], -1) for v in nodes], np.int64),
        position_X=position[nodes].astype(np.int64),
        state_row_E=np.array(sorted(states), np.int64),
        attach_row_V=np.array(attach, np.int64),
        end_row_N=np.array([row.get(v, -1) for v in ends], np.int64),
    )
    return forest, attachment, token


@pytest.mark.parametrize("mode", ("compact", "nodewise", "depthwise"))
@pytest.mark.parametrize("seed", range(60))
def test_random_producers(seed, mode):
    rng = np.random.default_rng(seed)
    chunk = int(rng.integers(1, 7))
    sequences = random_sequences(rng, int(rng.integers(2, 25)), chunk=chunk)
    trie = Trie(sequences)
    # Shared prefixes up to a drawn depth, or a drawn set closed under ancestors.
    in_producer = np.zeros(len(trie) + 1, bool)
    depth = int(rng.integers(0, 6 * chunk))
    for path in trie.path:
        keep = True
        for i, node in enumerate(path):
            keep = keep and (trie.through[node] > 1 and i < depth if seed % 2 else hash((seed, node)) % 9 > 0)
            in_producer[node] = keep
    if not in_producer.any():
        in_producer[trie.path[0][0]] = True
    forest, attachment, token_X = residual(sequences, trie, in_producer, chunk=chunk, mode=mode)
    layout, tokens, offsets = build(forest, attachment, sequences, chunk=chunk, mode=mode)
    prove(layout, tokens, offsets, attachment, token_X, mode)
    assert layout.num_rows + layout.num_external_rows == len(trie)
