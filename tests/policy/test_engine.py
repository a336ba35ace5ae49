"""The engine on a real tiny model: exact log-probs, versions side by side, batching that changes nothing."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from keepgrad.config import Config, Model, Server, Train
from keepgrad.config import Engine as EngineConfig
from keepgrad.errors import ModelError, VersionError
from keepgrad.policy import model as models
from keepgrad.policy import verdict as verdicts
from keepgrad.policy.engine import Engine, base_files
from keepgrad.policy.verdict import FEATURES
from keepgrad.policy.versions import Store
from keepgrad.records import Draft, EngineRequest, Sample, Sampling, Version
from keepgrad.reward.spec import load
from keepgrad.train.worker import Worker

SPEC = load()
PREFIXES = [
    "import os\n\n\ndef walk(path):\n    ",
    "class A:\n    def __init__(self, name):\n        self.name = ",
    "x = [",
    "for i in range(10):\n    ",
]


def make(folder: Path, **train: object) -> tuple[Config, Store, Version]:
    tiny = models.make_tiny(folder / "tiny")
    config = Config(
        model=Model(path=str(tiny), dtype="float32", temperature=0.8, max_tokens=12),
        server=Server(data=str(folder / "data")),
        engine=EngineConfig(threads=1),
        train=Train(**{"rank": 4, "layers": 2, "lr": 0.02, "minibatch": 4, **train}),  # type: ignore[arg-type]
    )
    store = Store(config.root)
    return config, store, store.write(base_files(), parent="", model=models.fingerprint(tiny), window="", spec="", seed=0)


def requests(engine: Engine, versions: list[str], count: int = 8) -> list[EngineRequest]:
    made = []
    for index in range(count):
        ids, healed = engine.prompter.encode(PREFIXES[index % len(PREFIXES)] + "a" * (index // 4), 64)
        made.append(EngineRequest(ids, versions, seed=index, sampling=Sampling(0.8, 12, explore=True), healed=healed))
    return made


def ask(engine: Engine, wanted: list[EngineRequest]) -> list[list[Draft]]:
    async def all_of_them() -> list[list[Draft]]:
        return await asyncio.gather(*(engine.generate(request) for request in wanted))

    return asyncio.run(all_of_them())


def samples(engine: Engine, version: str, count: int = 8) -> list[Sample]:
    wanted = requests(engine, [version], count)
    made = []
    for index, (request, (draft,)) in enumerate(zip(wanted, ask(engine, wanted), strict=True)):
        reward = 0.75 if index % 3 == 0 else -0.25
        made.append(
            Sample(
                generation=f"g{index}",
                version=version,
                prompt_ids=request.prompt_ids,
                completion_ids=draft.completion_ids,
                logprobs=draft.logprobs,
                cuts=[len(draft.completion_ids)],
                features=draft.features[-1:] or [[0.0] * len(FEATURES)],
                cut=len(draft.completion_ids),
                right=[False],
                shown=True,
                taken=float(reward > 0),
                verdict_logprob=0.0,
                reward=reward,
                advantages=[reward] * (len(draft.completion_ids) + 1),
                settled_ids=[40, 41, 42],
                weight=1.0,
                bucket=0,
            )  # fmt: skip
        )
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Config, Store, Engine, Version, Version]]:
    config, store, base = make(tmp_path_factory.mktemp("engine"))
    engine = Engine(config, store)
    engine.start()
    version, _ = Worker(config, store).run(base.id, samples(engine, base.id), "w-1", SPEC, 1, config.root / "scratch")
    yield config, store, engine, base, version
    engine.stop()


def test_logprobs_are_those_of_the_distribution_sampled_from(trained: tuple[Config, Store, Engine, Version, Version]) -> None:
    """Recomputed from whole sequences by plain transformers and peft, adapters acting from the last prompt token on."""
    config, store, engine, base, version = trained
    plain = models.load(Path(config.model.path), torch.float32)
    import peft

    adapted = peft.PeftModel.from_pretrained(models.load(Path(config.model.path), torch.float32), str(store.path(version.id))).eval()
    wanted = requests(engine, [base.id, version.id])
    moved = 0.0
    for request, drafts in zip(wanted, ask(engine, wanted), strict=True):
        prompt = request.prompt_ids
        for draft in drafts:
            ids = torch.tensor([prompt + draft.completion_ids])
            with torch.no_grad():
                if draft.version == base.id:
                    logits = plain(input_ids=ids).logits
                else:
                    with adapted.disable_adapter():
                        cache = adapted(input_ids=ids[:, : len(prompt) - 1], use_cache=True).past_key_values
                    logits = adapted(input_ids=ids[:, len(prompt) - 1 :], past_key_values=cache, use_cache=True).logits
            logp = torch.log_softmax(logits[0, -len(draft.completion_ids) - 1 : -1] / 0.8, -1)
            found = logp[range(len(draft.completion_ids)), draft.completion_ids]
            assert torch.allclose(found, torch.tensor(draft.logprobs), atol=2e-5), draft.version
        moved += abs(sum(drafts[0].logprobs) - sum(drafts[1].logprobs))
    assert moved > 0.1, "the trained version must differ from the base, or this test shows nothing"


def test_batching_changes_nothing(trained: tuple[Config, Store, Engine, Version, Version]) -> None:
    _, _, engine, base, version = trained
    wanted = requests(engine, [version.id, base.id], 12)
    together = ask(engine, wanted)
    alone = [ask(engine, [request])[0] for request in wanted]
    for one, other in zip(together, alone, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.completion_ids == b.completion_ids
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_versions_come_and_go_under_load(trained: tuple[Config, Store, Engine, Version, Version]) -> None:
    _, _, engine, base, version = trained

    async def scene() -> list[list[Draft]]:
        drafts = [asyncio.ensure_future(engine.generate(request)) for request in requests(engine, [version.id, base.id], 16)]
        await engine.unload(version.id)
        drafts += [asyncio.ensure_future(engine.generate(request)) for request in requests(engine, [version.id], 8)]
        return await asyncio.gather(*drafts)

    found = asyncio.run(scene())
    assert [draft.version for drafts in found for draft in drafts] == [version.id, base.id] * 16 + [version.id] * 8
    assert all(draft.completion_ids for drafts in found for draft in drafts)


def test_sampling_follows_the_distribution(trained: tuple[Config, Store, Engine, Version, Version]) -> None:
    """400 first tokens against their probabilities: Pearson's chi-square over the likely ones stays below its 0.9999 quantile."""
    from scipy.stats import chi2

    config, _, engine, base, _ = trained
    ids, healed = engine.prompter.encode(PREFIXES[0], 64)
    drawn = ask(engine, [EngineRequest(ids, [base.id], seed, Sampling(0.15, 1, True), healed) for seed in range(400)])
    with torch.no_grad():
        p = torch.softmax(models.load(Path(config.model.path), torch.float32)(input_ids=torch.tensor([ids])).logits[0, -1] / 0.15, -1)
    likely = [int(token) for token in torch.nonzero(p > 0.02)]
    counts = [sum(draft[0].completion_ids[0] == token for draft in drawn) for token in likely]
    statistic = sum((n - 400 * float(p[token])) ** 2 / (400 * float(p[token])) for n, token in zip(counts, likely, strict=True))
    assert likely and statistic < chi2.ppf(0.9999, len(likely))


def test_a_verdict_is_drawn_with_the_probability_it_records(trained: tuple[Config, Store, Engine, Version, Version]) -> None:
    """Cuts end words of the very draft, exploration keeps its floors, and what is recorded is what the head says of these features."""
    config, store, engine, _, version = trained
    head, explore = verdicts.from_bytes((store.path(version.id) / verdicts.FILE).read_bytes()), config.train.explore
    seen = [drafts[0] for drafts in ask(engine, requests(engine, [version.id], 32)) if drafts[0].cuts]
    assert len(seen) > 8
    for draft in seen:
        assert draft.cuts == sorted(set(draft.cuts)) and draft.cut in draft.cuts and len(draft.features) == len(draft.cuts)
        assert draft.text.strip() and engine.prompter.decode(draft.completion_ids[: draft.cut]).strip().startswith(draft.text.strip())
        which = draft.cuts.index(draft.cut)
        worth = head.worth(np.array(draft.features)) if not head.always_show else np.full(len(draft.cuts), np.inf)
        chosen = np.full(len(draft.cuts), explore / len(draft.cuts))
        chosen[len(draft.cuts) - 1 if head.always_show else int(worth.argmax())] += 1 - explore
        show = explore + (1 - explore) / (1 + np.exp(-head.scale * (worth - head.least)))
        assert draft.show_probability == pytest.approx(show[which]) and draft.show_probability >= explore - 1e-9
        chance = chosen[which] * show[which] if draft.verdict == "show" else float(chosen @ (1 - show))
        assert draft.verdict_logprob == pytest.approx(math.log(chance))


def test_corrupt_and_missing_versions_are_refused_and_the_rest_serves(
    trained: tuple[Config, Store, Engine, Version, Version], tmp_path: Path
) -> None:
    config, store, engine, base, _ = trained
    bad = store.write(base_files() | {"extra": b"x"}, parent=base.id, model="m", window="w", spec="s", seed=9)
    (store.path(bad.id) / "extra").write_bytes(b"y")
    with pytest.raises(VersionError, match="extra"):
        ask(engine, requests(engine, [bad.id], 1))
    with pytest.raises(VersionError, match="v-nothing"):
        ask(engine, requests(engine, ["v-nothing"], 1))
    assert ask(engine, requests(engine, [base.id], 1))[0][0].completion_ids
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer"):
        models.resolve(str(tmp_path))
