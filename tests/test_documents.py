"""The README's commands, examples and changes, its claims about files, and the notebook."""

import ast
import builtins
import csv
import dataclasses
import dis
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import types

import jax
import numpy as np
import pytest
from helpers import jit

import ppo_jax

ROOT = pathlib.Path(__file__).parent.parent
SOURCE = (ROOT / "ppo_jax.py").read_text()
README = (ROOT / "README.md").read_text()
TEST_COMMAND = "pip install -r requirements.txt && pytest"
(JOB,) = [
    code.strip()
    for code in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    if "#SBATCH" in code
]
# What most tests cost is compiling, which takes two thirds of the time like this.
QUICKLY = "--xla_backend_optimization_level=1"
if jax.__version_info__ < (0, 11):  # newer ones have no such option
    QUICKLY += " --xla_cpu_use_fusion_emitters=false"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def section(title):
    return README.split(f"\n## {title}")[1].split("\n## ")[0]


FILES = {  # that the README shows, by the name in their first line
    block.split()[1]: block for block in blocks("python") if re.match(r"# \w+\.py\n", block)
}
EXAMPLES = [block for block in blocks("python") if block not in FILES.values()]


@pytest.fixture
def folder(tmp_path):
    """A folder with the files that the README's commands and examples need."""
    for name in ("ppo_jax.py", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder, *command, code=0):
    """Run a command in a folder, where `python` is this one; returns what it printed."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    env["XLA_FLAGS"] = f"{QUICKLY} {os.environ.get('XLA_FLAGS', '')}"
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


# Commands and examples


def test_every_command_runs(folder):
    others = (TEST_COMMAND, JOB)  # this very test, and one for a cluster
    commands = [block for block in blocks("bash") if block.strip() not in others]
    assert len(commands) == len(blocks("bash")) - 2
    for command in commands:
        # Fewer steps show as much; the first command is the main job and runs as it stands.
        fewer = {"3e5": "2e4", "4e5": "3e4", "1e5": "1e4"}
        fewer["--n-seeds 8"] = "--n-seeds 2 --total-timesteps 1e4"
        for words, shorter in fewer.items():
            command = command.replace(words, shorter)
        run(folder, "bash", "-ec", command)
    (first,) = folder.glob("runs/CartPole-v1-*")
    table = re.findall(r"^\| `(.*?)`", section("What a run leaves"), re.MULTILINE)
    assert set(table) == {path.name for path in (folder / "runs/sweep").iterdir()}
    for run_dir in (first, folder / "runs/ten", folder / "runs/longer", folder / "runs/corridor"):
        assert set(table) == {path.name for path in run_dir.iterdir()} | {"sweep.png"}
    with open(first / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"setting", "seed", "timesteps", "return", "length", "policy_loss"} <= set(rows[0])
    assert len(rows) == 4 * ppo_jax.PPOConfig("CartPole-v1").n_updates
    assert np.mean([float(row["return"]) for row in rows[-4:]]) > 475


def test_the_inline_command_is_real(folder):
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    (command,) = [text for text in re.findall(r"`([^`]+)`", prose) if text.startswith("python ")]
    shown = run(folder, "bash", "-ec", command)
    assert "--learning-rate" in shown and "(default: 0.9)" in shown  # Pendulum's gamma


CHECKS = {  # what an example promises, by a word of it
    "evaluate(config, agent, jax.random.key(1), 20)": """
assert metrics["return"].shape == (4, config.n_updates)
""",
    "gymnasium": """
assert total > 300
""",
    "use_every_core()": """
import os
assert len(jax.devices()) > 1 or len(os.sched_getaffinity(0)) == 1
assert (metrics["return"][:2, -1] < metrics["return"][2:, -1]).all()
""",
    "load_agents": """
assert config.total_timesteps == 100_000 or metrics["timesteps"][0, -1] >= 150_000
""",
    "Corridor()": """
assert (evaluate(config, agent, jax.random.key(1), 3) == -9).all()
""",
    "Attention()": """
assert metrics["return"][-1] > 0.9
import ppo_jax
config = config.replace(n_steps=48)  # of three windows; episodes end within them
start = ppo_jax.init_agent(config, jax.random.key(1)).replace(params=agent.params)
moved_on, rollout = jax.jit(ppo_jax.collect_rollout)(config, start, jax.random.key(2))
batch = jax.jit(ppo_jax.make_batch)(config, moved_on, rollout)
network = ppo_jax.make_network(config)
_, report = ppo_jax.ppo_loss(agent.params, config, network, batch)
assert rollout.terminated.any() and config.sequence_length == 16
assert abs(report["approx_kl"]) < 1e-6 and report["clip_fraction"] == 0
# The rollout took steps one by one and the batch is of sequences: the numbers are the same.
@jax.vmap
def log_prob(obs, memory, action):
    return ppo_jax.act(network, start, obs, memory).distribution.log_prob(action)

log_prob = log_prob(rollout.obs, rollout.memory, rollout.action)
assert abs(jnp.sort(log_prob.ravel()) - jnp.sort(batch.log_prob.ravel())).max() < 1e-5
""",
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_runs(example, folder):
    words = [word for word in CHECKS if word in example]
    assert words
    if "vmap" in example:  # slow on a CPU
        example = example.replace("100_000", "10_000")
    (folder / "example.py").write_text(example + "".join(CHECKS[word] for word in words))
    assert run(folder, "python", "example.py")


# How to change the algorithm


def patch(source, diff):
    """Return a source with a diff applied, wherever the lines of each hunk are by now."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = [line if line.strip() else " \n" for line in hunk.splitlines(keepends=True)]
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert source.count("\n" + old) == 1, old
        source = source.replace("\n" + old, "\n" + new)
    return source


@pytest.mark.skipif(not shutil.which("patch"), reason="needs the program patch")
@pytest.mark.parametrize("diff", blocks("diff"))
def test_the_program_patch_applies_each_change(diff, folder):
    (folder / "ppo_jax.py").write_text(SOURCE)
    (folder / "change.diff").write_text(diff)
    run(folder, "bash", "-ec", "patch --fuzz=0 ppo_jax.py < change.diff")
    assert (folder / "ppo_jax.py").read_text() == patch(SOURCE, diff)


CHANGES = {  # what each change promises, by a word of it
    "kl_coef": """
import csv, pathlib
import jax, jax.numpy as jnp
from ppo_jax import PPOConfig, main, train_population

config = PPOConfig(n_envs=4, n_steps=32, total_timesteps=1280, kl_coef=jnp.array([0.0, 100.0]))
agents, metrics = train_population(config, jnp.repeat(jax.random.key(0)[None], 2))
assert metrics["kl_penalty"].shape == (2, 10)
free, bound = metrics["kl_penalty"].mean(axis=1)
assert free > 2 * bound > 0
flags = "--n-envs 4 --n-steps 32 --total-timesteps 1280 --n-seeds 2 --run-dir run"
assert main([*flags.split(), "--kl-coef", "linear_0.5", "--tensorboard-log", "logs"]) == 0
with open("run/metrics.csv", newline="") as file:
    penalties = [float(row["kl_penalty"]) for row in csv.DictReader(file)]
assert len(penalties) == 2 * 10 and penalties[0] > 0
(events,) = pathlib.Path("logs").glob("*/events*")
assert b"ppo/kl_penalty" in events.read_bytes()
""",
    "weight=1.0": """
import jax, numpy as np
import ppo_jax
from ppo_jax import PPOConfig

params = {"max_steps_in_episode": 12}
config = PPOConfig(n_envs=4, n_steps=32, total_timesteps=1280, env_params=params, gae_lambda=0.8)
key = jax.random.key(0)
agent, rollout = jax.jit(ppo_jax.collect_rollout)(config, ppo_jax.init_agent(config, key), key)
make_batch = jax.jit(ppo_jax.make_batch)
noise = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), agent.params)
for newer in (agent, agent.replace(params=noise)):
    batch = make_batch(config, newer, rollout)
    rows = batch.log_prob, batch.value, batch.advantage, batch.value_target
    log_prob, value, advantage, target = (np.float64(x).reshape(32, 4) for x in rows)
    if newer is agent:
        assert abs(log_prob - rollout.log_prob).max() < 1e-5
    else:
        assert abs(log_prob - rollout.log_prob).max() > 0.1
    network, final_obs = ppo_jax.make_network(config), rollout.final_obs.reshape(128, 4)
    next_value = network.apply(newer.params, final_obs).value.reshape(32, 4)
    next_value = np.where(rollout.terminated, 0.0, next_value)
    done = np.array(rollout.terminated | rollout.truncated)
    assert rollout.truncated.any() and rollout.terminated.any()
    ratio = np.exp(log_prob - np.array(rollout.log_prob))
    rho, c = np.minimum(1, ratio), 0.8 * np.minimum(1, ratio)
    delta = rho * (np.array(rollout.reward) + config.gamma * next_value - value)
    for s in range(32):  # equation 1 of the paper, with lambda as in its remark 2
        for n in range(4):
            trace, factor = value[s, n], 1.0
            for t in range(s, 32):
                trace += factor * delta[t, n]
                factor *= config.gamma * c[t, n]
                if done[t, n]:
                    break
            assert abs(trace - target[s, n]) < 1e-4
    assert abs(target - value - advantage).max() < 1e-5
    if newer is not agent:
        continue
    gae = ppo_jax.compute_gae(rollout.reward, value, next_value, rollout.terminated,
                              rollout.truncated, config.gamma, 0.8)
    assert abs(gae[0] - advantage).max() < 1e-4
# With lambda = 1 the advantage is the paper's: rho_s (r_s + gamma v_{s+1} - V(x_s)).
batch = make_batch(config.replace(gae_lambda=1.0), newer, rollout)
advantage, target = (np.float64(x).reshape(32, 4) for x in (batch.advantage, batch.value_target))
following = np.where(done[:-1], next_value[:-1], target[1:])
expected = rho[:-1] * (np.array(rollout.reward)[:-1] + config.gamma * following - value[:-1])
assert abs(expected - advantage[:-1]).max() < 1e-4
config = PPOConfig(n_envs=8, total_timesteps=30_000)
_, metrics = jax.jit(ppo_jax.train)(config, jax.random.key(0))
assert metrics["return"][-1] > 2 * metrics["return"][0]
""",
    "Novelty": """
import jax, jax.numpy as jnp, numpy as np
from ppo_jax import PPOConfig, init_agent, train_population

config = PPOConfig(
    n_envs=4, n_steps=32, total_timesteps=2560, learning_rate=1e-3,
    novelty_coef=jnp.array([0.0, 1.0]),
    advantage_function=lambda reward, *_: (reward, reward),
)
keys = jnp.repeat(jax.random.key(0)[None], 2)
agents, metrics = train_population(config, keys)
novelty = metrics["novelty"]
assert (0 < novelty[:, -1]).all() and (novelty[:, -1] < novelty[:, 0] / 2).all()
# Every reward of CartPole is 1, so that targets vary by the bonus alone, and returns are lengths.
assert np.isnan(metrics["explained_variance"][0]).all()
assert np.isfinite(metrics["explained_variance"][1]).all()
np.testing.assert_array_equal(metrics["return"], metrics["length"])
before = init_agent(config.replace(novelty_coef=1.0), keys[0]).params["novelty"]
after = agents.params["novelty"]
moved = {name: bool((after[name]["kernel"][1] != x["kernel"]).any()) for name, x in before.items()}
assert moved == {"Dense_0": True, "Dense_1": True, "Dense_2": False, "Dense_3": False}
""",
    "json_log": """
import csv, json, pathlib
from ppo_jax import main

flags = "--n-envs 4 --n-steps 32 --total-timesteps 1280 --n-seeds 2 --run-dir"
assert main([*flags.split(), "run", "--json-log"]) == 0
lines = [json.loads(line) for line in open("run/metrics.jsonl")]
with open("run/metrics.csv", newline="") as file:
    rows = list(csv.DictReader(file))
assert len(rows) == 2 * len(lines) == 2 * 10
for i, line in enumerate(lines):
    first, second = rows[2 * i : 2 * i + 2]
    assert line["timesteps"] == float(first["timesteps"])
    mean = (float(first["value_loss"]) + float(second["value_loss"])) / 2
    assert abs(line["value_loss"] / mean - 1) < 1e-6
    assert line.get("return_seed_1", "nan") in (float(second["return"]), "nan")
""",
    '"mine"': """
from ppo_jax import main

flags = "--env mine/Corridor --n-envs 16 --n-steps 32 --total-timesteps 4096 --run-dir run"
assert main(flags.split()) == 0
assert main(["--eval", "run", "--n-episodes", "2"]) == 0
assert main(["--env", "mine/Tunnel"]) == 2
""",
}


@pytest.mark.parametrize("word", CHANGES)
def test_each_change_does_what_it_promises(word, folder):
    (diff,) = [diff for diff in blocks("diff") if word in diff]
    (folder / "ppo_jax.py").write_text(patch(SOURCE, diff))
    (folder / "check.py").write_text(CHANGES[word])
    printed = run(folder, "python", "check.py")
    if word == '"mine"':
        assert "mine-Corridor, mean of 2 episodes" in printed
        assert "'mine/Tunnel' is no environment of mine; mine has Corridor" in printed


def test_every_change_has_a_check():
    assert len(CHANGES) == len(blocks("diff")) == 5
    assert section("How to change the algorithm").count("\n**") == 6
    assert all(len(line) <= 101 for diff in blocks("diff") for line in diff.splitlines())


# What can be switched on

FEATURES = re.findall(r"\| `(PPOConfig\(.*\))` \|", section("What can be switched on"))


def test_there_are_examples_of_features():
    assert len(FEATURES) == section("What can be switched on").count("\n| ") - 2


@pytest.mark.parametrize("example", FEATURES)
def test_every_feature_trains(example):
    """As its example has it, at a size that compiles and runs in a second or two."""
    config = eval(example, vars(ppo_jax))
    small = dict(n_envs=2, n_steps=16, batch_size=16, total_timesteps=64, n_epochs=1)
    if "batch_size" in example:
        small = dict(n_envs=16, n_steps=32, total_timesteps=1024)
    agent, metrics = jit(ppo_jax.train)(config.replace(**small), jax.random.key(0))
    assert np.isfinite(metrics["value_loss"]).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(agent.params))


# What the README says of the file


def test_what_the_readme_names_exists():
    names = set(re.findall(r"`([A-Za-z_]+)`", section("What is implemented")))
    table = section("Names of the same setting")
    names |= set(re.findall(r"`([a-z_]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    for name in names:
        assert re.search(rf"\b{name}\b", SOURCE), name
    for path in re.findall(r"\]\((?!http)([^)]+)\)|`(tests/[^`]+)`", README):
        assert (ROOT / "".join(path)).is_file()


def test_every_flag_of_the_readme_exists():
    known = {f"--{name.replace('_', '-')}" for name in ppo_jax.flag_fields()}
    known |= {"--help", "--no-progress-bar"}
    changes = {"--kl-coef", "--json-log"}
    of_ours = re.sub("^#SBATCH.*", "", README, flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", of_ours)) <= known | changes
    flags = "--learning-rate linear_3e-4 --clip-range 0.1,0.3 --env-params memory_length=20"
    for flag in re.findall(r"--[a-z-]+ \S+", flags):
        assert f"`{flag}`" in README
    fields = {field.name for field in dataclasses.fields(ppo_jax.PPOConfig)}
    functions = {"loss_function", "advantage_function"}
    assert fields - set(ppo_jax.flag_fields()) == functions
    settings, *_ = ppo_jax.parse_arguments(["--env", "MemoryChain-bsuite", *flags.split()])
    [(_, config)] = settings
    assert config.learning_rate == ppo_jax.Schedule(3e-4, 0.0, "linear")
    assert config.clip_range == (0.1, 0.3)
    assert config.env_params == (("memory_length", 20),)


def test_the_exit_codes_are_those_of_main():
    codes = re.findall(r"^\| (\d+) \|", section("What a run leaves"), re.MULTILINE)
    assert codes == re.findall(r"\d+", ppo_jax.main.__doc__)


def test_the_two_lists_of_dependencies_agree():
    comments = SOURCE.split("# /// script\n")[1].split("# ///")[0]
    script = tomllib.loads(re.sub(r"^# ?", "", comments, flags=re.MULTILINE))
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    lines = [line.split("#")[0].strip() for line in lines]
    runtime, tests = (part.split() for part in "\n".join(lines).strip().split("\n\n"))
    assert script["dependencies"] == runtime
    assert "pytest" in tests[0]
    assert script["requires-python"] == ">=3.11"


# Sections 1 to 7 as a file of their own

CUT = re.split(r"^# =+\n# 8\. ", SOURCE, flags=re.MULTILINE)[0]
PACKAGES = ("jax", "flax", "optax", "gymnax", "chex", "six")


def with_requirements(names):
    """Return the names of packages and of all that these need."""
    names, found = list(names), set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name not in found:
            found.add(name)
            try:
                required = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:  # for another system
                continue
            required = [line for line in required if "extra ==" not in line]
            names += [re.match(r"[\w.-]+", line)[0] for line in required]
    return found


def global_names(code):
    """Return the global names that a code object and those within it read."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    names = {step.argval for step in dis.get_instructions(code) if step.opname in loads}
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return names.union(*map(global_names, inner))


def test_sections_1_to_7_train_with_their_packages_alone(tmp_path):
    imported = set()
    for node in ast.walk(ast.parse(CUT)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    imported = {name.partition(".")[0] for name in imported}
    assert imported - sys.stdlib_module_names <= {*PACKAGES, "numpy"}

    allowed = with_requirements(PACKAGES)
    blocked = []
    for module, owners in importlib.metadata.packages_distributions().items():
        if not allowed & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}:
            blocked.append(module)
    assert {"pytest", "tqdm", "tensorboardX", "nbclient"} <= set(blocked)
    (tmp_path / "mine.py").write_text(CUT)
    (tmp_path / "check.py").write_text(f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import jax, mine

config = mine.PPOConfig("CartPole-v1", total_timesteps=20_000)
agent, metrics = jax.jit(mine.train)(config, jax.random.key(0))
assert metrics["return"][-1] > 2 * metrics["return"][0]
try:
    import tqdm
except ModuleNotFoundError:
    print("trained")
""")
    assert run(tmp_path, "python", "check.py") == "trained\n"


def test_no_name_in_sections_1_to_7_is_defined_below_them():
    defined = {"__name__", "__annotations__", *dir(builtins)}
    for node in ast.walk(ast.parse(CUT)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    assert global_names(compile(CUT, "mine.py", "exec")) <= defined


# The notebook


def test_the_notebook_runs_and_is_committed_with_its_outputs(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    images = ["image/png" in output.get("data", {}) for cell in cells for output in cell.outputs]
    assert sum(images) == 2
    first = cells[0].source.replace("300_000", "4_096").replace("N_SEEDS = 10", "N_SEEDS = 3")
    assert first != cells[0].source
    cells[0].source = first
    shutil.copy(ROOT / "ppo_jax.py", tmp_path)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("XLA_FLAGS", QUICKLY)
    resources = {"metadata": {"path": tmp_path / "notebooks"}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
