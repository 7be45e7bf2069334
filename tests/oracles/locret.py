"""Locret in NumPy, float64 (arXiv 2410.01805, section 3.3; code huangyuxiang03/Locret): one sequence at a time."""

from __future__ import annotations

import numpy as np

from tests.oracles.expected_attention import rotation_matrix


def apply_network(x, fc1, fc2) -> np.ndarray:
    """Applies the two layers to one token's input [C] -> [K]."""
    hidden = fc1 @ x
    return fc2 @ (hidden / (1 + np.exp(-hidden)))


def network_inputs(q, k, v, frequencies) -> np.ndarray:
    """The network's inputs [T C], all heads' q, k, v before RoPE, from q [K G T H], k and v [K T H] after RoPE."""
    K, G, T, _ = q.shape
    out = []
    for t in range(T):
        inverse_rotation = rotation_matrix(t, frequencies).T
        queries = [inverse_rotation @ q[h, g, t] for h in range(K) for g in range(G)]
        out.append(
            np.concatenate([*queries, *(inverse_rotation @ k[h, t] for h in range(K)), *(v[h, t] for h in range(K))])
        )
    return np.array(out)


def scores(q, k, v, fc1, fc2, frequencies) -> np.ndarray:
    """The scores [K T] of all tokens."""
    return np.array([apply_network(x, fc1, fc2) for x in network_inputs(q, k, v, frequencies)]).T


def targets(q, k, window=None) -> np.ndarray:
    """The greatest logit [K n] of each token of the earlier half from the later half's queries; -inf without one."""
    K, G, T, H = q.shape
    first = T - T // 2
    out = np.full((K, first), -np.inf)
    for h in range(K):
        for s in range(first):
            for t in range(first, T):
                if window is None or t - s < window:
                    out[h, s] = max(out[h, s], *(q[h, g, t] @ k[h, s] / np.sqrt(H) for g in range(G)))
    return out


def fit_regression(x, y, ridge: float) -> np.ndarray:
    """Fits linear functions to inputs [n C] and targets [K n] -> their weights [K C] without the offsets."""
    x, y = x - x.mean(0), y - y.mean(1, keepdims=True)
    covariance = x.T @ x / len(x)
    regularizer = np.trace(covariance) / x.shape[1] / ridge
    return (np.linalg.inv(covariance + regularizer * np.eye(x.shape[1])) @ x.T @ y.T / len(x)).T
