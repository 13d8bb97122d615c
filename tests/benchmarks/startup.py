"""Seconds from the command line to the first update, with a cold and a warm cache of JAX.

The phases are those of the command line itself, called in a process of its own for a run of one
update. JAX reports how long each trace, lowering and compilation took; overlapping ones count once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from throughput import ROOT, machine, write

COLUMNS = ("import", "trace", "lower", "compile", "first update", "process")
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


def union(intervals):
    """Length of a union of intervals."""
    total, end = 0.0, float("-inf")
    for low, high in sorted(intervals):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total


def worker(arguments):
    """Run the command line in this process and return the seconds of its phases."""
    start = time.perf_counter()
    sys.path.insert(0, str(ROOT))
    import ppo_jax

    spans, first = {name: [] for name in ("import", *EVENTS.values())}, []
    spans["import"].append((start, time.perf_counter()))
    import jax

    import_gymnax = ppo_jax.import_gymnax

    def timed_import():  # of gymnax: the first PPOConfig imports it
        begin = time.perf_counter()
        module = import_gymnax()
        spans["import"].append((begin, time.perf_counter()))
        return module

    def listen(event, duration, **_):
        if event in EVENTS and not first:
            now = time.perf_counter()
            spans[EVENTS[event]].append((now - duration, now))

    class Report(ppo_jax.RunReport):
        def __call__(self, *values):
            first.append(time.perf_counter())
            return super().__call__(*values)

    ppo_jax.RunReport, ppo_jax.import_gymnax = Report, timed_import
    jax.monitoring.register_event_duration_secs_listener(listen)
    code = ppo_jax.main(arguments)
    if code or not first:
        sys.exit(f"error: the command line ended with code {code}")
    phases = {name: union(times) for name, times in spans.items()}
    return {**phases, "first update": first[0] - start}


def spawn(args, folder, number):
    """One process of the command line, with its cache in the folder."""
    arguments = ["--env", args.env, "--n-seeds", str(args.seeds), "--total-timesteps", "1"]
    arguments += ["--run-dir", str(folder / f"run-{number}")]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environ["XDG_CACHE_HOME"] = str(folder)
    start = time.perf_counter()
    command = [sys.executable, __file__, "--worker", *arguments]
    done = subprocess.run(command, check=False, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {(done.stderr.strip() or 'the command line failed').splitlines()[-1]}")
    seconds = time.perf_counter() - start
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"process": seconds}


def main():
    """Start the command line with an empty cache, then with the one it left; print medians."""
    if sys.argv[1:2] == ["--worker"]:
        print("\n" + json.dumps(worker(sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="startup.json", help="JSON to write")
    args = parser.parse_args()

    runs = {"cold": [], "warm": []}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for number, cache in enumerate(runs):
                runs[cache].append(spawn(args, Path(folder), number))
    print(f"{args.env}, {args.seeds} seeds, seconds")
    print(f"{'cache':<6}" + "".join(f"{name:>14}" for name in COLUMNS))
    for cache, results in runs.items():
        medians = (statistics.median(result[name] for result in results) for name in COLUMNS)
        print(f"{cache:<6}" + "".join(f"{value:>14.2f}" for value in medians))
    write(args.out, {"machine": machine(), "env": args.env, "n_seeds": args.seeds, **runs})


if __name__ == "__main__":
    main()
