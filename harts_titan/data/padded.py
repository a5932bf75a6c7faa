"""Padded batches as RL frameworks hold them, to a :class:`RolloutBatch` and back.

Letters: N = rows, L = columns of ``input_ids``, R = columns of a response-only tensor. Per-token tensors are
token-aligned. They have L columns, or R: then they belong to the last R columns of ``input_ids``, where such frameworks
put the response. R is known from ``responses``, ``prompts`` or the argument; any other width is refused.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from harts_titan.data.batch import RolloutBatch
from harts_titan.data.files import check_unique
from harts_titan.data.problems import Problems

logger = logging.getLogger(__name__)

TOKEN_KEYS = {
    "rollout_log_probs": "logprobs",
    "old_log_probs": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
    "advantages": "advantages",
    "weights": "weights",
}
"""Framework key -> field of the batch."""
MASK_KEYS = ("loss_mask", "response_mask")
ROW_KEYS = ("rewards", "group_id", "uid", "episode_id", "step")
_WIDTH_KEYS = ("prompts", "responses")


def from_padded(data: Any, *, response_width: int | None = None) -> RolloutBatch:
    """Read a padded batch.

    The side of the padding is read from ``attention_mask``, row by row: left, right or both, but no holes. Where a
    response-only tensor has no value (the prompt) the field is 0; such tokens must not be trained. Padding is ignored.

    Args:
        data: TensorDict or dict with ``input_ids`` (N, L), ``attention_mask`` (N, L), ``loss_mask`` and/or
            ``response_mask``; optional per-token ``old_log_probs``, ``ref_log_prob``, ``advantages``,
            ``rollout_log_probs``, ``weights`` (the last and ``advantages`` also one number per row); optional per-row
            ``rewards``, ``group_id`` (integers) or ``uid`` (any names), ``episode_id``, ``step``; ``prompts`` /
            ``responses`` give the response width. Other keys are named once in the log.
        response_width: columns of response-only tensors, if neither ``responses`` nor ``prompts`` says it.

    Returns:
        The rows as trajectories, in order.

    Raises:
        ValueError: If a key is missing, a shape or width fits nothing, the attention mask has a hole, the masks
            disagree, or any row is invalid; up to five rows are named.
    """
    keys = list(data.keys())
    missing = [name for name in ("input_ids", "attention_mask") if name not in keys]
    if missing or not any(name in keys for name in MASK_KEYS):
        missing = missing or ["loss_mask (or response_mask)"]
        raise ValueError(f"padded batch: {', '.join(missing)} missing; keys found: {', '.join(map(str, keys))}")
    ids_NL = _array(data, "input_ids")
    if ids_NL.ndim != 2 or ids_NL.dtype.kind not in "iu":
        raise ValueError(f"padded batch: input_ids must be integers (rows, columns), got {ids_NL.dtype} {ids_NL.shape}")
    attention_NL = _binary(_array(data, "attention_mask"), "attention_mask")
    if attention_NL.shape != ids_NL.shape:
        raise ValueError(f"padded batch: attention_mask is {attention_NL.shape}, input_ids is {ids_NL.shape}")
    location, episode = (
        [f"padded batch:row {n}" for n in range(len(ids_NL))],
        _names(data, keys, "episode_id", len(ids_NL)),
    )
    _check_holes(attention_NL, location, episode)
    width = _response_width(data, keys, ids_NL, attention_NL, response_width)
    mask_NL = _loss_mask(data, keys, attention_NL, width, location, episode)
    flat: dict[str, Any] = {}
    for key, field in TOKEN_KEYS.items():
        if key not in keys:
            continue
        values, covered = _columns(
            _array(data, key), key, ids_NL.shape, width, per_row=field in ("advantages", "weights")
        )
        uncovered = mask_NL[:, : ids_NL.shape[1] - covered].any(axis=1)
        problems = Problems("padded batch")
        for row in np.flatnonzero(uncovered).tolist():
            text = f"covers only the last {covered} columns, but tokens before them are trained; give all columns"
            problems.add(location[row], episode[row], key, text)
        problems.raise_if_any()
        flat[field] = values[attention_NL]
    known = {"input_ids", "attention_mask", *MASK_KEYS, *TOKEN_KEYS, *ROW_KEYS, *_WIDTH_KEYS}
    ignored = sorted(str(key) for key in keys if key not in known)
    if ignored:
        logger.info("padded batch: keys ignored: %s", ", ".join(ignored))
    batch = RolloutBatch(
        tokens=ids_NL[attention_NL],
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(attention_NL.sum(axis=1, dtype=np.int64))]),
        loss_mask=mask_NL[attention_NL],
        episode_id=episode,
        location=location,
        **_row_fields(data, keys, len(ids_NL)),
        **flat,
    )
    check_unique(batch)
    return batch


def to_padded(
    values_S: np.ndarray | torch.Tensor,
    attention_mask_NL: torch.Tensor,
    *,
    response_width: int | None = None,
    fill: float = 0.0,
) -> torch.Tensor:
    """Put token-aligned values back into a framework's padded shape; the inverse of :func:`from_padded`.

    Args:
        values_S: one value per attended token, row after row (token-aligned log-probs, say).
        attention_mask_NL: the mask the batch was read with.
        response_width: return only the last columns, the shape of response-only tensors; None = all L.
        fill: value of padding.

    Returns:
        (N, L) or (N, R), the dtype of ``values_S``, on the device of the mask.

    Raises:
        ValueError: If the numbers of values and attended tokens differ.
    """
    values = torch.as_tensor(values_S)
    attended = attention_mask_NL.bool()
    if values.shape != (int(attended.sum()),):
        raise ValueError(f"{tuple(values.shape)} values for {int(attended.sum())} attended tokens: pass one per token")
    padded_NL = torch.full(attended.shape, fill, dtype=values.dtype, device=attended.device)
    padded_NL[attended] = values.to(attended.device)
    if response_width is None:
        return padded_NL
    if not 0 < response_width <= attended.shape[1]:
        raise ValueError(f"response_width ({response_width}) must be in 1..{attended.shape[1]} (columns)")
    return padded_NL[:, attended.shape[1] - response_width :]


def _array(data: Any, key: str) -> np.ndarray:
    """The value of a key on the host; bfloat16, which NumPy lacks, becomes float32."""
    value = data[key]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return np.asarray(value)


def _binary(values: np.ndarray, key: str) -> np.ndarray:
    if values.dtype != np.bool_ and (values.dtype.kind not in "iuf" or not np.isin(values, (0, 1)).all()):
        raise ValueError(f"padded batch: {key} must be boolean or 0/1, got {values.dtype} with other values")
    return values.astype(bool)


def _check_holes(attention_NL: np.ndarray, location: list[str], episode: list[str]) -> None:
    problems = Problems("padded batch")
    # A run of ones opens once; a second opening is a hole.
    opens = attention_NL[:, 1:] & ~attention_NL[:, :-1]
    runs = opens.sum(axis=1) + attention_NL[:, 0] if attention_NL.shape[1] else np.zeros(len(attention_NL))
    for row in np.flatnonzero(runs > 1).tolist():
        text = f"has {runs[row] - 1} hole(s): attended tokens must be contiguous, padded left, right or both"
        problems.add(location[row], episode[row], "attention_mask", text)
    problems.raise_if_any()


def _response_width(
    data: Any, keys: list[Any], ids_NL: np.ndarray, attention_NL: np.ndarray, given: int | None
) -> int | None:
    """Columns of response-only tensors, proven to be the last ones; None if nothing says it."""
    total = ids_NL.shape[1]
    claims: dict[str, int] = {} if given is None else {"response_width": given}
    for key in (key for key in _WIDTH_KEYS if key in keys):
        part = _array(data, key)
        if part.ndim != 2 or part.shape[0] != len(ids_NL) or part.shape[1] > total:
            raise ValueError(
                f"padded batch: {key} is {part.shape}, input_ids is {ids_NL.shape}; expected (rows, columns)"
            )
        claims[key] = part.shape[1] if key == "responses" else total - part.shape[1]
        columns = slice(total - part.shape[1], None) if key == "responses" else slice(0, part.shape[1])
        differs = (ids_NL[:, columns] != part) & attention_NL[:, columns]
        if differs.any():
            row = int(np.flatnonzero(differs.any(axis=1))[0])
            side = "last" if key == "responses" else "first"
            raise ValueError(
                f"padded batch: {key} is not the {side} {part.shape[1]} columns of input_ids (row {row}), so the place "
                "of response-only tensors is ambiguous; give per-token tensors all columns"
            )
    if len(set(claims.values())) > 1:
        raise ValueError(f"padded batch: response widths disagree: {claims}")
    width = next(iter(claims.values()), None)
    if width is not None and not 0 < width <= total:
        raise ValueError(f"padded batch: the response width is {width}, must be in 1..{total} (columns of input_ids)")
    return width


def _columns(
    values: np.ndarray, key: str, shape: tuple[int, ...], width: int | None, *, per_row: bool = False
) -> tuple[np.ndarray, int]:
    """Bring a tensor to all L columns; also the number of trailing columns it covers."""
    num_rows, total = shape
    if values.dtype.kind not in "biuf":
        raise ValueError(f"padded batch: {key} must hold numbers, got {values.dtype}")
    if per_row and values.shape in ((num_rows,), (num_rows, 1)) and total > 1:
        return np.repeat(values.reshape(num_rows, 1), total, axis=1), total
    if values.shape == (num_rows, total):
        return values, total
    if values.ndim == 2 and values.shape[0] == num_rows and width is not None and values.shape[1] == width:
        full = np.zeros((num_rows, total), values.dtype)
        full[:, total - width :] = values
        return full, width
    known = "unknown (give responses, prompts or response_width)" if width is None else str(width)
    raise ValueError(
        f"padded batch: {key} is {values.shape}, which is neither all columns {shape} nor the response width; the "
        f"response width is {known}"
    )


def _loss_mask(
    data: Any,
    keys: list[Any],
    attention_NL: np.ndarray,
    width: int | None,
    location: list[str],
    episode: list[str],
) -> np.ndarray:
    masks = {
        key: _columns(_binary(_array(data, key), key), key, attention_NL.shape, width)[0]
        for key in MASK_KEYS
        if key in keys
    }
    first = next(iter(masks.values()))
    problems = Problems("padded batch")
    for key, mask in masks.items():
        for row in np.flatnonzero((mask & ~attention_NL).any(axis=1)).tolist():
            problems.add(location[row], episode[row], key, "true on padding, where attention_mask is 0")
    if len(masks) == 2:
        for row in np.flatnonzero((first != masks["response_mask"]).any(axis=1)).tolist():
            text = "disagrees with response_mask; give the mask of trained tokens once"
            problems.add(location[row], episode[row], "loss_mask", text)
    problems.raise_if_any()
    return first


def _names(data: Any, keys: list[Any], key: str, num_rows: int) -> list[str]:
    if key not in keys:
        return [""] * num_rows
    names = _array(data, key)
    if names.shape != (num_rows,):
        raise ValueError(f"padded batch: {key} is {names.shape}, expected one per row ({num_rows},)")
    return ["" if name is None else str(name) for name in names.tolist()]


def _row_fields(data: Any, keys: list[Any], num_rows: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "group_id" in keys and "uid" in keys:
        raise ValueError("padded batch: give group_id or uid, not both")
    for key, field in (("rewards", "reward"), ("group_id", "group_id"), ("step", "step")):
        if key not in keys:
            continue
        values = _array(data, key)
        if values.shape == (num_rows, 1):
            values = values[:, 0]
        allowed = "biuf" if key == "rewards" else "iu"
        if values.shape != (num_rows,) or values.dtype.kind not in allowed:
            kind = "number" if key == "rewards" else "integer"
            raise ValueError(f"padded batch: {key} is {values.dtype} {values.shape}, expected one {kind} per row")
        fields[field] = values
    if "uid" in keys:
        number: dict[str, int] = {}
        names = _names(data, keys, "uid", num_rows)
        # As in files, a row without a name belongs to no group; one common group would mix unrelated tasks.
        fields["group_id"] = np.array(
            [number.setdefault(name, len(number)) if name else -1 for name in names], dtype=np.int64
        )
    return fields
