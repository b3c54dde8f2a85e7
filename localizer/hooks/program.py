"""The program that the source's interpreter runs: build the engine, do the workload, report on a pipe."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection
from typing import Any

from localizer.hooks.lifeline import end_with
from localizer.wire.spec import DEVICE, EVENTS_VARIABLE, EXTENSION, SPEC_VARIABLE, RunSpec

DEFAULTS: dict[str, Any] = {"skip_tokenizer_init": True}
"""Engine arguments that a workload of token ids implies; `RunSpec.engine` overrides them."""

ABORTED = "abort"
"""Finish reason of a request that vLLM did not return, as it names it where it does."""

NOTICE_SECONDS = 10.0
"""How long vLLM may take to notice that one of its processes has died."""


class Reporter:
    """Writes events for localize, one JSON object a line."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._pipe = os.fdopen(descriptor, "w")
        self.closed = False

    def __call__(self, event: str, **content: Any) -> None:
        if not self.closed:
            print(json.dumps({"event": event, **content}), file=self._pipe, flush=True)

    def close(self) -> None:
        """Say nothing more: everything was said, and processes may end now."""
        self.closed = True


def run(spec: RunSpec, report: Reporter) -> None:
    """Do the workload of `spec`."""
    started = time.monotonic()
    report("importing")
    from vllm import LLM, SamplingParams

    from localizer.hooks import layout, phases, rowdigest

    layout.check_admission(LLM)
    if spec.row_digest == DEVICE:
        rowdigest.check_platform()
    imported = time.monotonic()
    report("loading")
    engine = {**DEFAULTS, **spec.engine, "model": spec.model}
    if spec.taps:
        engine["worker_extension_cls"] = EXTENSION
    llm = LLM(**engine)
    ready = time.monotonic()
    from localizer.hooks import facts, loaded

    watch_children(report)
    report("ready", versions=facts.versions(), engine=facts.config_facts(llm.llm_engine.vllm_config))
    sampling = SamplingParams(**spec.sampling)
    course = None if spec.intervention is None else phases.Phases(llm, spec, report)
    for number, names in enumerate(spec.rounds) if course is None else course.rounds():
        outputs, seconds = run_round(llm, spec, names, sampling)
        report("round", round=number, outputs=outputs, seconds=seconds)
    generated = time.monotonic()
    workers = finished(llm) if spec.taps else []
    durations = {
        "import": imported - started,
        "load": ready - imported,
        "generate": generated - ready,
        "describe": time.monotonic() - generated,
    }
    report(
        "done",
        workers=workers,
        **described(loaded.loaded_facts),
        **facts.resources(),
        children=children_resources(facts.resources),
        durations=durations,
        intervention=None if course is None else course.facts,
    )
    report.close()
    shutdown = getattr(llm.llm_engine.engine_core, "shutdown", None)
    if shutdown is not None:
        shutdown()


def finished(llm: Any) -> list[dict[str, Any]]:
    """What the workers say at the end; they check what they recorded only if all have all of it."""
    sound = all(llm.collective_rpc("localizer_close"))
    found: list[dict[str, Any]] = llm.collective_rpc("localizer_finish", args=(sound,))
    return found


def described(facts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What this process has loaded; a fault in telling must not cost the run."""
    try:
        return {"loaded": facts()}
    except Exception as error:
        what = "names of the files that the program loaded"
        return {"errors": [f"the {what} are missing: {type(error).__name__}: {error}"]}


def children_resources(facts: Callable[[int], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`facts` of each process that vLLM has started, as its engine core, by the name it gave it."""
    found = {}
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            if child.pid is not None:
                found[child.name] = facts(child.pid)
    return found


def watch_children(report: Reporter) -> None:
    """End this process if an engine process dies and vLLM does not notice, as when its core is killed."""
    children = multiprocessing.active_children()

    def wait() -> None:
        connection.wait([child.sentinel for child in children])
        time.sleep(NOTICE_SECONDS)
        if report.closed:  # everything was done, and processes may end
            return
        dead = next(child for child in children if child.exitcode is not None)
        report("error", type="", message=f"the process {dead.name} died (exit status {dead.exitcode})")
        os._exit(1)

    if children:
        threading.Thread(target=wait, name="localizer-children", daemon=True).start()


def run_round(llm: Any, spec: RunSpec, names: list[str], sampling: Any) -> tuple[list[dict[str, Any]], float]:
    """Queue all requests of a round before its first step, and run it.

    Returns:
        What came out, in the order of the round, and the seconds from the first step to the last output. Of
        a request that is aborted while it runs vLLM returns nothing.
    """
    llm.sleep(level=0, mode="keep")
    prompts = [{"prompt_token_ids": spec.prompts[index]} for index in range(len(names))]
    internal = llm.enqueue(prompts, sampling, use_tqdm=False)
    if len(internal) != len(names):
        raise RuntimeError(f"vLLM queued {len(internal)} requests instead of {len(names)}")
    if spec.taps:
        llm.collective_rpc("localizer_round", args=(dict(zip(internal, names, strict=True)),))
    started = time.monotonic()
    llm.wake_up()
    returned = {output.request_id: output for output in llm.wait_for_completion(use_tqdm=False)}
    seconds = time.monotonic() - started
    outputs = []
    for name, request in zip(names, internal, strict=True):
        external = request if request in returned else request.rpartition("-")[0]
        known = {"request": name, "internal": request, "external": external}
        output = returned.get(external)
        if output is None:
            outputs.append(known | {"tokens": [], "finish": ABORTED, "cached_tokens": 0})
            continue
        completion = output.outputs[0]
        outputs.append(
            known
            | {
                "tokens": list(completion.token_ids),
                "finish": str(completion.finish_reason),
                "cached_tokens": output.num_cached_tokens or 0,
                "logprobs": [by_rank(table) for table in completion.logprobs or ()],
            }
        )
    return outputs, seconds


def by_rank(table: Mapping[int, Any]) -> list[tuple[int, float | str]]:
    """The (token id, logprob) of one returned token's logprobs, by rank; "-inf" where JSON has no number."""
    ranked = sorted(table.items(), key=lambda item: item[1].rank or 0)
    return [
        (token, found.logprob if math.isfinite(found.logprob) else str(found.logprob))
        for token, found in ranked
    ]


def main() -> None:
    """Run the specification named by the environment; report any exception before ending with status 1."""
    report = Reporter(int(os.environ.pop(EVENTS_VARIABLE)))
    spec = RunSpec.read(os.environ[SPEC_VARIABLE])
    end_with(spec.parent_pid)
    try:
        run(spec, report)
    except BaseException as error:
        traceback.print_exc()
        report("error", type=type(error).__name__, message=str(error))
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    # everything is reported and the engine is shut down; the interpreter's own teardown takes seconds
    os._exit(0)


if __name__ == "__main__":
    main()
