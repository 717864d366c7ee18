"""What the library costs, measured: `python -m benchmarks`. `docs/benchmarks.md` has the results."""
# Without this file a package of the same name, which fairscale installs, would be found instead.
