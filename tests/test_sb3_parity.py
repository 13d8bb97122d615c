"""Numbers of Stable-Baselines3's PPO, stored in golden/: a rollout and a whole update a case.

PPO_GOLDEN_DIR names another folder of the same layout.
"""

import json

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import display
from gymnax.environments import spaces
from helpers import GOLDEN, jit

import ppo_jax

CASES = sorted(path.stem for path in GOLDEN.glob("*.json"))
LAYERS = {
    "pi": ("policy_0", "policy_1", "policy_out"),
    "vf": ("value_0", "value_1", "value_out"),
}
BITS = gymnasium.spaces.MultiBinary(4)
LINE = spaces.Box(-np.inf, np.inf, (4,))
ENVIRONMENTS = {  # besides those of gymnax
    str(BITS): display(LINE, BITS, lambda key, time: jnp.zeros(4)),
}


def parameters(arrays, moment):
    """Return the stored weights of a moment, "before" or "after", as our network's parameters."""
    layers = {}
    for head, names in LAYERS.items():
        for layer, name in enumerate(names):
            stored = f"{moment}.{head}.{layer}"
            layers[name] = {
                part: jnp.asarray(arrays[f"{stored}.{part}"], jnp.float32)
                for part in ("kernel", "bias")
            }
    if f"{moment}.log_std" in arrays:
        layers["log_std"] = jnp.asarray(arrays[f"{moment}.log_std"], jnp.float32)
    return {"params": layers}


class Case:
    """A stored update and what our functions need to repeat it."""

    def __init__(self, name):
        self.reference = json.loads((GOLDEN / f"{name}.json").read_text())
        with np.load(GOLDEN / f"{name}.npz") as arrays:
            self.arrays = {key: arrays[key] for key in arrays}
        env = self.reference["env"]
        hyperparameters = self.reference["hyperparameters"]
        self.config = ppo_jax.PPOConfig(ENVIRONMENTS.get(env, env), **hyperparameters)
        self.network = ppo_jax.make_network(self.config)

        stored = {
            key.removeprefix("rollout."): value
            for key, value in self.arrays.items()
            if key.startswith("rollout.")
        }
        action = stored["action"]
        space = self.network.action_space
        if space.sizes:
            action = action.astype(np.int32)
        shape = () if space.kind == "integer" else (-1,)
        stored["action"] = action.reshape((*action.shape[:2], *shape))
        self.stored = jax.tree.map(jnp.asarray, stored)
        fields = {field: self.stored.get(field) for field in ppo_jax.Rollout._fields}
        self.rollout = ppo_jax.Rollout(**fields)

        self.params = parameters(self.arrays, "before")
        self.untrained = jax.eval_shape(ppo_jax.init_agent, self.config, jax.random.key(0))
        chex.assert_trees_all_equal_shapes_and_dtypes(self.params, self.untrained.params)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return Case(request.param)


@pytest.fixture(scope="module")
def updated(case):
    """The batch, weights and metrics of our update, with minibatches of the stored permutations."""
    config = case.config
    # Both sides count samples time first: t * N + n. What the reference didn't reach leads to a
    # sample that is NaN.
    permutation = case.stored["permutation"]
    n_unreached = config.n_epochs - len(permutation)
    unreached = jnp.full((n_unreached, config.rollout_size), config.rollout_size)
    minibatches = jnp.concatenate([permutation, unreached])
    minibatches = minibatches.reshape((config.n_epochs, config.n_minibatches, -1))

    def run(config, params, rollout, last_obs):
        opt_state = ppo_jax.make_optimizer(config).init(params)
        agent = case.untrained.replace(params=params, opt_state=opt_state, obs=last_obs)
        batch = ppo_jax.make_batch(config, agent, rollout)
        nan = {"f": jnp.nan, "i": 0}

        def pad(x):
            return jnp.concatenate([x, jnp.full_like(x[:1], nan[x.dtype.kind])])

        agent, metrics = ppo_jax.optimise(config, agent, jax.tree.map(pad, batch), minibatches)
        metrics["explained_variance"] = ppo_jax.explained_variance(batch.value, batch.value_target)
        return batch, agent.params, metrics

    return jit(run)(config, case.params, case.rollout, case.stored["last_obs"])


def assert_close(ours, theirs):
    """Assert 1e-4 relative, above the rounding of float32 sums whose terms are of size 1 or of the
    largest entry's.
    """
    theirs = np.asarray(theirs)
    floor = 1e-6 * max(1.0, np.abs(theirs).max())
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=floor)


def test_there_are_cases():
    assert CASES, f"no cases in {GOLDEN}"


def test_values_and_log_probs(case):
    output = case.network.apply(case.params, case.stored["obs"])
    assert_close(output.value, case.stored["value"])
    assert_close(output.distribution.log_prob(case.rollout.action), case.stored["log_prob"])


def test_advantages_and_value_targets(case, updated):
    """The stored rewards are the environments' own: time limits have to be bootstrapped here."""
    assert np.any(case.rollout.truncated)
    for name in ("value", "log_prob", "advantage", "value_target"):
        assert_close(np.ravel(getattr(updated[0], name)), case.stored[name].ravel())


def test_weights_after_the_update(case, updated):
    """Adam divides a gradient by its own size: where that is near 0, rounding moves a weight by
    parts of a step.
    """
    before, after = parameters(case.arrays, "before"), parameters(case.arrays, "after")
    chex.assert_trees_all_equal_shapes(updated[1], after)
    ours = ppo_jax.named_leaves(updated[1])
    stored = zip(jax.tree.leaves(before), jax.tree.leaves(after))
    floor = 1e-3 * case.config.learning_rate
    for (name, leaf), (old, new) in zip(ours.items(), stored):
        np.testing.assert_allclose(leaf, new, rtol=1e-4, atol=floor, err_msg=name)
        assert np.linalg.norm(leaf - new) <= 1e-3 * np.linalg.norm(new - old), name


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
    logged = case.reference["logged"]
    logged = {key.removeprefix("train/"): value for key, value in logged.items()}
    # Settings, a count of epochs and the last minibatch's loss have no counterpart here.
    unmatched = {"learning_rate", "clip_range", "clip_range_vf", "n_updates", "loss"}
    assert set(logged) - set(ours) <= unmatched
    for name in ours:
        np.testing.assert_allclose(ours[name], logged[name], rtol=1e-4, atol=1e-6, err_msg=name)
