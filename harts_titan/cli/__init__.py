"""Command-line tools: ``harts-plan``, ``harts-logprobs``, ``harts-verify``, ``harts-bench``."""
