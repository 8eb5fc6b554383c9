"""Train the demo checkpoint from scratch: data, tokenizer, weights and held-out accuracy.

One command does it all; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build_tokenizer
import corpus
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

ROW_TOKENS = 512
ROWS_PER_CHUNK = 500
PLAIN_TEXT_SHARE = 0.05
PROMPT_WEIGHT = 0.1
MAX_NEW_TOKENS = 160
EVAL_SEED = 2026

Model = Any  # A Qwen3ForCausalLM, most of whose methods transformers leaves untyped.


@dataclass(frozen=True)
class Options:
    """The command line."""

    out: Path
    steps: int
    minutes: float
    batch: int
    rows: int
    workers: int
    lr: float
    seed: int
    eval_items: int
    interim_evals: int
    device: str
    compile: bool


# --- Data --------------------------------------------------------------------------------------


def chat_pieces(rng: random.Random) -> Iterator[tuple[str, bool]]:
    """Yield an endless conversation as (text, is it the model's own) pieces."""
    separator = ""
    while True:
        prompt, reply = corpus.train_turn(rng)
        yield separator + build_tokenizer.prompt_text(prompt), False
        yield reply + build_tokenizer.IM_END, True
        separator = "\n"


def story_pieces(rng: random.Random) -> Iterator[tuple[str, bool]]:
    """Yield endless plain-text stories, each closed by the end-of-text token."""
    while True:
        yield corpus.train_story(rng).text + build_tokenizer.END_OF_TEXT, True


def make_row(rng: random.Random, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Fill one row of exactly ROW_TOKENS tokens; it starts where a conversation starts."""
    ids: list[int] = []
    own: list[bool] = []
    source = story_pieces if rng.random() < PLAIN_TEXT_SHARE else chat_pieces
    for text, is_own in source(rng):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        own += [is_own] * len(piece)
        if len(ids) >= ROW_TOKENS:
            break
    return ids[:ROW_TOKENS], own[:ROW_TOKENS]


def make_chunk(task: tuple[str, int, int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Make one chunk of rows; the chunk's own seed makes it the same in any process."""
    tokenizer_json, seed, chunk = task
    rng = random.Random(f"{seed}:{chunk}")
    tokenizer = Tokenizer.from_str(tokenizer_json)
    rows = [make_row(rng, tokenizer) for _ in range(ROWS_PER_CHUNK)]
    return (
        np.array([ids for ids, _ in rows], dtype=np.int16),
        np.array([own for _, own in rows], dtype=np.bool_),
    )


def make_data(tokenizer: Tokenizer, options: Options) -> tuple[Tensor, Tensor]:
    """Make every training row on all cores: token ids, and which are the model's own words."""
    chunks = math.ceil(options.rows / ROWS_PER_CHUNK)
    tasks = [(tokenizer.to_str(), options.seed, chunk) for chunk in range(chunks)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        made = pool.map(make_chunk, tasks, chunksize=1)
    ids, own = (np.concatenate(part) for part in zip(*made, strict=True))
    return torch.from_numpy(ids), torch.from_numpy(own)


def batches(
    data: tuple[Tensor, Tensor], options: Options, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield shuffled batches for ever, epoch after epoch."""
    ids, own = (part.to(device) for part in data)
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        order = torch.randperm(len(ids), generator=generator).to(device)
        for start in range(0, len(order) - options.batch + 1, options.batch):
            chosen = order[start : start + options.batch]
            yield ids[chosen].long(), own[chosen]


# --- Model and training ------------------------------------------------------------------------


def model_config() -> Qwen3Config:
    """Describe the demo model: six layers of width 256, head size 64, two KV heads."""
    return Qwen3Config(
        vocab_size=build_tokenizer.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=build_tokenizer.MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def weighted_loss(logits: Tensor, ids: Tensor, own: Tensor) -> Tensor:
    """Next-token loss in which the model's own words count most."""
    weights = own[:, 1:].float() * (1 - PROMPT_WEIGHT) + PROMPT_WEIGHT
    logits = logits[:, :-1].float()
    losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def make_optimizer(model: nn.Module, options: Options, device: torch.device) -> torch.optim.AdamW:
    """Make AdamW that decays matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    fused = device.type == "cuda"
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=fused)


def learning_rate(progress: float, step: int, peak: float) -> float:
    """Warm up over 300 steps, then follow a cosine down to a hundredth."""
    warm = min(1.0, (step + 1) / 300)
    return peak * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def compile_layers(model: Model) -> None:
    """Compile each decoder layer (all share one graph); the shapes never change."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def train(
    model: Model,
    data: tuple[Tensor, Tensor],
    options: Options,
    device: torch.device,
    interim: Callable[[], None],
) -> None:
    """Run the training loop until the steps or the minutes are used up."""
    loss_of = weighted_loss
    if options.compile:
        compile_layers(model)
        loss_of = torch.compile(weighted_loss, dynamic=False)
    optimizer = make_optimizer(model, options, device)
    source = batches(data, options, device)
    interim_at = [(i + 1) / (options.interim_evals + 1) for i in range(options.interim_evals)]
    started, progress, step, paused = time.monotonic(), 0.0, 0, 0.0
    model.train()
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, step, options.lr)
        ids, own = next(source)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids, use_cache=False).logits
            loss = loss_of(logits, ids, own)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == 1:
            loss.item()  # The first step compiles; the clock starts after it.
            started = time.monotonic()
        if step % 20 == 0:
            latest = loss.item()  # Waits for the device, so that the clock is true.
            elapsed = time.monotonic() - started - paused
            progress = max(step / options.steps, elapsed / 60 / options.minutes)
            if step % 200 == 0:
                print(f"step {step} loss {latest:.4f} {elapsed:.0f} s {progress:.0%}", flush=True)
        if interim_at and progress >= interim_at[0]:
            interim_at.pop(0)
            began = time.monotonic()
            interim()
            paused += time.monotonic() - began
    print(f"trained {step} steps in {time.monotonic() - started - paused:.0f} s", flush=True)


# --- Evaluation --------------------------------------------------------------------------------


@torch.inference_mode()
def greedy(
    model: Model, tokenizer: Tokenizer, prompts: Sequence[str], device: torch.device
) -> list[str]:
    """Reply to every prompt greedily, as one left-padded batch."""
    encoded = [
        tokenizer.encode(build_tokenizer.prompt_text(p), add_special_tokens=False).ids
        for p in prompts
    ]
    width = max(map(len, encoded))
    ids = torch.tensor([[0] * (width - len(e)) + e for e in encoded], device=device)
    mask = torch.tensor([[0] * (width - len(e)) + [1] * len(e) for e in encoded], device=device)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        eos_token_id=[2, 0],
        pad_token_id=0,
    )
    return [tokenizer.decode(row).strip() for row in out[:, width:].tolist()]


def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    items: Sequence[corpus.Item],
    device: torch.device,
    batch: int = 400,
) -> tuple[dict[str, float], list[tuple[corpus.Item, str]]]:
    """Score exact matches per task and list the mistakes."""
    ordered = sorted(items, key=lambda item: (len(item.answer), len(item.prompt)))
    replies: list[str] = []
    for start in range(0, len(ordered), batch):
        prompts = [item.prompt for item in ordered[start : start + batch]]
        replies += greedy(model, tokenizer, prompts, device)
    right: dict[str, list[bool]] = {task: [] for task in corpus.TASKS}
    wrong = []
    for item, reply in zip(ordered, replies, strict=True):
        right[item.task].append(reply == item.answer)
        if reply != item.answer:
            wrong.append((item, reply))
    scores = {task: sum(marks) / len(marks) for task, marks in right.items()}
    scores["overall"] = sum(map(sum, right.values())) / len(ordered)
    return scores, wrong


def rounded_copy(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    """Copy the model with its weights rounded to bf16, to compute in ``dtype``."""
    twin: Model = Qwen3ForCausalLM(model.config)
    twin.to(device)
    twin.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    return twin.to(dtype).eval()


# --- Checkpoint --------------------------------------------------------------------------------


def save_checkpoint(
    model: Model, tokenizer: Tokenizer, items: Sequence[corpus.Item], folder: Path
) -> None:
    """Write the checkpoint folder: configs, tokenizer, bf16 weights and held-out items."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().bfloat16().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_diff_dict() | {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "head_dim": model.config.head_dim,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0})
    build_tokenizer.save(tokenizer, folder)
    lines = (
        json.dumps(
            {
                "task": item.task,
                "messages": [{"role": "user", "content": item.prompt}],
                "answer": item.answer,
            }
        )
        for item in items
    )
    (folder / "eval.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def parse_options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=10_000, help="at most this many steps")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most this long")
    parser.add_argument("--batch", type=int, default=256, help="rows per step")
    parser.add_argument("--rows", type=int, default=200_000, help="different training rows")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="data processes")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="fixes data and initialisation")
    parser.add_argument("--eval-items", type=int, default=200, help="held-out items per task")
    parser.add_argument("--interim-evals", type=int, default=3, help="evaluations on the way")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="where to train")
    compiling = argparse.BooleanOptionalAction
    parser.add_argument("--compile", action=compiling, default=default == "cuda")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Make the data, train, round, evaluate and save."""
    options = parse_options()
    device = torch.device(options.device)
    began = time.monotonic()
    tokenizer = build_tokenizer.build(options.seed)
    items = corpus.held_out_items(EVAL_SEED, options.eval_items)
    data = make_data(tokenizer, options)
    share = data[1].float().mean().item()
    print(f"{len(data[0])} rows, {share:.0%} own, {time.monotonic() - began:.0f} s", flush=True)

    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    model: Model = Qwen3ForCausalLM(model_config())
    model.to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters on {device}", flush=True)

    def interim() -> None:
        scores, _ = evaluate(rounded_copy(model, device, torch.float32), tokenizer, items, device)
        print({task: round(score, 3) for task, score in scores.items()}, flush=True)

    train(model, data, options, device, interim)
    save_checkpoint(model, tokenizer, items, options.out)
    torch.set_float32_matmul_precision("highest")
    for dtype in (torch.float32, torch.bfloat16):
        twin = rounded_copy(model, device, dtype)
        scores, wrong = evaluate(twin, tokenizer, items, device)
        print(dtype, json.dumps(scores), flush=True)
        for item, reply in wrong:
            print(f"  {item.task}: {item.prompt!r} -> {reply!r}, not {item.answer!r}", flush=True)


if __name__ == "__main__":
    main()
