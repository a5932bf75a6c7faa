"""Rotary embedding on interleaved pairs, fused with the assembly of full attention's queries and keys."""

from harts_titan.ops.rope.op import rope_keys_values, rope_queries
from harts_titan.ops.rope.reference import apply_rope

__all__ = ["apply_rope", "rope_keys_values", "rope_queries"]
