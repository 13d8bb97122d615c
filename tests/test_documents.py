"""The README's commands and examples and the notebook, run as a reader would."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import ppo_jax

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TEST_COMMAND = "pip install -r requirements.txt && pytest"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def fresh_folder(tmp_path):
    """A folder with the two files that the README's commands need, and an environment whose python is this one."""
    for name in ("ppo_jax.py", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return tmp_path, os.environ | {"PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_every_command_of_the_readme_runs(fresh_folder):
    folder, environment = fresh_folder
    commands = [block for block in blocks("bash") if block.strip() != TEST_COMMAND]
    assert len(commands) == len(blocks("bash")) - 1  # this very test is the other one
    for command in commands:
        # A tenth of the steps would show as much; the first command is the main job and runs as it stands.
        command = command.replace("3e5", "3e4").replace("4e5", "4e4")
        done = subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = {path.parent.name for path in folder.glob("runs/*/learning_curve.png")}
    assert "ten" in runs and any(name.startswith("CartPole-v1-") for name in runs)


def test_the_inline_commands_of_the_readme_are_real(fresh_folder):
    folder, environment = fresh_folder
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    (command,) = [text for text in re.findall(r"`([^`]+)`", prose) if text.startswith("python ")]
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "--learning-rate" in done.stdout


@pytest.mark.parametrize("block", blocks("python"))
def test_every_example_of_the_readme_runs(block, fresh_folder):
    folder, environment = fresh_folder
    done = subprocess.run([sys.executable, "-c", block], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


FEATURES = README.split("## What can be switched on")[1].split("\n## ")[0]
EXAMPLES = [text for text in re.findall(r"\| `(PPOConfig\(.*\))` \|", FEATURES)]


def test_there_are_examples_of_features():
    assert len(EXAMPLES) == FEATURES.count("\n| ") - 2


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_feature_of_the_readme_trains(example):
    """As its example has it, at a size that compiles and runs in a second or two."""
    config = eval(example, vars(ppo_jax))
    small = dict(n_envs=2, n_steps=16, batch_size=16, total_timesteps=64, n_epochs=1)
    if "batch_size" in example:
        small = dict(n_envs=16, n_steps=32, total_timesteps=1024)
    train = jax.jit(ppo_jax.train, compiler_options={"xla_backend_optimization_level": 0})
    agent, metrics = train(config.replace(**small), jax.random.key(0))
    assert np.isfinite(metrics["value_loss"]).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(agent.params))


def test_what_the_readme_names_exists():
    source = (ROOT / "ppo_jax.py").read_text()
    names = set(re.findall(r"`([A-Za-z_]+)`", README.split("## What is implemented")[1].split("## Names")[0]))
    fields = set(re.findall(r"`([a-z_]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", README.split("## Names")[1], re.M))))
    for name in names | fields:
        assert re.search(rf"\b{name}\b", source), name
    for path in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / path).is_file()


def test_the_notebook_runs_and_is_committed_with_its_outputs(tmp_path):
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs) == 2
    cells[0].source = cells[0].source.replace("300_000", "4_096").replace("N_SEEDS = 10", "N_SEEDS = 3")
    shutil.copy(ROOT / "ppo_jax.py", tmp_path)
    (tmp_path / "notebooks").mkdir()
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path / "notebooks"}}).execute()
