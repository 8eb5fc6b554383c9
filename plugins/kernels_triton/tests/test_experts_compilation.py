"""The kernels of mixtures of experts compile for sm_90 as they are meant to, at models' shapes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nanovllm_core.api import Routing
from nanovllm_kernels_triton.experts_choice import (
    MOST_FETCHED,
    ExpertsPlan,
    FewExperts,
    FewPlan,
    GroupedPlan,
    ManyExperts,
    choose_experts,
    memory_for_steps,
)
from nanovllm_kernels_triton.norm_rank import choose_norm_rank, rule_constants
from nanovllm_kernels_triton.norm_route import choose_norm_route
from nanovllm_kernels_triton.route import routing_constants
from nanovllm_kernels_triton.strides import in_units
from nanovllm_kit.aot import SHARED_MEMORY, AotJob, AotReport, compile_kernels
from nanovllm_kit.registers import assert_within_list, compile_jobs

FEW, MANY = "nanovllm_kernels_triton.experts_few", "nanovllm_kernels_triton.experts_many"
HOPPER = SHARED_MEMORY[90]
SHAPES = {  # experts, for each token, hidden size, intermediate size
    "30b-a3b": (128, 8, 2048, 768),
    "v2-lite": (64, 6, 2048, 1408),
    "odd": (60, 4, 1544, 424),
    "narrow": (8, 3, 256, 24),
    "narrower": (5, 2, 6, 2),
}
INDICES = dict.fromkeys(
    ("ids_ptr", "pairs_ptr", "rows_ptr", "tiles_ptr", "num_tiles_ptr"), "*i32:16"
)


def jobs_of(
    shape: str, tokens: int, *, dtype: str = "bf16", capability: int = 90, shared: int = HOPPER,
    plan: ExpertsPlan | None = None,
) -> dict[str, AotJob]:  # fmt: skip
    """The two products of a mixture, as they are launched for so many tokens."""
    num_experts, chosen, hidden, intermediate = SHAPES[shape]
    sizes = (num_experts, hidden, intermediate, 4 if dtype == "fp32" else 2)
    plan = choose_experts(tokens, chosen, *sizes, shared) if plan is None else plan
    arrays = ("x_ptr", "weight_ptr", "hidden_ptr", "result_ptr", "out_ptr", "next_ptr")
    types = {
        **dict.fromkeys(arrays, f"*{dtype}:16"), **INDICES, "weights_ptr": "*fp32:16",
        "x_stride": "i32:16", "out_stride": "i32:16",
        "tile_stride": "i32", "num_pairs": "i32", "num_tokens": "i32",
    }  # fmt: skip
    dependent = {"DEPENDENT": capability >= 90, "CHOSEN": chosen}
    products = {
        "gate_up": (plan.gate_up, {"OUTPUTS": intermediate, "INPUTS": hidden}),
        "down": (plan.down, {"OUTPUTS": hidden, "INPUTS": intermediate}),
    }
    jobs = {}
    for part, (product, constants) in products.items():
        block_n = product.block_n // 2 if part == "gate_up" else product.block_n
        constants |= {"BLOCK_N": block_n, "BLOCK_K": product.block_k, "STAGES": product.num_stages}
        if isinstance(plan, FewExperts):
            kernel, names = f"{FEW}:few_{part}_kernel", FEW_ARGUMENTS[part]
            fetched = {"AHEAD": plan.down.ahead} if part == "down" else {"NEXT": MOST_FETCHED}
            constants |= (FEW_CONSTANTS if part == "down" else {}) | fetched
            constants |= {"LANES": product.lanes, "SIGNAL": product.signal}
        else:
            kernel, names = f"{MANY}:grouped_{part}_kernel", MANY_ARGUMENTS[part]
            if part == "gate_up":
                units, constants["X_UNIT"] = in_units(hidden)
                types["x_stride"] = "i32" if units % 16 else "i32:16"
            constants |= {"BLOCK_M": plan.gate_up.block_m}
            descriptors = descriptors_of(part, dtype, product)
            if product.described:
                names, types = " ".join((names, *descriptors)), types | descriptors
            else:
                constants |= dict.fromkeys(descriptors)
        needed = dependent if part == "gate_up" or isinstance(plan, FewExperts) else {
            "DEPENDENT": dependent["DEPENDENT"]
        }  # fmt: skip
        job = AotJob(
            kernel=kernel,
            signature={name: types[name] for name in names.split()},
            constexprs=constants | needed,
        )
        jobs[f"{part}-{shape}-{tokens}-{dtype}"] = replace(
            job, num_warps=product.num_warps, capability=capability
        )
    return jobs


def descriptors_of(part: str, dtype: str, plan: GroupedPlan) -> dict[str, str]:
    """The types of the descriptors of a product."""
    if part == "gate_up":
        return {"weight_desc": f"tensordesc<{dtype}[1,2,{plan.block_n // 2},{plan.block_k}]>"}
    return {
        "weight_desc": f"tensordesc<{dtype}[1,{plan.block_n},{plan.block_k}]>",
        "hidden_desc": f"tensordesc<{dtype}[{plan.block_m},{plan.block_k}]>",
    }


FEW_ARGUMENTS = {
    "gate_up": "x_ptr ids_ptr weight_ptr hidden_ptr next_ptr num_pairs x_stride",
    "down": "hidden_ptr weights_ptr ids_ptr weight_ptr out_ptr num_tokens out_stride",
}
FEW_CONSTANTS = {"passed_ptr": None, "PASSED": 0, "SCALE": None, "ADD": True}
MANY_ARGUMENTS = {
    "gate_up": "x_ptr pairs_ptr tiles_ptr num_tiles_ptr weight_ptr hidden_ptr tile_stride x_stride",
    "down": "hidden_ptr tiles_ptr num_tiles_ptr weight_ptr result_ptr tile_stride",
}


def route_job(num_experts: int, num_groups: int, num_shared: int = 0) -> AotJob:
    size = num_experts // num_groups
    return AotJob(
        kernel="nanovllm_kernels_triton.route:route_kernel",
        signature={
            "logits_ptr": "*bf16:16", "bias_ptr": "*fp32:16", "weights_ptr": "*fp32:16",
            "ids_ptr": "*i32:16", "logits_stride": "i32:16",
        },
        constexprs={
            "NUM_EXPERTS": num_experts, "TOP_K": 8, "SCALE": 2.5, "SOFTMAX": num_groups == 1,
            "RENORMALIZE": True, "NUM_GROUPS": num_groups, "TOP_GROUPS": -(-num_groups // 2),
            "BEST_TWO": num_groups > 1, "NUM_SHARED": num_shared, "BLOCK_GROUPS": num_groups,
            "BLOCK_EXPERTS": 1 << (size - 1).bit_length(), "BLOCK_SHARED": max(num_shared, 1),
            "DEPENDENT": True,
        },
        num_warps=1,
    )  # fmt: skip


def norm_route_job(num_experts: int, hidden: int, routing: Routing, dtype: str = "bf16") -> AotJob:
    """As it is launched for one row."""
    plan = choose_norm_route(1, num_experts, hidden, 4 if dtype == "fp32" else 2)
    assert plan is not None
    arrays = dict.fromkeys(("x_ptr", "norm_weight_ptr", "weight_ptr", "normed_ptr"), f"*{dtype}:16")
    floats = dict.fromkeys(("bias_ptr", "weights_ptr"), "*fp32:16")
    return AotJob(
        kernel="nanovllm_kernels_triton.norm_route:norm_route_kernel",
        signature={
            **arrays, **floats, "ids_ptr": "*i32:16", "passed_ptr": "*i32:16", "x_stride": "i32:16"
        },
        constexprs={
            "EPS": 1e-6, "INPUTS": hidden, "EXACT": routing.exact_logits,
            **routing_constants(num_experts, routing),
            "BLOCK_N": plan.block_n, "BLOCK_K": 1 << (hidden - 1).bit_length(), "DEPENDENT": True,
        },
        num_warps=plan.num_warps,
    )  # fmt: skip


def norm_rank_job(num_experts: int, hidden: int, routing: Routing) -> AotJob:
    """As it is launched on an H100 for a router without a bias."""
    plan = choose_norm_rank(1, hidden, num_experts, 2, routing, processors=132)
    assert plan is not None
    arrays = dict.fromkeys(("x_ptr", "norm_weight_ptr", "weight_ptr", "normed_ptr"), "*bf16:16")
    return AotJob(
        kernel="nanovllm_kernels_triton.norm_rank:norm_rank_kernel",
        signature={
            **arrays, "passed_ptr": "*i32:16", "weights_ptr": "*fp32:16", "ids_ptr": "*i32:16"
        },
        constexprs={
            "bias_ptr": None, "EPS": 1e-6, "INPUTS": hidden, "EXACT": routing.exact_logits,
            **rule_constants(num_experts, routing),
            "BLOCK_N": plan.block_n, "BLOCK_K": 1 << (hidden - 1).bit_length(),
            "PASS_ONLY": False, "DEPENDENT": True,
        },
        num_warps=plan.num_warps,
    )  # fmt: skip


def down_behind_rank(job: AotJob, num_experts: int) -> AotJob:
    """The down projection that divides by the sum of weights and takes logits out."""
    constants = {**job.constexprs, "PASSED": num_experts, "SCALE": 1.0}
    del constants["passed_ptr"]
    return replace(job, signature={**job.signature, "passed_ptr": "*i32:16"}, constexprs=constants)


def sort_job(kernel: str, block: int, num_warps: int, bins: int = 128) -> AotJob:
    counts = {"counts_ptr": "*i32:16"} if kernel == "place" else {}
    return AotJob(
        kernel=f"{MANY}:{kernel}_pairs_kernel",
        signature={**INDICES, **counts, "num_pairs": "i32", "tile_stride": "i32", "block_m": "i32"},
        constexprs={"BLOCK": block, "BINS": bins, "DEPENDENT": True},
        num_warps=num_warps,
    )


PRODUCTS = {
    name: job
    for shape, tokens in (
        ("30b-a3b", 1), ("v2-lite", 4), ("30b-a3b", 64), ("30b-a3b", 256), ("v2-lite", 512),
        ("odd", 1), ("odd", 16384),
        ("30b-a3b", 16384),
    )
    for name, job in jobs_of(shape, tokens).items()
}  # fmt: skip
BY_POINTERS = GroupedPlan(128, 256, 64, num_warps=8, num_stages=3, per_processor=1)
BY_DESCRIPTORS = {
    f"described-{name}": job
    for plan in (
        replace(BY_POINTERS, described=True),
        GroupedPlan(128, 128, 64, num_warps=4, num_stages=3, per_processor=2, described=True),
    )
    for name, job in jobs_of(
        "v2-lite", plan.block_n, plan=ManyExperts(plan, plan)
    ).items()
}  # fmt: skip
SIDE_BY_SIDE = {
    f"apart-{name}": job
    for name, job in jobs_of(
        "30b-a3b", 4,
        plan=FewExperts(
            FewPlan(16, 512, num_stages=4, lanes=64), FewPlan(8, 1024, num_stages=4, lanes=128)
        ),
    ).items()
}  # fmt: skip
_V3 = Routing(
    top_k=8, scoring="sigmoid", renormalize=True, num_groups=8, top_groups=4, group_score="top2",
    exact_logits=True, num_shared=1,
)  # fmt: skip
NORM_ROUTES = {
    "norm_route-30b-a3b": norm_route_job(128, 2048, Routing(top_k=8, renormalize=True)),
    "norm_route-v2-lite": norm_route_job(
        64, 2048, Routing(top_k=6, exact_logits=True, num_shared=2)
    ),
    "norm_route-v3": norm_route_job(256, 7168, _V3),
    "norm_route-30b-a3b-fp32": norm_route_job(128, 2048, Routing(top_k=8), "fp32"),
    "norm_route-512-experts": norm_route_job(512, 2048, Routing(top_k=10, renormalize=True)),
}
NORM_RANKS = {
    "norm_rank-30b-a3b": norm_rank_job(128, 2048, Routing(top_k=8, renormalize=True)),
    "norm_rank-512-experts": norm_rank_job(512, 2048, Routing(top_k=10, renormalize=True)),
}
JOBS = {
    **PRODUCTS,
    **NORM_ROUTES,
    **NORM_RANKS,
    "down-behind-norm_rank-30b-a3b": down_behind_rank(PRODUCTS["down-30b-a3b-1-bf16"], 128),
    **BY_DESCRIPTORS,
    **SIDE_BY_SIDE,
    **jobs_of("30b-a3b", 1, dtype="fp32"),
    **jobs_of("30b-a3b", 16384, dtype="fp32"),
    "route-128": route_job(128, 1),
    "route-64-and-2-shared": route_job(64, 1, 2),
    "route-256-in-8-groups-and-1-shared": route_job(256, 8, 1),
    "sort-128": sort_job("sort", 128, 4),
    "sort-4096": sort_job("sort", 4096, 8),
    "place": sort_job("place", 1024, 8),
    "place-512-experts": sort_job("place", 1024, 8, bins=512),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, AotReport]:
    return compile_jobs(JOBS)


def test_no_kernel_takes_more_than_its_line(reports: dict[str, AotReport]) -> None:
    """Registers, spills and shared memory are those of the list for this version of Triton."""
    assert_within_list(__file__, reports)


@pytest.mark.parametrize("name", JOBS)
def test_no_kernel_spills(name: str, reports: dict[str, AotReport]) -> None:
    """And each fits the shared memory of Hopper."""
    assert reports[name].spills == 0
    assert reports[name].shared <= HOPPER


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_more_programs_fit_on_a_multiprocessor_than_share_it(
    name: str, reports: dict[str, AotReport]
) -> None:
    """Or programs of the next kernel, which start while these end, would be spread unevenly."""
    part, *shape, tokens, _ = name.split("-")
    num_experts, chosen, hidden, intermediate = SHAPES["-".join(shape)]
    plan = choose_experts(int(tokens), chosen, num_experts, hidden, intermediate, 2, HOPPER)
    product = getattr(plan, part)
    report, threads = reports[name], 32 * product.num_warps
    assert 233472 // (report.shared + 1024) == product.per_processor
    assert 65536 // (-(-report.registers // 8) * 8 * threads) >= product.per_processor


@pytest.mark.parametrize("name", PRODUCTS)
def test_weights_are_fetched_asynchronously_16_bytes_at_a_time(
    name: str, reports: dict[str, AotReport]
) -> None:
    """Steps ahead: nothing is copied before the loop and waited for at once. A residual, of a row's
    tile, is loaded to registers."""
    ptx, constants = reports[name].ptx, JOBS[name].constexprs
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10|cp\.async\.bulk\.tensor", ptx)
    assert ptx.count("ld.global.v4") <= ("ADD" in constants)
    narrow = len(re.findall(r"ld\.global\.b16", ptx))
    assert narrow <= (constants["BLOCK_N"] if "ADD" in constants else 0)


@pytest.mark.parametrize(
    "name", [name for name in PRODUCTS if isinstance(JOBS[name].constexprs.get("NEXT"), int)]
)
def test_the_next_product_s_weight_is_on_its_way_before_the_experts_wait(
    name: str, reports: dict[str, AotReport]
) -> None:
    """Marked to stay in the L2 cache, through which the experts stream meanwhile."""
    ptx = reports[name].ptx
    assert ptx.index("prefetch.global.L2::evict_last") < ptx.index("griddepcontrol.wait")


@pytest.mark.parametrize("name", [name for name in PRODUCTS if int(name.split("-")[-2]) > 16])
def test_grouped_products_leave_a_product_running_while_they_load(
    name: str, reports: dict[str, AotReport]
) -> None:
    """Products of whole warp groups, of which one may still run when the next step begins."""
    ptx = reports[name].ptx
    assert "wgmma.mma_async" in ptx
    assert "wgmma.wait_group.sync.aligned 1;" in ptx


@pytest.mark.parametrize("name", BY_DESCRIPTORS)
def test_described_tiles_are_read_by_the_copy_engine(
    name: str, reports: dict[str, AotReport]
) -> None:
    """All but rows of x, which are gathered; and a product is still running meanwhile."""
    ptx = reports[name].ptx
    assert "cp.async.bulk.tensor" in ptx
    assert ("cp.async.cg" in ptx) == ("gate_up" in name)
    assert "wgmma.wait_group.sync.aligned 1;" in ptx


def test_programs_of_both_kernels_of_few_pairs_fit_side_by_side(
    reports: dict[str, AotReport],
) -> None:
    """Two of each, with four stages: the next kernel's fetch weights while these still compute."""
    assert sum(2 * (reports[name].shared + 1024) for name in SIDE_BY_SIDE) <= 233472


@pytest.mark.parametrize("name", [*NORM_ROUTES, *NORM_RANKS])
def test_a_router_s_weights_are_on_their_way_before_the_wait(
    name: str, reports: dict[str, AotReport]
) -> None:
    """And the norm's: 16 bytes a load, of each thread 64 numbers of a row and 64 of the norm."""
    ptx = reports[name].ptx
    wait = ptx.index("griddepcontrol.wait")
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("ld.global")
    assert ptx[:wait].count("ld.global.v4") >= 16
    assert not re.search(r"ld\.global\.b(16|32)", ptx[:wait])


def test_one_warp_chooses_experts_without_barriers(reports: dict[str, AotReport]) -> None:
    """Of a row that one warp can hold; what is left are those behind loads and polls."""
    for name in ("norm_route-30b-a3b", "norm_route-v2-lite"):
        assert JOBS[name].num_warps == 1
        assert reports[name].ptx.count("bar.sync") <= 4


def test_one_warp_ranks_experts_without_shared_memory(reports: dict[str, AotReport]) -> None:
    """All programs poll: the one barrier is that behind which weights are on their way."""
    report = reports["norm_rank-30b-a3b"]
    assert JOBS["norm_rank-30b-a3b"].num_warps == 1
    assert report.shared == 0
    assert report.ptx.count("bar.sync") <= 1


@pytest.mark.parametrize("capability", [80, pytest.param(86, marks=pytest.mark.slow), 100, 120])
@pytest.mark.slow
def test_every_plan_fits_the_shared_memory_of_other_gpus(capability: int) -> None:
    """What takes more than the GPU grants a program does not start; tiles of every height."""
    granted = SHARED_MEMORY[capability]
    shared = memory_for_steps(granted, capability // 10)
    jobs = [
        job
        for shape, tokens in (
            ("30b-a3b", 1),
            *(("v2-lite", count) for count in (64, 128, 512, 2048)),
        )
        for job in jobs_of(shape, tokens, capability=capability, shared=shared).values()
    ]
    heights = {job.constexprs["BLOCK_M"] for job in jobs if "BLOCK_M" in job.constexprs}
    assert heights == {16, 32, 64, 128}
    for job, report in zip(jobs, compile_kernels(jobs), strict=True):
        assert report.shared <= granted, f"{report.shared} bytes: {job}"


@pytest.mark.slow
def test_narrow_experts_compile() -> None:
    """Of small models, and of a rank among many: less of a row than a line of the cache."""
    jobs = [
        job
        for shape, tokens in (("narrow", 1), ("narrow", 512), ("narrower", 2))
        for dtype in ("bf16", "fp32")
        for job in jobs_of(shape, tokens, dtype=dtype).values()
    ]
    assert all(report.spills == 0 for report in compile_kernels(jobs))


def test_all_regimes_are_compiled_here() -> None:
    """Pairs that are few, and tiles of every height."""
    plans = [
        choose_experts(tokens, 8, 128, 2048, 768, 2, HOPPER) for tokens in (1, 64, 256, 512, 16384)
    ]
    assert isinstance(plans[0], FewExperts)
    heights = [plan.gate_up.block_m for plan in plans if isinstance(plan, ManyExperts)]
    assert heights == [16, 32, 64, 128]
