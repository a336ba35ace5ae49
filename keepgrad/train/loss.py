"""The losses, each beside its formula; pure functions of log-probs.

Legend: [R, T] rows by continuation tokens; `mask` true where a token was sampled (or settled); w a weight per row.
"""

from typing import NamedTuple

import torch


class Policy(NamedTuple):
    """Value and the sums that health is made of (all detached but `loss`): `ratio` [K] of the K sampled tokens, untruncated."""

    loss: torch.Tensor
    ratio: torch.Tensor
    log_ratio: torch.Tensor


def policy_gradient(
    logp: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    cap: float,
    tokens: float,
) -> Policy:
    """Token-level REINFORCE with a truncated importance ratio (Ionides 2008; Williams 1992).

    L = -1/N  sum_i w_i sum_t  sg[min(rho_it, cap)] * A_it * log pi(a_it),    rho_it = pi(a_it) / mu(a_it)

    mu is the recorded behaviour probability, sg stops the gradient, N = `tokens` counts the sampled tokens of the whole minibatch (so that
    micro-batches add up). On policy (rho = 1) the gradient is that of the plain policy gradient; nothing is divided by a deviation.
    """
    log_ratio = (logp.detach() - behaviour)[mask]
    ratio = log_ratio.exp()
    held = torch.zeros_like(logp)
    held[mask] = ratio.clamp(max=cap)
    loss = -(weight[:, None] * held * advantage * logp * mask).sum() / tokens
    return Policy(loss, ratio, log_ratio)


def distillation(logp: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor, tokens: float) -> torch.Tensor:
    """Cross-entropy on the developer's settled line: L = -1/N sum_i w_i sum_t log pi(y_it). Off-policy text: no ratio."""
    return -(weight[:, None] * logp * mask).sum() / tokens


def kl_to_base(logp: torch.Tensor, base: torch.Tensor, mask: torch.Tensor, tokens: float) -> torch.Tensor:
    """k2 as a loss (Schulman 2020): 1/N sum 1/2 (log pi - log pi_base)^2; its gradient is that of KL(pi || pi_base) on policy."""
    return 0.5 * ((logp - base).square() * mask).sum() / tokens
