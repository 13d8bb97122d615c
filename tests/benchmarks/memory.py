"""Memory of compiled runs of 10^6 to 10^8 steps, and the bytes they return; nothing is run."""

import argparse
import sys
from pathlib import Path

from throughput import CASES, import_ours, machine, our_config, purejaxrl_train, versions, write


def lowered(system, args, updates):
    """All seeds' training as one function on one device, lowered, and the shapes it returns."""
    import jax

    case, keys = CASES[args.case], jax.random.split(jax.random.key(0), args.seeds)
    if system == "purejaxrl":
        function, arguments = jax.vmap(purejaxrl_train(args.purejaxrl, case, updates)), (keys,)
    else:
        function = jax.vmap(import_ours().train, in_axes=(None, 0))
        arguments = (our_config(case, updates), keys)
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


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add, steps = parser.add_argument, (10**6, 10**7, 10**8)
    add("--case", choices=CASES, default="cartpole-64")
    add("--seeds", type=int, default=8)
    add("--steps", nargs="+", type=int, default=steps, help="steps of each seed")
    add("--purejaxrl", metavar="PATH", help="a checkout of PureJaxRL, to see its memory too")
    add("--out", default="memory.json", help="JSON to write")
    args = parser.parse_args()
    if args.purejaxrl and not (Path(args.purejaxrl) / "purejaxrl" / "ppo.py").is_file():
        sys.exit(f"error: {args.purejaxrl} is no checkout of PureJaxRL")
    return args


def main():
    """Compile each run and print its bytes."""
    args, rows = parse(), []
    print(f"{args.case}, {args.seeds} seeds")
    print(f"{'system':<9} {'steps/seed':>12} {'temporary MB':>13} {'returned MB':>12}")
    for system in ("ours", "purejaxrl") if args.purejaxrl else ("ours",):
        for steps in args.steps:
            result = row(system, args, steps)
            rows.append(result)
            temporary, returned = result["temporary_bytes"] / 1e6, result["returned_bytes"] / 1e6
            numbers = f"{result['steps']:>12,} {temporary:>13,.1f} {returned:>12,.2f}"
            print(f"{system:<9} {numbers}", flush=True)
    write(args.out, {"machine": machine(), "versions": versions(), "case": args.case, "rows": rows})


if __name__ == "__main__":
    main()
