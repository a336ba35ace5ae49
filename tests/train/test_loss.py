"""The gradient is the analytic policy gradient, and TRL's where settings coincide."""

import pytest
import torch

from keepgrad.train import loss as losses

torch.set_num_threads(1)


def _bandit(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 7, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    taken = torch.randint(0, 11, (5, 7), generator=generator)
    mask = torch.rand(5, 7, generator=generator) < 0.7
    advantage = torch.randn(5, 1, generator=generator, dtype=torch.float64).expand(5, 7)
    return logits, taken, mask, advantage


def _logp(logits: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1).gather(2, taken[..., None])[..., 0]


def test_on_policy_gradient_is_the_analytic_one() -> None:
    logits, taken, mask, advantage = _bandit()
    logp = _logp(logits, taken)
    tokens = float(mask.sum())
    result = losses.policy_gradient(logp, logp.detach(), advantage, mask, torch.ones(5, dtype=torch.float64), 2.0, tokens)
    result.loss.backward()
    # d/dlogits of -A log pi(a) is A (pi - onehot(a)), per token, over the number of tokens
    onehot = torch.nn.functional.one_hot(taken, 11).double()
    wanted = advantage[..., None] * (torch.softmax(logits.detach(), -1) - onehot) * mask[..., None] / tokens
    assert logits.grad is not None
    assert torch.allclose(logits.grad, wanted, atol=1e-12)
    assert torch.allclose(result.ratio, torch.ones_like(result.ratio))


def test_off_policy_ratio_is_truncated_and_carries_no_gradient() -> None:
    logits, taken, mask, advantage = _bandit(1)
    logp = _logp(logits, taken)
    behaviour = logp.detach() - torch.linspace(-2, 2, logp.numel(), dtype=torch.float64).view_as(logp)
    losses.policy_gradient(logp, behaviour, advantage, mask, torch.ones(5, dtype=torch.float64), 2.0, 1.0).loss.backward()
    held = (logp.detach() - behaviour).exp().clamp(max=2.0)
    onehot = torch.nn.functional.one_hot(taken, 11).double()
    wanted = (held * advantage)[..., None] * (torch.softmax(logits.detach(), -1) - onehot) * mask[..., None]
    assert logits.grad is not None
    assert torch.allclose(logits.grad, wanted, atol=1e-12)


def test_expected_gradient_over_actions_is_the_gradient_of_expected_reward() -> None:
    """The law behind the estimator: summed over all actions with their probabilities it is exactly d E[r] / d logits."""
    logits = torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    reward = torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    total = torch.zeros(11, dtype=torch.float64)
    for action in range(11):
        logp = torch.log_softmax(logits, -1)[action].view(1, 1)
        one = torch.ones(1, dtype=torch.float64)
        value = losses.policy_gradient(logp, logp.detach(), reward[action].view(1, 1), torch.ones(1, 1, dtype=torch.bool), one, 2.0, 1.0)
        (gradient,) = torch.autograd.grad(value.loss, logits)
        total += torch.softmax(logits.detach(), -1)[action] * -gradient
    expected = (torch.softmax(logits, -1) * reward).sum()
    (wanted,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(total, wanted, atol=1e-12)


def test_equals_trl_where_settings_coincide() -> None:
    """TRL's GRPO loss, loss_type "bnpo" (one mean over tokens), no KL, no clipping reached, on policy: the same value's gradient."""
    grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed: pip install -r requirements-dev.txt")
    logits, taken, mask, advantage = _bandit(2)
    logp = _logp(logits, taken)

    class Accelerator:
        num_processes = 1

        @staticmethod
        def gather(value: torch.Tensor) -> torch.Tensor:
            return value

    trainer = object.__new__(grpo.GRPOTrainer)
    settings = {
        "beta": 0.0, "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "loss_type": "bnpo",
        "top_entropy_quantile": 1.0, "accelerator": Accelerator(), "use_vllm": False, "vllm_importance_sampling_correction": False,
        "off_policy_mask_threshold": None, "use_bias_correction_kl": False, "current_gradient_accumulation_steps": 1, "aux_loss_enabled": False, "aux_loss_coef": 0.0, "tools": None,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(trainer, name, value)
    from collections import defaultdict
    from types import SimpleNamespace

    trainer.model = SimpleNamespace(training=True)
    trainer.args = SimpleNamespace(delta=None)
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (logp, torch.zeros_like(logp), None)
    inputs = {
        "prompt_ids": torch.zeros(5, 1, dtype=torch.long), "prompt_mask": torch.ones(5, 1, dtype=torch.long), "completion_ids": taken,
        "completion_mask": mask.long(), "advantages": advantage[:, 0], "old_per_token_logps": None, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    theirs = trainer._compute_loss(trainer.model, inputs)
    (wanted,) = torch.autograd.grad(theirs, logits, retain_graph=True)
    ours = losses.policy_gradient(logp, logp.detach(), advantage, mask, torch.ones(5, dtype=torch.float64), 2.0, float(mask.sum()))
    (found,) = torch.autograd.grad(ours.loss, logits)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_k2_gradient_is_that_of_the_kl() -> None:
    logits = torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(5), requires_grad=True)
    base = torch.log_softmax(torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(6)), -1)
    logp = torch.log_softmax(logits, -1)
    total = torch.zeros(11, dtype=torch.float64)
    for action in range(11):
        value = losses.kl_to_base(logp[action].view(1, 1), base[action].view(1, 1), torch.ones(1, 1), 1.0)
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        total += logp[action].detach().exp() * gradient
    (wanted,) = torch.autograd.grad((logp.exp() * (logp - base)).sum(), logits)
    assert torch.allclose(total, wanted, atol=1e-12)
