"""What runs inside the source's interpreter, beside vLLM. Needs torch, numpy, the standard library and wire/ only."""
