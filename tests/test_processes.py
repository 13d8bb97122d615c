"""Several processes that train together, here on one machine, against one that trains alone."""

import re
import shutil
import signal
import socket
import time

import pytest
from runs import assert_same_agents, finish, flags, read_rows, start

from ppo_jax import load_agents

# What is carried from update to update is at its largest here.
SETTINGS = dict(env="Pendulum-v1", policy="lstm", sub_traj_len=4, rnn_hidden_size=8)
SETTINGS |= dict(normalize_obs=True, normalize_reward=True, learning_rate="linear_1e-3")
SETTINGS |= dict(n_envs=4, n_steps=8, n_epochs=1, net_arch=(8,), total_timesteps=64_000, seed=5)
TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
ONE_DEVICE = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
# What JAX's runtime says by itself on the standard output, from several threads at once.
GLOO = (
    r"\[Gloo\] Rank|\d+|is connected to|peer ranks\.|Expected number of connected peer ranks is :"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What lets the processes of these tests share what they compile."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


def start_together(*arguments, folder, cache):
    """Start two processes of two devices each that train together; returns them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    job = ["--distributed", "--coordinator", address, "--n-processes", "2", "--process-id"]
    variables = TWO_DEVICES | cache
    return [start(*arguments, *job, number, folder=folder, **variables) for number in (0, 1)]


def finish_together(processes):
    """Wait for processes that are to end well; returns what the first one printed."""
    results = []
    try:
        for process in processes:
            results.append(finish(process, timeout=150))
    finally:
        for process in processes:
            process.kill()
    for code, _, error in results:
        assert code == 0 and "Traceback" not in error, error
    _, out, error = results[1]
    assert re.sub(GLOO, "", out).strip() == "" and error == ""  # the first one speaks for all
    return results[0][1]


def wait_for(there, processes):
    """Wait until something is there, or one of the processes or the time is over."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        if there():
            break
        time.sleep(0.01)


def wait_for_checkpoint(run_dir, processes):
    """Wait until a run has saved its agents, and has then gone on."""
    checkpoint, table = run_dir / "checkpoint", run_dir / "metrics.csv"
    wait_for(lambda: any(path.name.isdigit() for path in checkpoint.glob("*")), processes)
    size = table.stat().st_size
    wait_for(lambda: table.stat().st_size > size, processes)


def train_both_ways(settings, folders, cache):
    """Train in the folder `run` of two folders: with two processes and with one alone."""
    command = [*flags(settings), "--run-dir", "run"]
    finish_together(start_together(*command, folder=folders[0], cache=cache))
    code, _, error = finish(start(*command, folder=folders[1], **ONE_DEVICE, **cache))
    assert code == 0, error


def assert_same_runs(ours, theirs):
    """Assert that two runs of one program left the same files with the same in them."""
    assert sorted(path.name for path in ours.iterdir()) == sorted(
        path.name for path in theirs.iterdir()
    )
    (config, agents), (other_config, other_agents) = load_agents(ours), load_agents(theirs)
    assert config == other_config
    assert_same_agents(agents, other_agents)
    assert (ours / "metrics.csv").read_bytes() == (theirs / "metrics.csv").read_bytes()
    assert (ours / "agents.csv").read_bytes() == (theirs / "agents.csv").read_bytes()


@pytest.fixture(scope="module")
def folders(tmp_path_factory, cache):
    """Two folders with a run of three agents: of two processes, and of one."""
    folders = [tmp_path_factory.mktemp(name) for name in ("together", "alone")]
    # Many checkpoints: at the second one, processes once waited for each other for ever.
    train_both_ways(SETTINGS | dict(n_seeds=3, checkpoint_seconds=0.3), folders, cache)
    return folders


def test_two_processes_train_the_agents_of_one(folders):
    """An odd number of agents: one device of the four repeats another's."""
    assert_same_runs(folders[0] / "run", folders[1] / "run")
    for folder in folders:
        assert [path.name for path in folder.iterdir()] == ["run"]
        assert load_agents(folder / "run")[1].n_updates.tolist() == [2000, 2000, 2000]
        assert len(read_rows(folder / "run")) == 3 * 2000
    numbers = [int(path.name) for path in (folders[0] / "run" / "checkpoint").iterdir()]
    assert max(numbers) > 3


def test_one_process_plays_the_agents_of_two(folders, cache):
    printed = []
    for folder in folders:
        command = ["--eval", "run", "--n-episodes", "2"]
        code, out, error = finish(start(*command, folder=folder, **ONE_DEVICE, **cache))
        assert code == 0, error
        printed.append(out)
    assert printed[0] == printed[1] and "seed 2" in printed[0] and "diverged" not in printed[0]


def test_two_processes_go_on_from_their_checkpoint_and_one_process_can(folders, tmp_path, cache):
    """What was left by an interrupted run of either kind leads to the same end by either."""
    whole = folders[1] / "run"
    ends = ["together", "alone"]
    for name in ends:
        (tmp_path / name).mkdir()
    arguments = SETTINGS | dict(n_seeds=3, checkpoint_seconds=0.7)
    command = [*flags(arguments), "--run-dir", "run"]
    processes = start_together(*command, folder=tmp_path / "together", cache=cache)
    try:
        wait_for_checkpoint(tmp_path / "together" / "run", processes)
    finally:
        for process in processes:
            process.kill()
            finish(process)
    shutil.copytree(tmp_path / "together" / "run", tmp_path / "alone" / "run")
    before = load_agents(tmp_path / "alone" / "run")[1].n_updates
    assert 0 < before[0] < 2000, "the run was over before it was killed"
    train_both_ways(arguments, [tmp_path / name for name in ends], cache)
    for name in ends:
        assert_same_runs(tmp_path / name / "run", whole)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_other_with_one_line(killed, tmp_path, cache):
    long = SETTINGS | dict(n_seeds=3, total_timesteps=10**9, checkpoint_seconds=0.5)
    long["log_interval"] = 1
    command = [*flags(long), "--run-dir", "run"]
    processes = start_together(*command, folder=tmp_path, cache=cache)
    try:
        wait_for_checkpoint(tmp_path / "run", processes)
        processes[killed].kill()
        begin = time.monotonic()
        code, _, error = finish(processes[1 - killed], timeout=100)
        seconds = time.monotonic() - begin
    finally:
        for process in processes:
            process.kill()
    assert processes[killed].wait() == -signal.SIGKILL
    lines = [line for line in error.splitlines() if line.strip() and " of " not in line]
    assert len(lines) == 1, error
    assert lines[0].startswith("ppo_jax: error: another process ended"), error
    assert lines[0].endswith("; the last checkpoint is whole"), error
    assert code != 0 and seconds < 60
    assert load_agents(tmp_path / "run")[1].n_updates[0] > 0
