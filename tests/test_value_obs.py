"""Parts of an observation that the value network alone sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Match, display
from gymnax.environments import spaces
from helpers import assert_same, jit
from runs import parse_one

from ppo_jax import (
    ConfigError,
    PPOConfig,
    act,
    init_agent,
    make_env,
    make_network,
    make_policy,
    train,
)

BOX = spaces.Box(-5, 5, (3,))
TINY = dict(n_envs=4, n_steps=8, batch_size=32, n_epochs=2, total_timesteps=64, net_arch=(8,))
NETWORKS = {
    "mlp": {},
    "separate": dict(share_features_extractor=False),
    "gru": dict(policy="gru", sub_traj_len=4),
    "lstm": dict(policy="lstm", sub_traj_len=4, share_features_extractor=False),
    "cnn": dict(policy="cnn"),
    "normalised": dict(normalize_obs=True),
    "gsde": dict(use_sde=True),
}


def make_hiding(action_space=None, has_image=False):
    """Return an environment whose observations have a part `hidden`, which is in two pieces."""
    parts = {"seen": BOX, "hidden": spaces.Dict({"speed": BOX, "time": BOX})}
    if has_image:
        parts["image"] = spaces.Box(0, 1, (5, 5, 1))

    def show(key, time):
        one, two, three = jax.random.split(key, 3)
        speed, seen = jax.random.normal(one, (3,)), jax.random.normal(two, (3,))
        obs = {"seen": seen, "hidden": {"speed": speed, "time": jnp.full(3, time, jnp.float32)}}
        if has_image:
            obs["image"] = jax.random.uniform(three, (5, 5, 1))
        return obs

    return display(spaces.Dict(parts), action_space or spaces.Discrete(3), show)


def outputs(config, agent, change):
    """Return what an agent makes of observations, and with a change to what is hidden or seen."""
    network = make_network(config)
    results = [act(network, agent, agent.obs, agent.memory)]
    for part in ("hidden", "seen"):
        changed = {part: jax.tree.map(lambda x: x + change, agent.obs[part])}
        results.append(act(network, agent, agent.obs | changed, agent.memory))
    return results


@pytest.mark.parametrize("network", NETWORKS)
def test_the_policy_does_not_see_what_the_value_sees(network):
    space = spaces.Box(-1, 1, (2,)) if network == "gsde" else None
    env = make_hiding(space, has_image=network == "cnn")
    config = PPOConfig(env, value_obs="hidden", **TINY | NETWORKS[network])
    assert config.value_obs == ("hidden",)
    agent, metrics = jit(train)(config, jax.random.key(0))
    assert np.isfinite(metrics["value_loss"]).all()
    one, hidden, seen = outputs(config, agent, 0.5)
    assert_same(one.distribution, hidden.distribution)
    assert differ(one.distribution, seen.distribution), "it sees the rest"
    assert differ(one.value, hidden.value) and differ(one.value, seen.value)
    if one.memory is not None:
        assert_same(one.memory["policy"], hidden.memory["policy"])
        assert differ(one.memory["value"], hidden.memory["value"])


def differ(one, other):
    """Tell whether any numbers of two trees clearly differ."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other))
    return any(float(jnp.abs(x - y).max()) > 1e-4 for x, y in pairs)


def test_without_the_setting_the_policy_sees_all():
    agent, _ = jit(train)(PPOConfig(make_hiding(), **TINY), jax.random.key(0))
    one, hidden, _ = outputs(PPOConfig(make_hiding(), **TINY), agent, 0.5)
    assert differ(one.distribution, hidden.distribution)


@pytest.mark.parametrize("network", ["mlp", "gru"])
def test_a_policy_for_use_takes_the_same_action_whatever_is_hidden(network):
    """And so does one that isn't given what is hidden, as on a robot that has no such sensors."""
    settings = TINY | NETWORKS[network]
    config = PPOConfig(make_hiding(spaces.Box(-1, 1, (2,))), value_obs=["hidden"], **settings)
    agent = jit(init_agent)(config, jax.random.key(0))
    policy = make_policy(config, agent)
    obs = jax.device_get(jax.tree.map(lambda x: x[0], agent.obs))
    other = obs | {"hidden": {"speed": np.full(3, 4.0), "time": np.full(3, -4.0)}}
    for key in (None, jax.random.key(1)):
        np.testing.assert_array_equal(policy(obs, key)[0], policy(other, key)[0])
        np.testing.assert_array_equal(policy(obs, key)[0], policy({"seen": obs["seen"]}, key)[0])
        np.testing.assert_array_equal(policy(obs, key)[0], policy({"seen": obs["seen"]}, key)[0])
    assert differ(policy(obs)[0], policy(obs | {"seen": obs["seen"] + 1})[0])
    batch = jax.device_get(agent.obs)
    np.testing.assert_array_equal(policy(batch)[0], policy({"seen": batch["seen"]})[0])


@pytest.mark.parametrize(
    "env, given, words",
    [
        (make_hiding(), "hiden", r"value_obs: .*hiden.*\['hidden', 'seen'\]"),
        (make_hiding(), ("hidden", "speed"), "value_obs: .*speed.* some but not all of"),
        (make_hiding(), "hidden/speed", "value_obs: .*hidden/speed.* some but not all of"),
        (make_hiding(), ("seen", "hidden"), "value_obs: .* some but not all of"),
        ("CartPole-v1", "state", "value_obs: .*state.* some but not all of"),
        (Match(spaces.Discrete(4), "mask"), "action_mask", "value_obs: .* some but not all of"),
    ],
    ids=["misspelt", "not one", "a part of one", "all", "no dictionary", "the mask"],
)
def test_names_that_cannot_be_hidden_are_refused(env, given, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        make_env(PPOConfig(env, value_obs=given))
    assert "\n" not in str(refusal.value)


def test_a_network_of_the_users_own_decides_for_itself_what_it_sees():
    import flax.linen as nn

    with pytest.raises(ConfigError, match=r"value_obs: .* a policy of your own"):
        make_env(PPOConfig(make_hiding(), value_obs="hidden", policy=nn.Dense(3)))


def test_names_are_given_as_words_on_the_command_line():
    config, _ = parse_one(["--value-obs", "privileged_state", "goal"])
    assert config.value_obs == ("privileged_state", "goal")
    assert parse_one([])[0].value_obs == ()
