"""What the library costs, measured: `python -m benchmarks`. `docs/benchmarks.md` has the results."""
