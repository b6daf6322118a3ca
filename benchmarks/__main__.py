"""Print how fast and how large runs are: ``python -m benchmarks [NAME ...]``.

Every run has a process of its own, so that its peak memory can be told. The parts of a run are
medians over repetitions after a first one that loads compiled code.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time

from benchmarks.cases import GROWTH, RUNS, jittered, legal, parts, plans
from simulator.report.text import table

REPEATS = 5


def measure(name: str) -> dict[str, float]:
    """Return medians of the parts of a run, and the peak memory of this process."""
    build, engine, folded = RUNS[name]
    parts(build(), engine, folded)
    repeats = 1 if engine == "reference" else REPEATS
    samples = [parts(build(), engine, folded) for _ in range(repeats)]
    medians = {key: statistics.median(s[key] for s in samples) for key in samples[0]}
    medians["total"] = statistics.median(s["build"] + s["engine"] + s["report"] for s in samples)
    return medians | {"peak": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def sweep(count: int) -> dict[str, float]:
    """Return the seconds of one plan in a sweep over `count`, from its table to its summary."""
    tables = [t for t, _ in legal(plans(), count)]
    for t in tables[:3]:
        parts(t, "compiled", True)
    seconds, ops = [], []
    for t in tables:
        begun = time.perf_counter()
        ops.append(parts(t, "compiled", True)["ops"])
        seconds.append(time.perf_counter() - begun)
    return {"plans": len(tables), "median": statistics.median(seconds), "total": sum(seconds),
            "mean": statistics.mean(seconds), "ops": statistics.median(ops)}  # fmt: skip


def apart(*arguments: str) -> dict[str, float]:
    """Return what a process of its own measures."""
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print the table of all runs, growth exponents, and the sweep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="runs to measure; all by default: "
                        + "; ".join(RUNS))  # fmt: skip
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--sweep", type=int, default=1000, help="plans of the sweep")
    parser.add_argument("--jitter-only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sweep-only", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    write = sys.stdout.write
    if chosen.one or chosen.sweep_only:
        found = measure(chosen.one) if chosen.one else sweep(chosen.sweep)
        write(json.dumps(found))
        return
    if chosen.jitter_only:
        write(json.dumps(jittered(chosen.jitter_only)))
        return
    names = chosen.names or list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"unknown run {unknown[0]!r}; there are {'; '.join(RUNS)}")
    runs = {name: apart("--one", name) for name in names}
    rows = [["run", "ops", "build ms", "engine ms", "report ms", "total ms", "engine Mops/s",
             "peak MB"]]  # fmt: skip
    for name, m in runs.items():
        rows.append([
            name, f"{m['ops']:,.0f}", *(f"{1e3 * m[k]:.1f}" for k in ("build", "engine", "report",
            "total")), f"{m['ops'] / m['engine'] / 1e6:.2f}", f"{m['peak'] / 1e6:.0f}",
        ])  # fmt: skip
    write(table(rows) + "\n\n")
    for group in GROWTH:
        if all(name in runs for name in group):
            small, large = runs[group[0]], runs[group[-1]]
            grown = math.log(large["ops"] / small["ops"])
            powers = [math.log(large[k] / small[k]) / grown for k in ("engine", "total")]
            write(f"growth with ops of {group[0]} to {group[-1]}: engine exponent {powers[0]:.2f}, "
                  f"total {powers[1]:.2f}\n")  # fmt: skip
    if not chosen.names:
        s = apart("--sweep-only", "--sweep", str(chosen.sweep))
        write(f"sweep of {s['plans']:.0f} plans of GPT-3 175B on 1,024 ranks, folded, description "
              f"to summary: median {1e3 * s['median']:.2f} ms, mean {1e3 * s['mean']:.2f} ms, "
              f"{s['total']:.1f} s in all (median {s['ops']:,.0f} ops unfolded)\n")  # fmt: skip
        j = apart("--jitter-only", "100")
        write(f"{j['samples']:.0f} samples of Llama-3 405B's step under noise, each replayed "
              f"without: {j['total']:.1f} s ({j['ops']:,.0f} ops a sample)\n")  # fmt: skip


if __name__ == "__main__":
    main()
