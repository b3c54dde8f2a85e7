"""The vLLM versions on which localizer was seen to work: the one place that says so.

A version stands here when real captures of it were made and agreed with those of its neighbours. Others are
not refused: a capture of one is marked untested, and an arrangement that no adapter knows is refused by
`localizer.hooks.layout`.
"""

from __future__ import annotations

V1, V2 = "v1", "v2"
"""vLLM's two model runners."""

SEEN: dict[tuple[str, str], tuple[str, ...]] = {
    # The tests run 0.28.0 and 0.32.0. The others were captured once with the tiny model, eager: identical to
    # 0.32.0, with EAGLE3 too, but for 0.30.0, whose EAGLE3 does not run on the CPU, observed or not.
    (V1, "cpu"): ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
    # Captured on an H200 in all graph modes and eager, with Triton and FlashAttention 3, with EAGLE3:
    # identical between modes and runners, tokens as without taps (benchmarks/results/gpu-capture.json).
    (V1, "cuda"): ("0.26.0",),
    (V2, "cuda"): ("0.26.0",),
}
"""(model runner, platform as vLLM names its device type) -> versions, oldest first."""


def seen_on(platform: str, runner: str = "") -> tuple[str, ...]:
    """The versions that were seen on a platform, with one runner or with any."""
    found = [versions for key, versions in SEEN.items() if key[1] == platform and runner in ("", key[0])]
    return tuple(dict.fromkeys(version for versions in found for version in versions))


def is_seen(version: str, platform: str, runner: str = "") -> bool:
    """Whether a version was seen; the label of a build (`0.32.0+cpu`) makes no difference."""
    return version.partition("+")[0] in seen_on(platform, runner)
