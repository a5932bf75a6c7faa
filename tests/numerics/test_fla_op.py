"""Backend ``fla`` of KDA: numbers under Triton's interpreter and on a GPU, refusals, choice."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harts_titan.job_config import load_config
from harts_titan.models.common.tree_inputs import packed_sequences
from harts_titan.ops import backend
from harts_titan.ops.backend import choose
from harts_titan.ops.kda import PackedSequences, kda, prepare_kda
from tests.numerics import kernel_checks as checks
from tests.numerics.interpreted_run import run_interpreted

pytest.importorskip("triton", reason="needs triton (pip install triton)")
pytest.importorskip("fla", reason="needs fla-core==0.6.0 (pip install 'harts_titan[dev]')")

CASES = (
    "modes",
    "shared_and_external_states",
    "nothing_to_do",
    "chosen_by_name",
    "tables_are_built_once",
    "compiled_layers",
)
FORK = [(-1, 70), (0, 7), (0, 20)]
"""Behind the first chunk: mode compact hands a state over."""


def test_interpreted(tmp_path):
    assert run_interpreted("fla_cases", tmp_path / "report.json") == set(CASES)


def test_states_inside_a_sequence_are_refused():
    from harts_titan.ops.kda.fla_op import prepare_calls

    with pytest.raises(ValueError, match=r"state behind row 64 of the \d+ of .*'compact'.*'nodewise', 'depthwise' or"):
        prepare_calls(packed_sequences(checks.layout_of(FORK, 64)))
    for mode in ("nodewise", "depthwise", "expanded"):
        prepare_calls(packed_sequences(checks.layout_of(FORK, 64, mode)))
    # Without a fork behind the first chunk nothing is handed over.
    prepare_calls(packed_sequences(checks.layout_of([(-1, 60), (0, 7), (0, 20)], 64)))


@pytest.mark.parametrize(
    ("boundary", "length", "refused"), [(0, 1, True), (1, 64, False), (1, 65, True), (2, 65, False)]
)
def test_only_the_boundary_behind_the_last_row_is_given(boundary, length, refused):
    from harts_titan.ops.kda.fla_op import prepare_calls

    sequences = PackedSequences.build(
        chunk_size=64,
        cu_seqlens=[0, length],
        packed_row=range(length),
        kept=range(length),
        init_state=[-1],
        export_sequence=[0],
        export_boundary=[boundary],
        round_ptr=[0, 1],
        num_path_rows=length,
    )
    if not refused:
        assert prepare_calls(sequences).rounds[0].hands_over
        return
    with pytest.raises(ValueError, match="last row only"):
        prepare_calls(sequences)


def test_other_chunks_and_widths_are_refused():
    from harts_titan.ops.kda.fla_op import kda_fla, prepare_calls

    with pytest.raises(ValueError, match=r"chunk_size = 32 must be 64 .*tree.chunk_size"):
        prepare_calls(packed_sequences(checks.layout_of(FORK, 32, "nodewise")))
    sequences = packed_sequences(checks.layout_of([(-1, 3)], 64))
    setting = checks.Setting("cpu", torch.float32, num_heads=1, key_dim=257, value_dim=8)
    with pytest.raises(ValueError, match="K = 257"):
        kda_fla(*checks.kda_inputs(3, setting, "slow", seed=0)[:7], sequences)


def test_a_configuration_with_other_chunks_is_refused():
    config = str(Path(__file__).parents[2] / "train_configs" / "ling_debug.toml")
    with pytest.raises(ValueError, match=r"tree.chunk_size \(16\) must be 64 with ops.kda = 'fla'"):
        load_config(config, ["--ops.kda", "fla"])
    assert load_config(config, ["--ops.kda", "fla", "--tree.chunk_size", "64"]).ops.kda == "fla"


def test_it_runs_on_cuda_in_16_bits_and_never_automatically(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="'fla' of kda cannot run: it needs CUDA"):
        choose("kda", "fla", device="cpu", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="'fla' of kda cannot run: it accepts bfloat16, float16, not float32"):
        choose("kda", "fla", device="cuda", dtype=torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backend, "_has_package", lambda name: name != "fla")
    with pytest.raises(ValueError, match=r"'fla' is not installed \(pip install fla-core==0.6.0\)"):
        choose("kda", "fla", device="cpu", dtype=torch.bfloat16)
    monkeypatch.setattr(backend, "_has_package", lambda name: True)
    assert not any(b.auto_cuda or b.auto_cpu for b in backend._BACKENDS["kda"] if b.name == "fla")


def test_another_version_or_signature_is_refused(monkeypatch):
    import fla

    from harts_titan.ops.kda import fla_op

    with pytest.raises(ImportError, match=r"no parameters \['cu_seqlens_cpu'\]; pip install"):
        fla_op.check_signature(
            lambda q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
            use_beta_sigmoid_in_kernel, safe_gate, lower_bound, cu_seqlens, **kwargs: None
        )  # fmt: skip
    monkeypatch.setattr(fla, "__version__", "0.5.0")
    monkeypatch.delitem(sys.modules, "harts_titan.ops.kda.fla_op")
    backend._import_error.cache_clear()
    try:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(ValueError, match=r"fla-core 0.5.0 is installed, exactly 0.6.0 is needed"):
            choose("kda", "fla", device="cpu", dtype=torch.float16)
    finally:
        backend._import_error.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["nodewise", "depthwise", "expanded"])
@pytest.mark.parametrize("decay", checks.DECAYS)
def test_on_a_gpu(mode, decay):
    """Errors against float64 are at most twice those of fla's kernels on whole trajectories."""
    setting = checks.Setting("cuda", torch.bfloat16, num_heads=4, key_dim=128, value_dim=128)
    layout = checks.layout_of(checks.random_segments(np.random.default_rng(7), 64, 12), 64, mode)
    sequences, trajectories = packed_sequences(layout, "cuda"), checks.trajectories_of(layout)
    x = checks.kda_inputs(layout.num_rows, setting, decay, seed=0, num_external=0)
    exact_x = [t.detach().double().requires_grad_() for t in x]
    whole, _ = checks.fla_expanded(x, [(t, -1) for t in trajectories], setting)
    # Every row is read off the first trajectory that has it.
    rows, first = np.unique(np.concatenate(trajectories), return_index=True)
    assert np.array_equal(rows, np.arange(layout.num_rows))
    outputs = [
        kda(*x[:7], sequences, backend="fla")[0],
        whole[torch.from_numpy(first).cuda()],
        kda(*exact_x[:7], sequences, backend="reference")[0],
    ]
    weight = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).cuda()
    results = [
        [o, *torch.autograd.grad((o * weight.to(o.dtype)).sum(), y[:7])] for o, y in zip(outputs, (x, x, exact_x))
    ]
    exact = results[2]
    # Sums over rows that may cancel: their errors are measured against the sums of absolute terms.
    df, f, dt_bias = exact[4], exact_x[3], exact_x[6]
    scales = {"A_log": (df * (f + dt_bias)).abs().sum((0, 2)), "dt_bias": df.abs().sum(0)}
    for name, *tensors in zip(("o", *checks.KDA_INPUTS), *results):
        ours, theirs = (checks.relative(t, tensors[2], scales.get(name)) for t in tensors[:2])
        assert ours <= 2 * theirs + torch.finfo(torch.bfloat16).eps, (name, ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["nodewise", "depthwise", "expanded"])
def test_a_prepared_call_never_waits_for_the_device(mode):
    setting = checks.Setting("cuda", torch.bfloat16, num_heads=2, key_dim=128, value_dim=128)
    segments = checks.random_segments(np.random.default_rng(7), 64, 12)

    def prepared():
        sequences = packed_sequences(checks.layout_of(segments, 64, mode), "cuda")
        prepare_kda(sequences, dtype=torch.bfloat16, backend="fla")
        return sequences

    def run(sequences):
        return torch.autograd.grad(kda(*x, sequences, backend="fla")[0].float().sum(), x)

    sequences = prepared()
    x = checks.kda_inputs(sequences.num_path_rows, setting, "slow", seed=0)[:7]
    # Compiles the kernels, with tables that the second run does not find.
    run(sequences)
    sequences = prepared()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(sequences)
        run(sequences)
    finally:
        torch.cuda.set_sync_debug_mode("default")
