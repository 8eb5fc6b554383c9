"""A script written for nano-vllm; only its import was changed (it was `from nanovllm import ...`).

python examples/nano_vllm_script.py [MODEL]     MODEL: a folder; default: the embedded model
"""

from __future__ import annotations

import sys

from nanovllm_core import LLM, SamplingParams


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "demo"
    llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)

    sampling_params = SamplingParams(temperature=0.6, max_tokens=64)
    prompts = ["Once upon a time", "Once upon a time there was a clever fox"]
    outputs = llm.generate(prompts, sampling_params)

    for prompt, output in zip(prompts, outputs, strict=True):
        print()
        print(f"Prompt: {prompt!r}")
        print(f"Completion: {output['text']!r}")


if __name__ == "__main__":
    main()
