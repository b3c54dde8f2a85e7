"""Everything that the adapters take for granted about a vLLM, checked before anything is tapped.

Seen on vLLM 0.28.0 and 0.32.0 (CPU, V1 model runner), read in 0.26.0 (CUDA, V1 and V2);
`localizer.wire.versions` lists what was seen. A vLLM that is arranged otherwise is refused with a sentence
that names its version and the place.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from localizer.wire.versions import V1, V2, is_seen, seen_on

FORWARD_PARAMETERS = ["layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"]
"""First parameters of every known `AttentionImpl.forward`."""

INPUTS = ("input_ids", "positions")
"""Parameters of the forward of every known model and draft model."""

SCHEDULED = ("num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens")
"""Fields of what the scheduler hands to `execute_model`."""

BATCH = ("req_ids", "input_ids", "positions", "num_scheduled_tokens")
"""Fields of the batch of Model Runner V2 that are used."""

SAMPLED = ("req_ids", "sampled_token_ids")
"""Fields of what a step returns."""

ADMISSION = {"sleep": ("level", "mode"), "enqueue": ("prompts",), "wake_up": (), "wait_for_completion": ()}
"""Methods of `vllm.LLM` by which a round is queued before its first step, with parameters that are used."""


class UnknownLayout(RuntimeError):
    """This vLLM arranges something differently from every version seen; the text names version and place."""


class CannotTap(RuntimeError):
    """What is asked for cannot be tapped in this engine; the text says why and what to do."""


def refuse(problem: str, platform: str = "") -> UnknownLayout:
    """The error that says what is not as expected."""
    import vllm

    version = getattr(vllm, "__version__", "of no version")
    known = ", ".join(seen_on(platform)) if platform else ""
    return UnknownLayout(
        f"vLLM {version}: {problem}, a layout this localizer does not know"
        + (f" (it was seen on {known})" if known else "")
    )


def worker_class() -> Any:
    """vLLM's worker class, whose `load_model` is followed by installing the taps.

    Raises:
        UnknownLayout: it is not where it was.
    """
    try:
        from vllm.v1.worker.gpu_worker import Worker
    except ImportError:
        raise refuse("there is no vllm.v1.worker.gpu_worker.Worker") from None
    if not callable(getattr(Worker, "load_model", None)):
        raise refuse("Worker has no load_model")
    return Worker


def check_admission(llm: Any) -> None:
    """Check `vllm.LLM`, before an engine is built.

    Raises:
        UnknownLayout: a method that queues requests is missing or takes something else.
    """
    for problem in admission_problems(llm):
        raise refuse(problem)


def admission_problems(llm: Any) -> Iterator[str]:
    """What of `vllm.LLM` is not as in the versions seen."""
    for name, parameters in ADMISSION.items():
        yield from _method(llm, "LLM", name, parameters)
    yield from _method(llm, "LLM", "collective_rpc", ("method", "args"))


def check(worker: Any) -> None:
    """Check a worker that has loaded its model.

    Raises:
        UnknownLayout: something the adapters need is not there, or is arranged otherwise.
    """
    for problem in problems(worker):
        raise refuse(problem, platform())


def problems(worker: Any) -> Iterator[str]:
    """What of a worker that has loaded its model is not as in the versions seen, the most basic first."""
    yield from step_problems()
    name = type(worker).__name__
    for attribute in ("model_runner", "vllm_config"):
        if not hasattr(worker, attribute):
            yield f"{name} has no {attribute}"
            return
    kind = runner_kind(worker.model_runner)
    if not kind:
        yield f"the model runner {_full_name(worker.model_runner)} has no adapter"
        return
    yield from _runner(worker.model_runner) if kind == V1 else _runner_v2(worker.model_runner)
    compilation = getattr(worker.vllm_config, "compilation_config", None)
    layers = getattr(compilation, "static_forward_context", None)
    if layers is None or not hasattr(layers, "items"):
        yield "compilation_config has no table static_forward_context"
        return
    for layer_name, layer in layers.items():
        forward = getattr(getattr(layer, "impl", None), "forward", None)
        if forward is None:
            continue  # such a layer is reported as untapped
        parameters = _parameters(forward)
        if parameters is not None and parameters[: len(FORWARD_PARAMETERS)] != FORWARD_PARAMETERS:
            yield f"{type(layer.impl).__name__}.forward of {layer_name} takes {', '.join(parameters)}"
    if kind == V1:
        yield from _drafter(worker.model_runner, layers)


def step_problems() -> Iterator[str]:
    """What of the records that describe a step is not as in the versions seen."""
    for module, name, fields in (
        ("vllm.v1.core.sched.output", "SchedulerOutput", SCHEDULED),
        ("vllm.v1.outputs", "ModelRunnerOutput", SAMPLED),
        ("vllm.forward_context", "ForwardContext", ("attn_metadata",)),
        ("vllm.forward_context", "get_forward_context", ()),
        ("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase", ()),
    ):
        found = _imported(module, name)
        if found is None:
            yield f"there is no {module}.{name}"
        elif fields:
            there = {field.name for field in dataclasses.fields(found)} if _is_record(found) else dir(found)
            for field in fields:
                if field not in there:
                    yield f"{name} has no {field}"


def runner_kind(runner: Any) -> str:
    """Which of vLLM's model runners this is: "v1", "v2", or "" for one that is not known."""
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(runner).__mro__}
    if "vllm.v1.worker.gpu.model_runner.GPUModelRunner" in bases:
        return V2
    return V1 if hasattr(runner, "input_batch") and hasattr(runner, "sample_tokens") else ""


def adapter_facts(runner: Any, version: str) -> dict[str, Any]:
    """By which adapter a run was observed, and whether that was seen to work on this version."""
    kind, where = runner_kind(runner), platform()
    return {"runner": kind, "platform": where, "seen": is_seen(version, where, kind)}


def platform() -> str:
    """The device type that vLLM runs on, as it names it; empty where it does not say."""
    current = _imported("vllm.platforms", "current_platform")
    return str(getattr(current, "device_type", "") or "")


def _runner(runner: Any) -> Iterator[str]:
    name = type(runner).__name__
    if not hasattr(runner.input_batch, "req_ids"):
        yield f"{name}.input_batch has no req_ids"
    yield from _method(runner, name, "execute_model", ("scheduler_output",))
    yield from _method(runner, name, "sample_tokens", ())
    if hasattr(getattr(runner, "model", None), "unwrap"):  # its graphs are replayed without Python
        yield from _method(runner, name, "_model_forward", INPUTS)
        yield from _method(runner, name, "capture_model", ())
    yield from _target(runner)


def _runner_v2(runner: Any) -> Iterator[str]:
    name = type(runner).__name__
    yield from _method(runner, name, "execute_model", ("scheduler_output", "dummy_run"))
    yield from _method(runner, name, "sample_tokens", ())
    yield from _method(runner, name, "prepare_inputs", ("scheduler_output", "batch_desc"))
    yield from _method(runner, name, "sample", ("hidden_states", "input_batch"))
    yield from _method(runner, name, "capture_model", ())
    if not hasattr(runner, "model_state"):
        yield f"{name} has no model_state"
        return
    yield from _method(
        runner.model_state, type(runner.model_state).__name__, "prepare_attn", ("input_batch",)
    )
    batch = _imported("vllm.v1.worker.gpu.input_batch", "InputBatch")
    there = {field.name for field in dataclasses.fields(batch)} if _is_record(batch) else set()
    for field in BATCH:
        if field not in there:
            yield f"InputBatch of {name} has no {field}"
    yield from _target(runner)


def _target(runner: Any) -> Iterator[str]:
    name = type(runner).__name__
    if not hasattr(runner, "model"):
        yield f"{name} has no model"
        return
    model = runner.model
    while callable(getattr(model, "unwrap", None)):
        model = model.unwrap()
    yield from _model(model)
    if getattr(runner, "use_aux_hidden_state_outputs", False):
        holder = getattr(model, "model", model)
        if not hasattr(holder, "aux_hidden_state_layers"):
            yield f"{type(holder).__name__} has no aux_hidden_state_layers"


def _model(model: Any) -> Iterator[str]:
    name = type(model).__name__
    if not callable(getattr(model, "register_forward_pre_hook", None)):
        yield f"{name} takes no forward hooks"
    yield from _method(model, name, "compute_logits", ("hidden_states",))
    yield from _method(model, name, "forward", INPUTS)


def _drafter(runner: Any, layers: Any) -> Iterator[str]:
    """A draft is tapped if it is a model with attention layers; n-gram proposals, for one, are not."""
    drafter = getattr(runner, "drafter", None)
    model: Any = getattr(drafter, "model", None)
    while callable(getattr(model, "unwrap", None)):
        model = model.unwrap()
    if model is None or not callable(getattr(model, "modules", None)):
        return
    members = {id(module) for module in model.modules()}
    if any(id(layer) in members and hasattr(layer, "impl") for layer in layers.values()):
        yield from _method(drafter, type(drafter).__name__, "propose", ())
        yield from _model(model)


def _method(owner: Any, owner_name: str, name: str, parameters: Sequence[str]) -> Iterator[str]:
    method = getattr(owner, name, None)
    if not callable(method):
        yield f"{owner_name} has no {name}"
        return
    there = _parameters(method)
    if there is None or any(parameter.startswith("*") for parameter in there):
        return  # it takes anything
    for parameter in parameters:
        if parameter not in there:
            yield f"{owner_name}.{name} takes {', '.join(there) or 'nothing'}, not {parameter}"


def _parameters(function: Any) -> list[str] | None:
    """Names of the parameters but for `self`, those for any others with stars; None where nobody knows."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(item.kind, "") + item.name for item in found if item.name != "self"]


def _imported(module: str, name: str) -> Any:
    import importlib

    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _full_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
