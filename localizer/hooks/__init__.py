"""What runs inside the source's interpreter: needs torch, numpy, the standard library and wire/ only."""
