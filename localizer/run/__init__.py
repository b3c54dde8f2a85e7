"""Both sources, controls, witness: the order of captures and diffs that makes one trustworthy answer."""
