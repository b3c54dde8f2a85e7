"""localizer: a tensor-level divergence localizer for vLLM."""

__version__ = "0.1.0"
