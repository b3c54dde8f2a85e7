"""How the steps of a model runner are followed: what an adapter tells, and who hears it.

There is one adapter for each of vLLM's model runners, `runner_v1` and `runner_v2`. It tells, in this order: a
step is scheduled; its forward begins on these inputs; it has returned; sampling begins; the tokens are there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from localizer.hooks.later import Later
from localizer.hooks.recorder import Recorder
from localizer.hooks.replace import replace
from localizer.wire.spec import AUXILIARY

if TYPE_CHECKING:
    from localizer.hooks.tables import DeviceTables
    from localizer.hooks.trace import AfterStep, Tracer


@dataclass(frozen=True)
class Forward:
    """The target's forward that is about to run.

    Attributes:
        requests: vLLM's internal ids, in batch order.
        input_ids, positions: [padded rows].
        metadata: vLLM's attention metadata, in any of its layouts.
        graph: name of the CUDA graph mode.
        batch: vLLM's batch descriptor, or None.
        tables: the step's block tables, where the runner does not keep them on the host.
    """

    requests: Sequence[str]
    input_ids: torch.Tensor | None
    positions: torch.Tensor | None
    metadata: Any = None
    graph: str = ""
    batch: Any = None
    tables: DeviceTables | None = None


class Steps:
    """Hears what an adapter tells and passes it to the recorder and the tracer, each on its own guard."""

    def __init__(
        self, recorder: Recorder, tracer: Tracer | None = None, after: AfterStep | None = None
    ) -> None:
        self.recorder, self._tracer, self._after = recorder, tracer, after
        self._schedule = recorder.guarded(recorder.schedule)
        self._dummy = recorder.guarded(recorder.dummy)
        self._begins = recorder.guarded(self._record)
        self._returned = recorder.guarded(self._auxiliary)
        self._ended = recorder.guarded(recorder.forward_ended)
        self._sampled = recorder.guarded(self._tokens)
        self._waiting: list[_Awaited] = []
        recorder.ending.append(self._collect)

    def schedule(self, scheduler_output: Any) -> None:
        """The runner is asked for a step, perhaps one without tokens."""
        self._schedule(scheduler_output)
        if self._tracer is not None:
            self._tracer.guarded(self._tracer.schedule)(scheduler_output)

    def dummy(self) -> None:
        """A forward runs that is not of a step: profiling, warm-up, graph capture."""
        self._dummy()

    def begins(self, forward: Forward) -> None:
        """The target's forward is about to run."""
        self._begins(forward)
        if self._tracer is not None:
            self._tracer.guarded(self._tracer.forward)(forward)

    def _record(self, forward: Forward) -> None:
        if forward.input_ids is None or forward.positions is None:
            raise RuntimeError(
                "the model ran without input ids, as with prompt embeddings, which are not supported"
            )
        self.recorder.forward_begins(forward.requests, forward.input_ids, forward.positions)

    def returned(self, auxiliary: Sequence[torch.Tensor]) -> None:
        """The target's forward has returned, with auxiliary hidden states [padded rows, hidden size]."""
        if auxiliary:
            self._returned(auxiliary)

    def _auxiliary(self, auxiliary: Sequence[torch.Tensor]) -> None:
        if self.recorder.recording and self.recorder.in_forward:
            for index, states in enumerate(auxiliary):
                self.recorder.rows(f"{AUXILIARY}/{index}", states)

    def ended(self) -> None:
        """The target's forward and its logits are done, or failed."""
        self._ended()
        if self._tracer is not None:
            self._tracer.guarded(self._tracer.ended)(self._after)

    def sampled(self, output: Any) -> None:
        """The runner has returned a step's output, whose tokens may arrive later and in another thread.

        Under async scheduling it is an `AsyncModelRunnerOutput` (vllm/v1/outputs.py), whose `get_output()`
        waits for them; vLLM calls it once for each step.
        """
        self._sampled(output)

    def _tokens(self, output: Any) -> None:
        wait = getattr(output, "get_output", None)
        if wait is None:
            tokens = getattr(output, "sampled_token_ids", None)
            if tokens is not None:
                self.recorder.sampled(output.req_ids, tokens)
            return
        later = self.recorder.sampled_later()
        if later is not None:
            self._waiting = [item for item in self._waiting if not item.done]
            self._waiting.append(_Awaited(wait, later))
            output.get_output = self._waiting[-1]
            if self.recorder.naming.rank:  # vLLM asks rank 0 alone
                later.ask = self._waiting[-1]

    def _collect(self) -> None:
        """Ask for the tokens of steps that vLLM has run ahead of, and perhaps never asks for itself."""
        for item in self._waiting:
            item()


class _Awaited:
    """Stands in for the `get_output` of one step: asks once, and tells the recorder."""

    def __init__(self, wait: Callable[..., Any], later: Later) -> None:
        self._wait, self._later, self._lock = wait, later, threading.Lock()
        self._found: Any = None
        self.done = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if not self.done:
                self._found = self._ask(*args, **kwargs)
                self.done = True
            return self._found

    def _ask(self, *args: Any, **kwargs: Any) -> Any:
        try:
            found = self._wait(*args, **kwargs)
        except BaseException:
            self._later.fail("the tokens of a step did not come: vLLM failed")
            raise
        try:
            self._later.arrive(dict(zip(found.req_ids, found.sampled_token_ids, strict=True)))
        except Exception as error:  # the run goes on; the pump tells the recorder
            self._later.fail(f"the tokens of a step cannot be read: {type(error).__name__}: {error}")
        return found


def follow(steps: Steps, undo: ExitStack, runner: Any, graphs: Any = None) -> None:
    """Follow the steps of a runner by its adapter, until `undo` is closed.

    To be called after the taps are installed.

    Args:
        steps: hears what happens.
        undo: takes the adapter away again.
        runner: vLLM's model runner, which `layout.check` knows.
        graphs: the taps inside full CUDA graphs (`ingraph.Graphs`), or None where there are no graphs.
    """
    from localizer.hooks import layout, runner_v1, runner_v2

    adapter = runner_v2 if layout.runner_kind(runner) == layout.V2 else runner_v1
    adapter.follow(steps, undo, runner, graphs)


def follow_tokens(steps: Steps, undo: ExitStack, runner: Any) -> None:
    """Tell of the tokens that `sample_tokens(...)` of a runner returns."""
    sample = runner.sample_tokens

    @functools.wraps(sample)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        steps.sampled(output)
        return output

    replace(undo, runner, "sample_tokens", sample_tokens)


def before_capture(prepare: Callable[[], None], undo: ExitStack, runner: Any) -> None:
    """Call `prepare` right before `capture_model(...)` of a runner captures CUDA graphs."""
    capture = runner.capture_model

    @functools.wraps(capture)
    def capture_model(*args: Any, **kwargs: Any) -> Any:
        prepare()
        return capture(*args, **kwargs)

    replace(undo, runner, "capture_model", capture_model)
