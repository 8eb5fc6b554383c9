"""Tables of docs/performance.md: long prompts, and short ones behind long contexts, from files."""

from __future__ import annotations

from results_tables import Results, Tables, table

MODELS = {"qwen3_0_6b": "0.6B", "qwen3_8b": "8B", "deepseek_v2_lite": "DeepSeek-V2-Lite"}

LONG = {
    "qwen3_0_6b": "0.6B",
    "qwen3_8b": "8B",
    "qwen3_30b_a3b": "30B-A3B",
    "deepseek_v2_lite": "DeepSeek-V2-Lite",
}


def long_prompts_table(results: Results) -> str:
    """Milliseconds until one long prompt has its first token, by model; no entry: not measured."""
    times = {
        model: {
            one["length"]: one["ms"] for one in results.entries(f"bursts_long_{name}", "bursts")
        }
        for name, model in LONG.items()
    }
    lengths = sorted({length for of_model in times.values() for length in of_model})
    rows = [
        (f"{length:,}", *(_short(one.get(length)) for one in times.values())) for length in lengths
    ]
    return table(("tokens", *times), rows)


def _short(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    return f"{milliseconds:,.{int(milliseconds < 100)}f}"


def turns_table(results: Results) -> str:
    """Milliseconds until the next turn of a conversation has its first token, by model."""
    files = [
        (f"{model}{how}", results.entries(f"turns_{name}{end}", "turns"))
        for name, model in MODELS.items()
        for end, how in (("", ""), ("_whole", ", whole"))
        if f"turns_{name}{end}" in results.records
    ]
    rows = [
        (f"{lines[0]['turn']}", f"{lines[0]['context']:,}", *(f"{one['ms']:.1f}" for one in lines))
        for lines in zip(*(entries for _, entries in files), strict=True)
    ]
    return table(("new tokens", "cached before", *(name for name, _ in files)), rows)


def attention_turns_table(results: Results) -> str:
    """Microseconds of a layer's attention, split and whole, and of the floor."""
    entries = results.entries("attention_turns", "turns")
    turns = list(dict.fromkeys(tuple(one["turn"]) for one in entries))
    heads = list(dict.fromkeys(tuple(one["heads"]) for one in entries))
    found = {(tuple(one["turn"]), tuple(one["heads"])): one for one in entries}
    rows = []
    for turn in turns:
        num_seqs, num_queries, context = turn
        times = (
            "{split:.0f} / {whole:.0f} ({floor:.0f})".format(**found[turn, one]) for one in heads
        )
        rows.append((f"{num_seqs} x {num_queries}", f"{context:,}", *times))
    names = (f"{q} heads, {kv} KV" if kv else f"{q} heads, latent rows" for q, kv in heads)
    return table(("queries", "keys before", *names), rows)


TURNS: Tables = {
    "long prompts": long_prompts_table,
    "turns": turns_table,
    "attention turns": attention_turns_table,
}
