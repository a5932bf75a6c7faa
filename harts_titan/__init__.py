"""Training of hybrid-attention language models on rollout trees.

A step's trajectories share long histories. ``harts_titan`` computes each distinct prefix of a microbatch once, forward
and backward, and recovers for every original position exactly the log-probabilities, losses, router statistics and
gradients that ordinary per-trajectory training gives (HARTS 3).
"""

__version__ = "0.1.0"

from harts_titan import _compat

# Before any module of the package can import torchtitan, which binds its device type at import.
_compat.install()
