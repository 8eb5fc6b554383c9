"""Starts with empty and full caches, part by part, and each kernel's way. Parent runs children."""

import json, os, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
OUT = os.environ.get("OUT", "/tmp")


def one(mode, model):
    began = float(os.environ["BEGAN"])
    t_py = time.time()
    from nanovllm_core import LLM, SamplingParams

    t_core = time.time()
    log = {"kernels": [], "launches": [], "parts": []}
    import torch

    t_torch = time.time()
    if not mode.startswith("plain"):
        import triton
        from triton import knobs
        from nanovllm_kernels_triton import compilation as C
        from nanovllm_core.worker import graphs, runner, worker
        import threading

        times = {}

        def listener(src, metadata, metadata_group, times, cache_hit):
            log["kernels"].append(
                dict(
                    name=src.name if hasattr(src, "name") else src.fn.__name__,
                    hit=cache_hit,
                    end=time.time() - began,
                    total=times.total / 1e6,
                    ir=times.ir_initialization / 1e6,
                    stages={k: round(v / 1e6, 3) for k, v in times.lowering_stages},
                    thread=threading.current_thread().name,
                )
            )

        knobs.compilation.listener = listener
        C.CompileAhead._listen_ = C.CompileAhead._listen

        def both(self, *, src, cache_hit, **k):
            listener(src=src, cache_hit=cache_hit, **k)
            self._listen_(src=src, cache_hit=cache_hit)

        C.CompileAhead._listen = both
        submit = C.CompileAhead.submit

        def timed_submit(self, key, compile_kernel, store):
            row = {"submit": time.time() - began}
            log["launches"].append(row)

            def compile_it():
                row["begin"] = time.time() - began
                kernel = compile_kernel()
                row["compiled"] = time.time() - began
                row["name"] = kernel.metadata.name
                row["thread_cpu"] = time.thread_time()
                return kernel

            result = submit(self, key, compile_it, store)
            self.raw_futures[-1].add_done_callback(lambda _: row.update(loaded=time.time() - began))
            return result

        C.CompileAhead.submit = timed_submit

        def timed(owner, name):
            f = getattr(owner, name)

            def g(*a, **k):
                t = time.time()
                r = f(*a, **k)
                torch.cuda.synchronize()
                log["parts"].append((name, round(t - began, 3), round(time.time() - t, 3)))
                return r

            setattr(owner, name, g)

        for name in ("__init__", "trial_step", "trial_captured_step"):
            timed(runner.ModelRunner, name)
        timed(worker, "compile_launches")
        timed(worker, "load_model")
        real = graphs._capture

        def cap(launch, pool):
            t = time.time()
            g = real(launch, pool)
            log.setdefault("captures", []).append(
                (round(t - began, 3), round(time.time() - t, 4), len(log["launches"]))
            )
            return g

        graphs._capture = cap
        if mode == "before":
            real_compile = worker.compile_launches

            def captured_alone(kernels, device, first, others):
                *_, smallest = first
                real_compile(kernels, device, [smallest], others)

            worker.compile_launches = captured_alone
            enter = C.CompileAhead.__enter__

            def with_texts(self):
                r = enter(self)
                vars(knobs.compilation)["store_binary_only"] = False
                return r

            C.CompileAhead.__enter__ = with_texts
        log["before_llm"] = time.time() - began
    import logging

    logging.basicConfig(level=logging.WARNING)
    t_patch = time.time()
    with LLM(model, load_format="dummy", limits={"max_model_len": 4096}) as llm:
        ready = time.time()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
        token = time.time()
        outs = llm.generate(
            [[1, 2, 3], list(range(5, 300)), [7] * 20],
            SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
            use_tqdm=False,
        )
        outs += llm.generate(
            [list(range(5, 3000))],
            SamplingParams(
                max_tokens=4,
                temperature=0.8,
                top_k=100,
                top_p=0.9,
                repetition_penalty=1.2,
                seed=1,
                ignore_eos=True,
            ),
            use_tqdm=False,
        )
        print(
            "TOKENS",
            hash(tuple(tuple(o.token_ids) for o in outs)),
            [o.token_ids[:4] for o in outs],
            "blocks",
            llm.info.num_blocks,
            flush=True,
        )
        result = {
            "mode": mode,
            "model": os.path.basename(model),
            "python": t_py - began,
            "core": t_core - t_py,
            "torch": t_torch - t_core,
            **llm.info.start_seconds,
            "LLM": ready - t_patch,
            "ready": ready - began,
            "token": token - ready,
            "after_first": time.time() - token,
        }
    print(
        "PARTS",
        json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}),
        flush=True,
    )
    if not mode.startswith("plain"):
        json.dump(log, open(f"{OUT}/cold_{mode}_{os.path.basename(model)}.json", "w"))
        print("parts", log["parts"], "before LLM", round(log["before_llm"], 2))
        k = log["kernels"]
        total = {}
        for d in k:
            for n, v in [("ir", d["ir"]), *d["stages"].items(), ("total", d["total"])]:
                total[n] = round(total.get(n, 0) + v, 2)
        print("kernels", len(k), "hits", sum(d["hit"] for d in k), total)
        for r in sorted(log["launches"], key=lambda r: -(r.get("loaded", 0) - r["submit"]))[
            : 44 if mode == "cold" else 12
        ]:
            print(
                "  %-24s submit %.2f begin %.2f compiled %.2f loaded %.2f"
                % (
                    r.get("name"),
                    r["submit"],
                    r.get("begin", 0),
                    r.get("compiled", 0),
                    r.get("loaded", 0),
                )
            )
        for d in sorted(k, key=lambda d: -d["total"])[:16]:
            print(
                "  %-24s total %.2f ir %.2f %s %s"
                % (d["name"], d["total"], d["ir"], d["stages"], d["thread"])
            )
        cs = log.get("captures", [])
        print("captures", len(cs), "first", cs[:6], "last", cs[-1:])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one(*sys.argv[1:])
        sys.exit()
    t0 = time.time()
    budget = float(os.environ.get("BUDGET", "56"))
    m06, m8 = "benchmarks/configs/qwen3-0.6b", "benchmarks/configs/qwen3-8b"

    def run(mode, model, cache, limit):
        limit = min(limit, budget - (time.time() - t0))
        if limit < 4:
            print("--", mode, model, "left out")
            return
        try:
            p = subprocess.run(
                [sys.executable, os.path.abspath(__file__), mode, model],
                env={**os.environ, "BEGAN": repr(time.time()), "TRITON_CACHE_DIR": cache},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
                cwd=ROOT,
            )
            print(
                f"== {mode} {model} rc {p.returncode}\n"
                + (
                    p.stdout
                    if len(p.stdout) < 12000
                    else p.stdout[:9000] + "\n...\n" + p.stdout[-2500:]
                ),
                flush=True,
            )
        except Exception as e:
            print("==", mode, model, "FAILED", repr(e)[-1500:], flush=True)
        print(f"-- ended at {time.time() - t0:.1f} s", flush=True)

    print("cores", os.cpu_count(), len(os.sched_getaffinity(0)), os.getloadavg(), flush=True)
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "nanovllm_core", "plugins"], cwd=ROOT, timeout=20
    )
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch, triton, nanovllm_core.frontend.llm, nanovllm_core.worker.worker; torch.zeros(1, device='cuda')",
        ],
        cwd=ROOT,
        timeout=20,
    )
    print(f"-- pages and bytecode ready at {time.time() - t0:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        run("cold", m06, a, 22)
        run("plain", m06, a, 9)
        run("before", m06, b, 20)
        run("plain_b", m06, b, 9)
        run("plain", m06, a, 9)
        run("plain_8b_cold", m8, a, 14)
        run("plain_8b_warm", m8, a, 9)
