"""Numbers of Stable-Baselines3's PPO, stored in golden/: one rollout and one whole update for each case.

PPO_GOLDEN_DIR names another folder of the same layout.
"""

import functools
import json
import os
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

import ppo_jax

# What these tests cost is compiling, not running.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

GOLDEN = pathlib.Path(os.environ.get("PPO_GOLDEN_DIR") or pathlib.Path(__file__).parent / "golden")
CASES = sorted(path.stem for path in GOLDEN.glob("*.json"))
LAYERS = {"pi": ("policy_0", "policy_1", "policy_out"), "vf": ("value_0", "value_1", "value_out")}


def parameters(arrays, moment):
    """The stored weights of a moment, "before" or "after", as our network's parameters."""
    layers = {}
    for head, names in LAYERS.items():
        for layer, name in enumerate(names):
            stored = f"{moment}.{head}.{layer}"
            layers[name] = {part: jnp.asarray(arrays[f"{stored}.{part}"], jnp.float32) for part in ("kernel", "bias")}
    if f"{moment}.log_std" in arrays:
        layers["log_std"] = jnp.asarray(arrays[f"{moment}.log_std"], jnp.float32)
    return {"params": layers}


class Case:
    """A stored update and what our functions need to repeat it."""

    def __init__(self, name):
        self.reference = json.loads((GOLDEN / f"{name}.json").read_text())
        with np.load(GOLDEN / f"{name}.npz") as arrays:
            self.arrays = {key: arrays[key] for key in arrays}
        self.config = ppo_jax.PPOConfig(self.reference["env"], **self.reference["hyperparameters"])
        self.network = ppo_jax.make_network(self.config)

        stored = {
            key.removeprefix("rollout."): value for key, value in self.arrays.items() if key.startswith("rollout.")
        }
        if isinstance(self.network.action_space, spaces.Discrete):
            stored["action"] = stored["action"].reshape(stored["action"].shape[:2]).astype(np.int32)
        self.stored = jax.tree.map(jnp.asarray, stored)
        self.rollout = ppo_jax.Rollout(**{field: self.stored.get(field) for field in ppo_jax.Rollout._fields})

        self.params = parameters(self.arrays, "before")
        self.untrained = jax.eval_shape(ppo_jax.init_agent, self.config, jax.random.key(0))
        chex.assert_trees_all_equal_shapes_and_dtypes(self.params, self.untrained.params)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return Case(request.param)


@pytest.fixture(scope="module")
def updated(case):
    """The batch, the weights and the metrics of our update, its minibatches drawn by the stored permutations."""
    key, n_epochs = jax.random.key(1), case.config.n_epochs
    epoch_keys = jax.random.key_data(jax.random.split(key, n_epochs))
    # Both sides count samples time first: t * N + e. What the reference didn't reach leads to a sample that is NaN.
    permutation = case.stored["permutation"]
    unreached = jnp.full((n_epochs - len(permutation), permutation.shape[1]), -1)
    permutation = jnp.concatenate([permutation, unreached])

    def stored_shuffle(epoch_key, positions, size):
        is_epoch = jnp.all(jax.random.key_data(epoch_key) == epoch_keys, axis=-1)
        return jnp.where(jnp.any(is_epoch), permutation[jnp.argmax(is_epoch), positions], -1)

    def run(config, params, rollout, last_obs):
        opt_state = ppo_jax.make_optimizer(config).init(params)
        agent = case.untrained.replace(params=params, opt_state=opt_state, obs=last_obs)
        batch = ppo_jax.make_batch(config, agent, rollout)
        nan = {"f": jnp.nan, "i": 0}
        padded = jax.tree.map(lambda x: jnp.concatenate([x, jnp.full_like(x[:1], nan[x.dtype.kind])]), batch)
        agent, metrics = ppo_jax.optimise(config, agent, padded, key)
        metrics["explained_variance"] = ppo_jax.explained_variance(batch.value, batch.value_target)
        return batch, agent.params, metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_jax, "shuffle", stored_shuffle)
        return jit(run)(case.config, case.params, case.rollout, case.stored["last_obs"])


def assert_close(ours, theirs):
    """1e-4 relative, above the rounding of float32 sums whose terms are of size 1 or of the largest entry's."""
    theirs = np.asarray(theirs)
    floor = 1e-6 * max(1.0, np.abs(theirs).max())
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=floor)


def test_there_are_cases():
    assert CASES, f"no cases in {GOLDEN}"


def test_values_and_log_probs(case):
    distribution, value = case.network.apply(case.params, case.stored["obs"])
    assert_close(value, case.stored["value"])
    assert_close(distribution.log_prob(case.rollout.action), case.stored["log_prob"])


def test_advantages_and_value_targets(case, updated):
    """The stored rewards are the environments' own, so time limits have to be bootstrapped here."""
    assert np.any(case.rollout.truncated)
    for name in ("value", "log_prob", "advantage", "value_target"):
        assert_close(getattr(updated[0], name), case.stored[name].ravel())


def test_weights_after_the_update(case, updated):
    """Adam divides a gradient by its own size: where that is near 0, rounding moves a weight by parts of a step."""
    before, after = parameters(case.arrays, "before"), parameters(case.arrays, "after")
    chex.assert_trees_all_equal_shapes(updated[1], after)
    stored = zip(jax.tree.leaves(before), jax.tree.leaves(after))
    for (path, ours), (old, new) in zip(jax.tree_util.tree_leaves_with_path(updated[1]), stored):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(ours, new, rtol=1e-4, atol=1e-3 * case.config.learning_rate, err_msg=name)
        assert np.linalg.norm(ours - new) <= 1e-3 * np.linalg.norm(new - old), name


def test_steps_taken(case, updated):
    """With a KL limit the update ends at the very minibatch at which the reference's did."""
    steps = case.reference["optimizer_steps"]
    assert updated[2]["optimizer_steps"] == steps
    all_steps = case.config.n_epochs * case.config.n_minibatches
    assert steps < all_steps if case.config.target_kl else steps == all_steps


def test_logged_numbers(case, updated):
    _, params, metrics = updated
    ours = {
        "policy_gradient_loss": metrics["policy_loss"],
        "value_loss": metrics["value_loss"],
        "entropy_loss": -metrics["entropy"],
        "approx_kl": metrics["approx_kl"],
        "clip_fraction": metrics["clip_fraction"],
        "explained_variance": metrics["explained_variance"],
    }
    if "log_std" in params["params"]:
        ours["std"] = jnp.mean(jnp.exp(params["params"]["log_std"]))
    logged = {key.removeprefix("train/"): value for key, value in case.reference["logged"].items()}
    # Settings, a count of epochs and the last minibatch's loss have no counterpart among our metrics.
    assert set(logged) - set(ours) <= {"learning_rate", "clip_range", "clip_range_vf", "n_updates", "loss"}
    for name in ours:
        np.testing.assert_allclose(ours[name], logged[name], rtol=1e-4, atol=1e-6, err_msg=name)
