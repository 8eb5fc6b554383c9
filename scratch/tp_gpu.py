"""On one GPU: NCCL in a graph, one rank over sockets beside one in the process; on two: two ranks.

BUDGET=58 bounds it. Every part is tried by itself; lines are flushed.
"""
import faulthandler, json, os, signal, sys, tempfile, threading, time, traceback
from pathlib import Path

BEGAN = time.time()
BUDGET = float(os.environ.get("BUDGET", 56))
OUT = Path(os.environ.get("OUT", "/tmp"))
RESULTS = {}
faulthandler.enable()


def left():
    return BUDGET - (time.time() - BEGAN)


def say(*words):
    print(f"[{time.time() - BEGAN:5.1f}]", *words, flush=True)


def stop():
    say("OUT OF TIME"); faulthandler.dump_traceback(all_threads=True)
    for pid in PIDS:
        try: os.killpg(pid, signal.SIGKILL)
        except OSError: pass
    save(); os._exit(3)


def save():
    (OUT / "tp.json").write_text(json.dumps(RESULTS, indent=1, default=str))


PIDS = []
timer = threading.Timer(BUDGET + 2, stop); timer.daemon = True; timer.start()

from importlib.metadata import PackageNotFoundError, version
try:
    version("nanovllm-executor-parallel")
except PackageNotFoundError:
    folder = Path(tempfile.mkdtemp()); info = folder / "nanovllm_executor_parallel-0.1.0.dist-info"; info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nanovllm-executor-parallel\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[nanovllm.executors]\nparallel = nanovllm_executor_parallel.plugin\n")
    sys.path.append(str(folder)); sys.path.append(str(Path("plugins/executor_parallel").resolve()))


def part(function):
    if left() < 8:
        say(function.__name__, "left out: no time"); return
    try:
        RESULTS[function.__name__] = function()
        say(function.__name__, json.dumps(RESULTS[function.__name__], default=str))
    except BaseException as error:
        RESULTS[function.__name__] = f"FAILED {type(error).__name__}: {error}"
        say(function.__name__, "FAILED"); traceback.print_exc(); sys.stderr.flush()
    save()


import torch
NUM_GPUS = torch.cuda.device_count()
say(torch.__version__, torch.cuda.get_device_name(0), NUM_GPUS, "GPUs")
from nanovllm_core import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=32)
PARAMS = [GREEDY, SamplingParams(temperature=0.9, seed=3, max_tokens=32),
          SamplingParams(temperature=0.9, seed=3, top_k=5, logprobs=2, max_tokens=32)]
PROMPT = "Write a story about a fox named Mia."
SETTINGS = dict(max_num_seqs=16, max_model_len=512, max_num_batched_tokens=512, gpu_memory_utilization=0.3, dtype="float32", attention="sdpa", kernels="torch")
# float32 for tokens: sdpa and torch's kernels, which need no compilation; then bf16 with triton.
FAST = dict(max_num_seqs=16, max_model_len=512, max_num_batched_tokens=512, gpu_memory_utilization=0.3, attention="triton")


def run(size, executor, settings):
    began = time.time()
    with LLM("demo", executor=executor, tensor_parallel_size=size, **settings) as llm:
        executor = llm.engine._executor
        if hasattr(executor, "_ranks"):
            PIDS.extend(one.pid for one in executor._ranks)
        started = time.time() - began
        tokens = [one.token_ids for one in llm.generate([PROMPT] * 3, PARAMS, use_tqdm=False)]
        rates = {}
        for rows in (1, 16):
            long = SamplingParams(temperature=0, ignore_eos=True, max_tokens=400)
            llm.generate([[5] * 8] * rows, SamplingParams(temperature=0, ignore_eos=True, max_tokens=20), use_tqdm=False)
            at = time.time(); llm.generate([[5] * 8] * rows, long, use_tqdm=False)
            rates[rows] = round((time.time() - at) / 400 * 1e6, 1)
        info = llm.info
        at = time.time()
    return tokens, dict(start=round(started, 2), parts=info.start_seconds, graphs=info.cuda_graphs, us_per_step=rates, blocks=info.num_blocks, device=info.device, close=round(time.time() - at, 2))


TOKENS = {}


def fp32_single():
    TOKENS["fp32"], told = run(1, "single", SETTINGS); return told


def fp32_parallel_1():
    tokens, told = run(1, "parallel", SETTINGS); told["same_tokens"] = tokens == TOKENS.get("fp32"); return told


def fp32_parallel_2():
    tokens, told = run(2, "parallel", SETTINGS); told["same_tokens"] = tokens == TOKENS.get("fp32"); return told


def bf16_single():
    TOKENS["bf16"], told = run(1, "single", FAST); return told


def bf16_parallel_1():
    tokens, told = run(1, "parallel", FAST); told["same_tokens"] = tokens == TOKENS.get("bf16"); return told


def bf16_parallel_2():
    tokens, told = run(2, "parallel", FAST); told["same_tokens"] = tokens == TOKENS.get("bf16"); return told


def nccl_in_a_graph():
    """A group of one rank by the plugin's own door: meets, reduces, gathers, captured and replayed."""
    import socket
    from nanovllm_executor_parallel import group
    from nanovllm_executor_parallel.messages import Start
    for key, value in {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}.items():
        os.environ.setdefault(key, value)
    server = socket.create_server(("127.0.0.1", 0)); port = server.getsockname()[1]
    at = time.time()
    start = Start(rank=0, world_size=1, setup=b"", port=port, listening=os.dup(server.fileno()), timeout_seconds=20, log_level=30)
    progress = group.Progress()
    context = group.join(start, "cuda:0", progress)
    told = {"connect": round(time.time() - at, 2)}
    tp = context.tensor_parallel
    x = torch.randn(4, 8, device="cuda"); expected = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        y = tp.all_reduce(x.mul(2)); z = tp.all_gather(y[:, :3])
    graph.replay(); torch.cuda.synchronize()
    told["right"] = bool(torch.equal(y, expected * 2) and torch.equal(z, expected[:, :3] * 2))
    told["min"] = context.min_over_ranks(7)
    group.disconnect()
    return told


def killed_2():
    """SIGKILL and SIGSTOP of rank 1 in a stream on two GPUs: seconds to the error, and its words."""
    told = {}
    for kill in (signal.SIGKILL, signal.SIGSTOP):
        llm = LLM("demo", executor={"name": "parallel", "options": {"stall_seconds": 3}}, tensor_parallel_size=2, **SETTINGS)
        ranks = [one.pid for one in llm.engine._executor._ranks]; PIDS.extend(ranks)
        stream = llm.stream(PROMPT, SamplingParams(temperature=0, ignore_eos=True, max_tokens=400)); next(stream)
        at = time.time(); os.kill(ranks[1], kill)
        try: list(stream)
        except Exception as error: told[kill.name] = [round(time.time() - at, 2), f"{type(error).__name__}: {error}"[:300]]
        llm.close()
        told[kill.name].append([not Path(f"/proc/{pid}").exists() for pid in ranks])
    return told


if NUM_GPUS >= 2:
    for one in (fp32_single, fp32_parallel_2, bf16_single, bf16_parallel_2, killed_2): part(one)
else:
    for one in (bf16_single, bf16_parallel_1, nccl_in_a_graph, fp32_single, fp32_parallel_1): part(one)
say("done")
