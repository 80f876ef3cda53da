"""One plain vLLM engine, without baton: greedy token ids for the prompts of a JSON file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    # Here alone: the processes that vLLM starts run this file too, and need none of it.
    from vllm import LLM, SamplingParams

    model, max_tokens, asked, answered = sys.argv[1:5]
    engine = LLM(
        model=model,
        max_model_len=4096,
        block_size=32,
        dtype="bfloat16",
        enforce_eager=True,
        kv_cache_memory_bytes=256 * 1024 * 1024,
    )
    sampling = SamplingParams(max_tokens=int(max_tokens), temperature=0, ignore_eos=True)
    answers = []
    for prompt in json.loads(Path(asked).read_text()):
        # One at a time, as the test asks baton: a batch of another shape may round differently.
        (output,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    Path(answered).write_text(json.dumps(answers))
