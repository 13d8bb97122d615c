"""Environment steps per second of ppo_jax against PureJaxRL, Stable-Baselines3, SBX or its past.

Each measurement is a process of its own. The processes of two systems alternate, and what counts is
the median and the range of the ratios within the pairs: absolute times are those of one machine on
one day. README.md here says more.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import types
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [path for path in sys.path if path != HERE]  # for the sake of Python's `profile`
N_STEPS, N_EPOCHS, N_MINIBATCHES = 128, 4, 4
LEARNING_RATE, GAMMA, GAE_LAMBDA, CLIP, ENT_COEF, MAX_GRAD_NORM = 2.5e-4, 0.99, 0.95, 0.2, 0.01, 0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and how many steps a timed run takes, all seeds together."""

    env: str
    n_envs: int
    policy: str
    net_arch: tuple
    steps: int
    rnn_hidden_size: int = 64
    sub_traj_len: int = 16

    @property
    def rollout(self):
        """Transitions that one update of one seed learns from."""
        return self.n_envs * N_STEPS


CASES = {
    "cartpole-4": Case("CartPole-v1", 4, "mlp", (64, 64), 400_000),
    "cartpole-64": Case("CartPole-v1", 64, "mlp", (64, 64), 500_000),
    "cartpole-1024": Case("CartPole-v1", 1024, "mlp", (64, 64), 800_000),
    "breakout-mlp-64": Case("Breakout-MinAtar", 64, "mlp", (64, 64), 160_000),
    "breakout-cnn-64": Case("Breakout-MinAtar", 64, "cnn", (), 16_384),
    "pendulum-64": Case("Pendulum-v1", 64, "mlp", (64, 64), 400_000),
    "cartpole-gru-64": Case("CartPole-v1", 64, "gru", (), 65_536, rnn_hidden_size=128),
}
PEERS = ("purejaxrl", "sb3", "sbx")
VERSIONS = ("ours", "before")  # of ppo_jax: this checkout's and that of --before
# Each of these gets a virtual environment of its own, and runs one seed at a time.
PACKAGES = {"sb3": ["stable-baselines3"], "sbx": ["sbx-rl"]}
SLOWER = {"sb3": 8, "sbx": 8}  # these take fewer steps: their rate needs no more


def updates_of(case, n_seeds, slower=1):
    """Number of updates in which the seeds together take about the case's steps; at least one."""
    return max(1, case.steps // (case.rollout * n_seeds * slower))


# ------------------------------------------------------------------------------------- this project


def import_ours(folder=ROOT):
    """The folder's `ppo_jax`, or the one that this process has imported already."""
    if "ppo_jax" not in sys.modules:
        sys.path.insert(0, str(folder))
    return importlib.import_module("ppo_jax")


def our_config(case, updates):
    """The benchmark's PPOConfig: what it doesn't name has no part in it."""
    return import_ours().PPOConfig(
        env=case.env,
        policy=case.policy,
        net_arch=case.net_arch,
        rnn_hidden_size=case.rnn_hidden_size,
        sub_traj_len=case.sub_traj_len,
        activation="tanh",
        n_envs=case.n_envs,
        n_steps=N_STEPS,
        batch_size=case.rollout // N_MINIBATCHES,
        n_epochs=N_EPOCHS,
        total_timesteps=updates * case.rollout,
        learning_rate=LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        clip_range=CLIP,
        clip_range_vf=None,
        ent_coef=ENT_COEF,
        vf_coef=0.5,
        max_grad_norm=MAX_GRAD_NORM,
        target_kl=None,
    )


def compile_ours(folder, case, n_seeds, updates):
    """A function that trains once and waits, and the seconds that its compilation took.

    The seconds are None where only the first call tells.
    """
    import jax

    ppo_jax = import_ours(folder)  # older versions make a device of every core as they are imported
    use_every_core = getattr(ppo_jax, "use_every_core", None)
    if use_every_core:
        use_every_core()  # while JAX hasn't started
    config = our_config(case, updates)
    keys = jax.random.split(jax.random.key(0), n_seeds)
    return lambda: jax.block_until_ready(ppo_jax.train_population(config, keys)), None


def temporary_bytes(case, updates):
    """Temporary device memory of one agent's compiled update, by XLA's own account."""
    import jax

    ppo_jax, config = import_ours(), our_config(case, updates)
    agent = jax.eval_shape(ppo_jax.init_agent, config, jax.random.key(0))
    compiled = jax.jit(ppo_jax.update).lower(config, agent).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def compile_jitted(function, *arguments):
    """The compiled function bound to its arguments, and the seconds of tracing and compiling."""
    import jax

    start = time.perf_counter()
    compiled = function.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    return lambda: jax.block_until_ready(compiled(*arguments)), seconds


# ---------------------------------------------------------------------------------------- PureJaxRL


def compile_purejaxrl(checkout, case, n_seeds, updates):
    """As compile_ours, for PureJaxRL's `ppo.py` or, for a Gaussian, `ppo_continuous_action.py`."""
    import jax

    train, key = purejaxrl_train(checkout, case, updates), jax.random.key(0)
    if n_seeds == 1:
        return compile_jitted(jax.jit(train), key)
    return compile_jitted(jax.jit(jax.vmap(train)), jax.random.split(key, n_seeds))


def purejaxrl_train(checkout, case, updates):
    """PureJaxRL's `train(key)` with this benchmark's environment, network and hyperparameters."""
    name = "ppo_continuous_action" if case.env == "Pendulum-v1" else "ppo"
    module = import_purejaxrl(checkout, name)
    patch_purejaxrl(module, case)
    return module.make_train(
        {
            "ENV_NAME": case.env,
            "NUM_ENVS": case.n_envs,
            "NUM_STEPS": N_STEPS,
            "TOTAL_TIMESTEPS": updates * case.rollout,
            "UPDATE_EPOCHS": N_EPOCHS,
            "NUM_MINIBATCHES": N_MINIBATCHES,
            "LR": LEARNING_RATE,
            "ANNEAL_LR": False,
            "GAMMA": GAMMA,
            "GAE_LAMBDA": GAE_LAMBDA,
            "CLIP_EPS": CLIP,
            "ENT_COEF": ENT_COEF,
            "VF_COEF": 1.0,  # its value loss has a factor 1/2 that ours has not
            "MAX_GRAD_NORM": MAX_GRAD_NORM,
            "ACTIVATION": "tanh",
            "NORMALIZE_ENV": False,
            "DEBUG": False,
        }
    )


def import_purejaxrl(checkout, name):
    """Import a module of the checkout, with stand-ins for packages that are not installed."""
    folder = Path(checkout) / "purejaxrl"
    if not (folder / f"{name}.py").is_file():
        sys.exit(f"error: {checkout} has no purejaxrl/{name}.py; --purejaxrl must name a checkout")
    stand_in("brax.envs.wrappers.training", "brax", EpisodeWrapper=None, AutoResetWrapper=None)
    stand_in("navix", "navix")
    distributions = {c.__name__: c for c in (Categorical, MultivariateNormalDiag)}
    stand_in("distrax", "distrax", **distributions)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def stand_in(name, package, **attributes):
    """Put a module of these attributes, and its parents, where the package can't be imported."""
    if package in sys.modules or importlib.util.find_spec(package):
        return
    parent = None
    for part in name.split("."):
        path = f"{parent.__name__}.{part}" if parent else part
        module = sys.modules.setdefault(path, types.ModuleType(path))
        module.__version__ = "stand-in"
        if parent:
            setattr(parent, part, module)
        parent = module
    vars(parent).update(attributes)


def patch_purejaxrl(module, case):
    """Give the module gymnax 1.0's environments, a safe initialiser and the case's network."""
    import gymnax
    import jax

    def make(name):
        env, params = gymnax.make(name)
        return LegacyEnv(env), params

    if jax.default_backend() == "cpu":
        module.orthogonal = sequential_orthogonal
    if case.env == "Pendulum-v1":
        module.BraxGymnaxWrapper = lambda name: make(name)[0]
        module.ClipAction = functools.partial(module.ClipAction, low=-2.0, high=2.0)
        module.ActorCritic = gaussian_mlp(module)
    else:
        module.gymnax = types.SimpleNamespace(make=make)
    if case.policy == "cnn":
        module.ActorCritic = categorical_cnn(module)


class LegacyEnv:
    """An environment of gymnax 1.0 behind the five values and the info that `step` had before."""

    def __init__(self, env):
        from gymnax.wrappers.compat import LegacyStepAPIWrapper

        self._env = LegacyStepAPIWrapper(env)

    def __getattr__(self, name):
        return getattr(self._env, name)

    def step(self, key, state, action, params=None):
        """Keep `info` as small as it was: PureJaxRL returns all of it, final observations too."""
        *rest, info = self._env.step(key, state, action, params)
        return *rest, {"discount": info["discount"]}

    def observation_space(self, params=None):
        """The space under these or the default parameters."""
        return self._env.observation_space(params or self._env.default_params)


def sequential_orthogonal(scale=1.0):
    """The orthogonal initialiser, one seed after the other.

    Batched QRs can deadlock XLA's thread pool on a CPU.
    """
    import jax

    def init(key, shape, dtype="float32"):
        orthogonal = jax.nn.initializers.orthogonal(scale)
        return jax.custom_batching.sequential_vmap(lambda k: orthogonal(k, shape, dtype))(key)

    return init


def dense(module, size, scale):
    """A dense layer with the module's initialiser."""
    from flax import linen as nn

    return nn.Dense(size, kernel_init=module.orthogonal(scale))


def gaussian_mlp(module):
    """Two tanh networks of two 64-unit layers with a Gaussian: PureJaxRL has 256 units there."""
    from flax import linen as nn
    from jax import numpy as jnp

    class ActorCritic(nn.Module):
        action_dim: int
        activation: str = "tanh"

        @nn.compact
        def __call__(self, x):
            mean, value = self.tower(x, self.action_dim, 0.01), self.tower(x, 1, 1.0)
            log_std = self.param("log_std", nn.initializers.zeros, (self.action_dim,))
            return module.distrax.MultivariateNormalDiag(mean, jnp.exp(log_std)), value[..., 0]

        def tower(self, x, size, scale):
            for _ in range(2):
                x = nn.tanh(dense(module, 64, 2**0.5)(x))
            return dense(module, size, scale)(x)

    return ActorCritic


def categorical_cnn(module):
    """The MinAtar network of ppo_jax, which PureJaxRL has none of."""
    from flax import linen as nn

    class ActorCritic(nn.Module):
        action_dim: int
        activation: str = "relu"

        @nn.compact
        def __call__(self, x):
            x = x.reshape((*x.shape[:-1], 10, 10, -1)).astype("float32")
            x = nn.Conv(16, (3, 3), padding="VALID", kernel_init=module.orthogonal(2**0.5))(x)
            x = nn.relu(x).reshape((*x.shape[:-3], -1))
            x = nn.relu(dense(module, 128, 2**0.5)(x))
            logits, value = dense(module, self.action_dim, 0.01)(x), dense(module, 1, 1.0)(x)
            return module.distrax.Categorical(logits=logits), value[..., 0]

    return ActorCritic


class Categorical:
    """What PureJaxRL uses of `distrax.Categorical`."""

    def __init__(self, logits):
        import jax

        self.log_probs = jax.nn.log_softmax(logits)

    def sample(self, seed):
        """Draw an action per row."""
        import jax

        return jax.random.categorical(seed, self.log_probs)

    def log_prob(self, action):
        """Log-probability of an action per row."""
        from jax import numpy as jnp

        return jnp.take_along_axis(self.log_probs, action[..., None], axis=-1)[..., 0]

    def entropy(self):
        """Entropy per row."""
        from jax import numpy as jnp

        return -jnp.sum(jnp.exp(self.log_probs) * self.log_probs, axis=-1)


class MultivariateNormalDiag:
    """What PureJaxRL uses of `distrax.MultivariateNormalDiag`."""

    def __init__(self, loc, scale_diag):
        from jax import numpy as jnp

        self.loc, self.scale = loc, jnp.broadcast_to(scale_diag, loc.shape)

    def sample(self, seed):
        """Draw an action per row."""
        import jax

        return self.loc + self.scale * jax.random.normal(seed, self.loc.shape)

    def log_prob(self, action):
        """Log-density of an action per row."""
        from jax.scipy.stats import norm

        return norm.logpdf(action, self.loc, self.scale).sum(-1)

    def entropy(self):
        """Differential entropy per row."""
        from jax import numpy as jnp

        return jnp.sum(0.5 + 0.5 * jnp.log(2 * jnp.pi) + jnp.log(self.scale), axis=-1)


# ------------------------------------------------------------------------ Stable-Baselines3 and SBX


def compile_stable_baselines(name, case, updates):
    """Like compile_ours; the first call of the function compiles what SBX has to compile."""
    from stable_baselines3.common.env_util import make_vec_env

    algorithm = __import__("stable_baselines3" if name == "sb3" else "sbx").PPO
    model = algorithm(
        "MlpPolicy",
        make_vec_env(case.env, n_envs=case.n_envs),
        n_steps=N_STEPS,
        batch_size=case.rollout // N_MINIBATCHES,
        n_epochs=N_EPOCHS,
        learning_rate=LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        clip_range=CLIP,
        ent_coef=ENT_COEF,
        vf_coef=0.5,
        max_grad_norm=MAX_GRAD_NORM,
        device="cpu",
        seed=0,
    )
    return lambda: model.learn(updates * case.rollout), None


def python_of(name, cache, pip_args):
    """The Python of the peer's virtual environment, made on first use."""
    folder = Path(cache).expanduser() / name
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        print(f"making {folder} with {' '.join(PACKAGES[name])}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        command = [*install, *PACKAGES[name], *shlex.split(pip_args)]
        if subprocess.run(command, check=False).returncode:
            packages = " ".join(PACKAGES[name])
            sys.exit(f"error: pip could not install {packages} in {folder}; see --pip-args")
        done.touch()
    return str(python)


# ------------------------------------------------------------------------------------------ workers


def compile_worker(args, name):
    """The named system's function to time, and its compile seconds."""
    case = CASES[args.case]
    if name in VERSIONS:
        folder = args.before if name == "before" else ROOT
        return compile_ours(folder, case, args.n_seeds, args.updates)
    if name == "purejaxrl":
        return compile_purejaxrl(args.purejaxrl, case, args.n_seeds, args.updates)
    return compile_stable_baselines(name, case, args.updates)


def seconds(function):
    """Wall seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(args):
    """Compile, run once to warm up and once to time; the line that a worker prints."""
    run, compile_s = compile_worker(args, args.worker)
    first, run_s = seconds(run), seconds(run)
    result = {
        "worker": args.worker,
        "case": args.case,
        "n_seeds": args.n_seeds,
        "steps": args.updates * CASES[args.case].rollout * args.n_seeds,
        "compile_s": max(0.0, first - run_s) if compile_s is None else compile_s,
        "run_s": run_s,
        "versions": versions(),
    }
    if args.memory and args.worker in VERSIONS:
        result["temporary_bytes"] = temporary_bytes(CASES[args.case], args.updates)
    return result


def measure_pair(args):
    """Both systems compiled in one process and run in turn: for an accelerator, to save starts."""
    ours, ours_compile = compile_worker(args, "ours")
    peer, peer_compile = compile_worker(args, "purejaxrl")
    warm = seconds(ours), seconds(peer)
    times = [(seconds(ours), seconds(peer)) for _ in range(args.pairs)]
    if ours_compile is None:
        ours_compile = warm[0] - times[0][0]
    return {
        "case": args.case,
        "n_seeds": args.n_seeds,
        "steps": args.updates * CASES[args.case].rollout * args.n_seeds,
        "compile_s": [ours_compile, peer_compile],
        "run_s": times,
        "versions": versions(),
    }


def versions():
    """Versions of what this process has imported, of that which matters."""
    names = ("jax", "flax", "gymnax", "distrax", "torch", "stable_baselines3", "sbx")
    return {name: version(name) for name in names if name in sys.modules}


def version(name):
    """A module's own word, or its package's."""
    return getattr(sys.modules[name], "__version__", None) or importlib.metadata.version(name)


def reason(stderr):
    """The line of a traceback that names the error: JAX prints more after it."""
    lines = stderr.strip().splitlines() or ["no message"]
    error = re.compile(r"(error|[\w.]+(Error|Exception|Interrupt)):")
    return ([line for line in lines if error.match(line)] or lines)[-1]


def spawn(args, worker, case, n_seeds, updates, timeout, memory=False):
    """Run a worker in a process of its own.

    Returns its result, or None after a line that says why there is none.
    """
    python = python_of(worker, args.cache, args.pip_args) if worker in PACKAGES else sys.executable
    command = [python, __file__, "--worker", worker, "--case", case, "--n-seeds", str(n_seeds)]
    command += ["--updates", str(updates), "--pairs", str(args.pairs)]
    command += ["--purejaxrl", args.purejaxrl] if args.purejaxrl else []
    command += ["--before", args.before] if args.before else []
    command += ["--memory"] if memory else []
    environ = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    run = functools.partial(subprocess.run, check=False, capture_output=True, text=True)
    try:
        done = run(command, env=environ, timeout=timeout)
    except subprocess.TimeoutExpired:
        print(f"{worker} {case} x {n_seeds}: no result within {timeout:.0f} s", file=sys.stderr)
        return None
    if done.returncode:
        print(f"{worker} {case} x {n_seeds}: {reason(done.stderr)}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


# -------------------------------------------------------------------------------------- comparisons


def compare(args, peer, case, n_seeds):
    """Alternating processes of this project and the peer, as one row of the table."""
    workers = {"ours": n_seeds, peer: 1 if peer in PACKAGES else n_seeds}
    pairs = []
    for i in range(args.pairs):
        pair = []
        for worker, n in workers.items():
            updates = args.updates or updates_of(CASES[case], n, SLOWER.get(worker, 1))
            memory = args.memory and i == 0  # it is the same every time
            pair.append(spawn(args, worker, case, n, updates, args.timeout, memory))
        if None in pair:
            return None
        pairs.append(pair)
    rates = [[rate(r) for r in pair] for pair in pairs]
    compiles = [[r["compile_s"] for r in pair] for pair in pairs]
    row = summary(peer, case, n_seeds, rates, compiles, [r["versions"] for r in pairs[0]])
    if args.memory:
        for who, result in zip(("ours", "peer"), pairs[0], strict=True):
            row[f"{who}_temporary_bytes"] = result.get("temporary_bytes")
    return row


def rate(result):
    """Environment steps per second, all seeds together, without compilation."""
    return result["steps"] / result["run_s"]


def summary(peer, case, n_seeds, rates, compiles, packages):
    """The medians and the ratios of pairs of (ours, peer)."""
    ratios = [ours / theirs for ours, theirs in rates]
    median = [statistics.median(column) for column in zip(*rates, strict=True)]
    return {
        "peer": peer,
        "case": case,
        "n_seeds": n_seeds,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ours_steps_per_s": median[0],
        "peer_steps_per_s": median[1],
        "ours_compile_s": statistics.median(c[0] for c in compiles),
        "peer_compile_s": statistics.median(c[1] for c in compiles),
        "pairs_steps_per_s": rates,
        "versions": packages,
    }


def header(memory=False):
    """The names of the columns."""
    names = f"{'case':<16} {'seeds':>5} {'peer':<9} {'ratio':>6} {'range':>13}"
    names += f" {'ours/s':>12} {'peer/s':>12} {'compile s':>13}"
    return f"{names} {'temporary MB':>17}" if memory else names


def line(row):
    """A row of the table."""
    spread = f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"
    compiles = f"{row['ours_compile_s']:.1f} / {row['peer_compile_s']:.1f}"
    rates = f"{row['ours_steps_per_s']:>12,.0f} {row['peer_steps_per_s']:>12,.0f}"
    what = f"{row['case']:<16} {row['n_seeds']:>5} {row['peer']:<9}"
    printed = f"{what} {row['ratio']:>6.2f} {spread:>13} {rates} {compiles:>13}"
    if "ours_temporary_bytes" not in row:
        return printed
    sizes = (row[f"{who}_temporary_bytes"] for who in ("ours", "peer"))
    temporary = " / ".join("-" if size is None else f"{size / 1e6:.2f}" for size in sizes)
    return f"{printed} {temporary:>17}"


def takes_part(peer, case):
    """Whether the case is run with the peer."""
    if CASES[case].policy == "gru":
        return peer == "before"
    return peer not in PACKAGES or case in ("cartpole-4", "cartpole-64")


def plan(args):
    """The comparisons asked for: every case with every peer that takes part in it."""
    for case in args.cases:
        for n_seeds in args.seeds:
            for peer in args.peers:
                if takes_part(peer, case):
                    yield peer, case, n_seeds


def compare_all(args):
    """Run the plan, print and write each row as it comes."""
    rows = []
    print(header(args.memory), flush=True)
    for peer, case, n_seeds in plan(args):
        row = compare(args, peer, case, n_seeds)
        if row:
            rows.append(row)
            print(line(row), flush=True)
            write(args.out, {"machine": machine(), "rows": rows})


# ------------------------------------------------------------------------------------- accelerators


def compare_on_gpu(args):
    """Two comparisons with many seeds, then the rate against their number, within the budget."""
    end = time.monotonic() + args.budget
    report = {"machine": machine(), "rows": [], "sweep": []}
    pairs = [("cartpole-4", 2048, 100), ("breakout-mlp-64", 128, 15)]
    if args.small:
        pairs = [("cartpole-4", 8, 4), ("breakout-mlp-64", 2, 1)]
    print(header())
    for case, n_seeds, updates in pairs:
        result = spawn(args, "pair", case, n_seeds, updates, max(1, end - time.monotonic()))
        if result:
            rates = [[result["steps"] / s for s in pair] for pair in result["run_s"]]
            compiles, packages = [result["compile_s"]], result["versions"]
            row = summary("purejaxrl", case, n_seeds, rates, compiles, packages)
            report["rows"].append(row)
            print(line(row), flush=True)
            write(args.out, report)
    print(f"\n{'case':<16} {'seeds':>5} {'ours/s':>14} {'compile s':>10}")
    for n_seeds in (1, 2) if args.small else (1, 4, 16, 64, 256, 1024, 4096):
        updates, left = 4 if args.small else 50, max(1, end - time.monotonic())
        result = spawn(args, "ours", "cartpole-4", n_seeds, updates, left)
        if result:
            report["sweep"].append({**result, "steps_per_s": rate(result)})
            numbers = f"{rate(result):>14,.0f} {result['compile_s']:>10.1f}"
            print(f"{'cartpole-4':<16} {n_seeds:>5} {numbers}", flush=True)
            write(args.out, report)


def machine():
    """What the numbers were taken on."""
    python = platform.python_version()
    return {"platform": platform.platform(), "cpus": os.cpu_count(), "python": python}


def write(path, report):
    """Write the report as JSON."""
    Path(path).write_text(json.dumps(report, indent=1) + "\n")


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--purejaxrl", metavar="PATH", help="a checkout of github.com/luchris429/purejaxrl")
    add("--before", metavar="PATH", help="a folder with another ppo_jax.py, for the peer `before`")
    add("--peers", nargs="+", choices=(*PEERS, "before"), default=PEERS)
    add("--cases", nargs="+", choices=CASES, default=tuple(CASES))
    add("--seeds", nargs="+", type=int, default=(1, 8), help="numbers of seeds")
    add("--pairs", type=int, default=5, help="pairs of runs in each comparison")
    add("--updates", type=int, help="updates of each run (default: about the steps of the case)")
    add("--memory", action="store_true", help="temporary memory of an update too (not with --gpu)")
    add("--timeout", type=float, default=900, help="seconds after which a process is given up")
    add("--out", default="throughput.json", help="JSON to write")
    add("--cache", default="~/.cache/ppo_jax_benchmarks", help="folder of virtual environments")
    add("--pip-args", default="", help="more arguments for their pip, as one string")
    add("--gpu", action="store_true", help="2,048 and 128 seeds with PureJaxRL, then 1 to 4,096")
    add("--budget", type=float, default=470, help="seconds that --gpu may take")
    add("--small", action="store_true", help="a trial: few updates, two pairs, few seeds")
    add("--worker", choices=("pair", *VERSIONS, *PEERS), help=argparse.SUPPRESS)
    add("--case", choices=CASES, help=argparse.SUPPRESS)
    add("--n-seeds", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def check(args):
    """Exit with a line where a system that is asked for isn't there."""
    systems = [args.worker] if args.worker else ["pair"] if args.gpu else args.peers
    checkout = Path(args.purejaxrl or "") / "purejaxrl" / "ppo.py"
    if not {"purejaxrl", "pair"}.isdisjoint(systems) and not checkout.is_file():
        sys.exit("error: --purejaxrl must name a checkout of PureJaxRL (or choose other --peers)")
    if "before" in systems and not (args.before and (Path(args.before) / "ppo_jax.py").is_file()):
        sys.exit("error: --before must name a folder with a ppo_jax.py (or choose other --peers)")


def main():
    """Measure as a worker, or compare."""
    args = parse()
    check(args)
    if args.small:
        args.pairs, args.updates = 2, args.updates or 2
    if args.worker:
        slower = SLOWER.get(args.worker, 1)
        args.updates = args.updates or updates_of(CASES[args.case], args.n_seeds, slower)
        print(json.dumps(measure_pair(args) if args.worker == "pair" else measure(args)))
    elif args.gpu:
        compare_on_gpu(args)
    else:
        compare_all(args)


if __name__ == "__main__":
    main()
