"""Compiled memory of runs of 10^6, 10^7 and 10^8 steps, and the bytes of what they return: nothing is run."""

import argparse
import sys
from pathlib import Path

from throughput import CASES, machine, our_config, purejaxrl_train, versions, write


def lowered(system, args, updates):
    """All seeds' training as one function on one device, lowered, and the shapes that it returns."""
    import jax

    keys = jax.random.split(jax.random.key(0), args.seeds)
    if system == "purejaxrl":
        function, arguments = jax.vmap(purejaxrl_train(args.purejaxrl, CASES[args.case], updates)), (keys,)
    else:
        config = our_config(CASES[args.case], updates)
        from ppo_jax import train

        function, arguments = jax.vmap(train, in_axes=(None, 0)), (config, keys)
    return jax.jit(function).lower(*arguments), jax.eval_shape(function, *arguments)


def row(system, args, steps):
    """Bytes of one compiled run."""
    import jax

    updates = -(-steps // CASES[args.case].rollout)
    lowering, shapes = lowered(system, args, updates)
    memory = lowering.compile().memory_analysis()
    return {
        "system": system,
        "steps": updates * CASES[args.case].rollout,
        "n_seeds": args.seeds,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "returned_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)),
    }


def main():
    """Compile each run and print its bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="cartpole-64")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", nargs="+", type=int, default=(10**6, 10**7, 10**8), help="steps of each seed")
    parser.add_argument("--purejaxrl", metavar="PATH", help="a checkout of PureJaxRL, to see its memory too")
    parser.add_argument("--out", default="memory.json", help="JSON to write")
    args = parser.parse_args()
    if args.purejaxrl and not (Path(args.purejaxrl) / "purejaxrl" / "ppo.py").is_file():
        sys.exit(f"error: {args.purejaxrl} is no checkout of PureJaxRL")

    rows = []
    print(f"{args.case}, {args.seeds} seeds\n{'system':<9} {'steps/seed':>12} {'temporary MB':>13} {'returned MB':>12}")
    for system in ("ours", "purejaxrl") if args.purejaxrl else ("ours",):
        for steps in args.steps:
            rows.append(row(system, args, steps))
            temporary, returned = (rows[-1][name] / 1e6 for name in ("temporary_bytes", "returned_bytes"))
            print(f"{system:<9} {rows[-1]['steps']:>12,} {temporary:>13,.1f} {returned:>12,.2f}", flush=True)
    write(args.out, {"machine": machine(), "versions": versions(), "case": args.case, "rows": rows})


if __name__ == "__main__":
    main()
