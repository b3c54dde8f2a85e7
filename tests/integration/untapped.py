"""A run of vLLM without localizer: prompts as JSON on standard input, tokens and full logits to a file."""

from __future__ import annotations

import json
import sys

import numpy as np
from vllm import LLM, SamplingParams


def main() -> None:
    """Read {"model", "engine", "rounds": [[prompt, ...], ...], "max_tokens", "target"}."""
    order = json.load(sys.stdin)
    llm = LLM(
        model=order["model"],
        skip_tokenizer_init=True,
        logprobs_mode="raw_logits",
        max_logprobs=-1,
        **order["engine"],
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=order["max_tokens"], ignore_eos=True, detokenize=False, logprobs=-1
    )
    tokens, logits = [], []
    for prompts in order["rounds"]:
        llm.sleep(level=0, mode="keep")
        llm.enqueue([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        llm.wake_up()
        for output in sorted(
            llm.wait_for_completion(use_tqdm=False), key=lambda output: int(output.request_id)
        ):
            completion = output.outputs[0]
            tokens.append(list(completion.token_ids))
            logits.append(
                [[step[token].logprob for token in range(len(step))] for step in completion.logprobs]
            )
    np.savez(order["target"], tokens=np.array(tokens), logits=np.array(logits, np.float32))


if __name__ == "__main__":
    main()
