"""What cannot be captured yet, each in a sentence with the next step.

Said before anything starts where the request or the model's configuration tells; else by the worker, which
asks vLLM, before it loads the model.
"""

from __future__ import annotations

_TOKENS_ALONE = "or capture tokens alone with --no-taps"

LORA = (
    "LoRA adapters are not supported yet, for the tokens of a row do not tell its adapter; "
    f"leave enable_lora out of --engine, {_TOKENS_ALONE}"
)

PROMPT_EMBEDS = (
    "prompt embeddings are not supported yet, for such a row has no token; "
    f"leave enable_prompt_embeds out of --engine, {_TOKENS_ALONE}"
)

MULTIMODAL = (
    "models that take images, audio or video are not supported yet, for the token of a row does not tell "
    "what it holds; use the language model by itself with --engine language_model_only=true"
)

SEVERAL_POSITIONS = (
    "models whose tokens have several positions each (M-RoPE) are not supported yet; "
    f"name another model, {_TOKENS_ALONE}"
)

ENCODER_DECODER = (
    "models with an encoder and a decoder are not supported yet; "
    f"name one that has a decoder only, {_TOKENS_ALONE}"
)

POOLING = "pooling models return no tokens, and localizer compares what generates; name a model that does"

PARALLEL = {
    f"{kind}_parallel_size": f"{kind.replace('_', ' ')} parallelism is not supported yet, of several workers "
    f"only tensor_parallel_size; leave {kind}_parallel_size out of --engine, {_TOKENS_ALONE}"
    for kind in ("pipeline", "data", "decode_context", "prefill_context")
}
"""Engine arguments that make several workers in a way that cannot be captured -> what is said of them."""

RANKS = "workers are from 1 to {most}; set tensor_parallel_size so with --engine"

MODULES_OF_RANKS = (
    "modules of several workers cannot be tapped, for it is not known which part of a module's output each "
    f"has; leave out --level module or tensor_parallel_size, {_TOKENS_ALONE}"
)

EXECUTOR = (
    "several workers are captured only if vLLM starts them itself on this machine; "
    f"leave distributed_executor_backend and nnodes out of --engine, {_TOKENS_ALONE}"
)

OTHER_RANKS = (
    "vLLM started {there} workers instead of the {ranks} that its engine arguments ask for; "
    f"set tensor_parallel_size with --engine, {_TOKENS_ALONE}"
)

DIGEST_SPLIT = (
    "{split} workers could not share the heads of {site} ({heads} of them); "
    "give --digest-split another number, or leave it out"
)

DIGEST_SPLIT_ON_DEVICE = (
    "ranges of heads are hashed on the host alone; leave out --digest-split or --row-digest device"
)

_ROW_DIGEST = "leave out --row-digest device, and rows are hashed on the host"

ROW_DIGEST_PLATFORM = f"rows are hashed on the device only where that is a CUDA GPU; {_ROW_DIGEST}"

ROW_DIGEST_TRITON = f"rows are hashed on the device by Triton, which the source lacks; {_ROW_DIGEST}"

ROW_DIGEST_WRONG = (
    "{device} gives another digest of rows of {size} bytes than the reference does; " + _ROW_DIGEST
)
