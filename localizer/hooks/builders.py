"""The attention metadata builders of a V1 model runner, made anew and put back.

Seen on vLLM 0.32.0 (CPU, V1 model runner): `initialize_attn_backend(kv_cache_config)` fills the empty list
`attn_groups`, `initialize_metadata_builders(kv_cache_config, kernel_block_sizes)` gives each group its
builders, those of a draft's `draft_attn_groups` too. What builders keep from call to call begins anew.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from localizer.hooks.counts import builders, groups
from localizer.hooks.layout import CannotTap
from localizer.hooks.patches import Calls, InStep
from localizer.hooks.replace import replace

TARGET = "attention metadata builders"

NEEDED = (
    *("attn_groups", "kv_cache_config", "_kernel_block_sizes"),
    *("initialize_attn_backend", "initialize_metadata_builders"),
)
"""What the runner must have."""


class Builders:
    """The builders of one worker's runner, anew between `apply` and `restore`.

    Raises:
        CannotTap: this runner cannot make them again safely.
    """

    def __init__(self, worker: Any, in_step: InStep) -> None:
        self._runner, self._config = worker.model_runner, worker.vllm_config
        lacking = [name for name in NEEDED if not hasattr(self._runner, name)]
        if lacking:
            raise CannotTap(
                f"--phase attention-backend: {type(self._runner).__name__} has no {lacking[0]}; "
                "it is known of the V1 model runner of vLLM 0.32.0 only"
            )
        mode = getattr(self._config.compilation_config, "cudagraph_mode", None)
        if getattr(mode, "name", "NONE") != "NONE":
            raise CannotTap(
                "--phase attention-backend: captured graphs may hold buffers of the builders there were; "
                "run without graphs (--engine enforce_eager=true)"
            )
        self._calls = Calls(in_step)
        self._undo = ExitStack()
        self._before = groups(self._runner)

    def apply(self) -> None:
        """Empty the groups, see that they are, and let vLLM fill them again."""
        from vllm.config import set_current_vllm_config

        runner, drafter = self._runner, getattr(self._runner, "drafter", None)
        kept = list(runner.attn_groups)
        self._undo.callback(runner.attn_groups.extend, kept)
        self._undo.callback(runner.attn_groups.clear)
        runner.attn_groups.clear()
        if hasattr(drafter, "draft_attn_groups"):
            replace(self._undo, drafter, "draft_attn_groups", [])
        if groups(self._runner):
            raise RuntimeError("the groups of attention layers were not emptied")
        with set_current_vllm_config(self._config):
            runner.initialize_attn_backend(runner.kv_cache_config)
            runner.initialize_metadata_builders(runner.kv_cache_config, runner._kernel_block_sizes)
        fresh, known = groups(self._runner), {id(builder) for builder in builders(self._before)}
        if [_what(group) for group in fresh] != [_what(group) for group in self._before]:
            raise RuntimeError("the groups of attention layers did not come back as they were")
        for builder in builders(fresh):
            if id(builder) in known:
                raise RuntimeError("an attention metadata builder is still the one of before")
            builder.build = self._calls.counting(builder.build, builder.build)

    def restore(self) -> list[dict[str, Any]]:
        """Put the builders of before back; the fields of `localizer.store.interventions.Changed`."""
        self._undo.close()
        now, number = groups(self._runner), len(builders(self._before))
        same = len(now) == len(self._before) and all(
            one is other for one, other in zip(now, self._before, strict=True)
        )
        return [
            {
                "target": TARGET,
                "in_steps": self._calls.in_steps,
                "outside": self._calls.outside,
                "restored": same,
                "detail": f"{number} in {len(self._before)} groups, seen empty, then made again",
            }
        ]


def _what(group: Any) -> tuple[Any, ...]:
    """By what a group is known: its backend, its layers, and how many builders it has."""
    return group.backend, sorted(group.layer_names), len(group.metadata_builders)
