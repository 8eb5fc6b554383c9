"""The first ten minutes: complete texts, ask a question, watch the answer come.

    python examples/quickstart.py

Uses the embedded model, so nothing is downloaded; it needs the plugins sdpa, qwen3 and demo.
"""

from __future__ import annotations

from nanovllm_core import LLM, SamplingParams


def main() -> None:
    with LLM("demo", max_model_len=512, max_num_seqs=16) as llm:
        print(f"Attention runs on: {llm.info.attention}\n")

        # Prompts of one call run together, as one batch.
        prompts = ["Once upon a time", "Once upon a time there was a clever fox"]
        for output in llm.generate(prompts, SamplingParams(temperature=0.6, seed=1, max_tokens=32)):
            print(f"{output.finish_reason}: ...{output.text!r}")

        # A conversation goes through the checkpoint's chat template.
        question = [{"role": "user", "content": "Sort: tree apple moon cat"}]
        [answer] = llm.chat(question, SamplingParams(temperature=0))
        print(f"\n{question[0]['content']}\n{answer.text}")

        # The same as it comes. Leaving the loop early would end the request.
        question = [{"role": "user", "content": "Reverse: 7 42 19 3"}]
        print(f"\n{question[0]['content']}")
        for output in llm.stream(question, SamplingParams(temperature=0)):
            print(output.new_text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
