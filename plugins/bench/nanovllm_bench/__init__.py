"""Benchmarks as a product: workloads, runs, and result files that say what really ran."""
