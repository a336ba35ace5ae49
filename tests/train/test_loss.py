"""The gradient is the analytic policy gradient, and TRL's where settings coincide."""

from pathlib import Path

import pytest
import torch

from keepgrad.policy import model as models
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


def test_equals_trl_where_settings_coincide(tmp_path: Path) -> None:
    """TRL's GRPO loss with one mean over tokens ("bnpo"), no KL, on policy, no clip reached: the same gradient on every weight, to 1e-5."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -r requirements-dev.txt")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.make_tiny(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=4, beta=0.0,
            loss_type="bnpo", report_to=[], max_completion_length=6, temperature=1.0, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 4),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    prompts, taken = (torch.randint(1, 500, (4, n), generator=generator) for n in (5, 6))
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1, 4:] = 0
    advantage = torch.randn(4, generator=generator)
    theirs = trainer._compute_loss(
        trainer.model,
        {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": taken, "completion_mask": mask,
         "advantages": advantage, "old_per_token_logps": None, "num_items_in_batch": mask.sum()},
    )  # fmt: skip
    theirs.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    logits = model(input_ids=torch.cat([prompts, taken], 1)).logits[:, 4:-1]
    logp = _logp(logits, taken)
    losses.policy_gradient(
        logp, logp.detach(), advantage[:, None].expand(4, 6), mask.bool(), torch.ones(4), 2.0, float(mask.sum())
    ).loss.backward()
    assert wanted and max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-3
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.allclose(parameter.grad, wanted[name], atol=1e-5), name


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
