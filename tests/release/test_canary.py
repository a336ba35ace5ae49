"""The canary's rule on users with temperaments of their own: what it promotes, stops and extends, and how often it is wrong."""

import random

import msgspec

from keepgrad.config import Release
from keepgrad.policy.traffic import assign
from keepgrad.records import GateVerdict, Generation, Sampling, Score, Traffic
from keepgrad.release import canary

RELEASE = Release(canary_min=60, canary_max=200)
TRAFFIC = Traffic("v-a", "v-0", "v-b", 0.4, "v-0", 0.1, False, "canary", 1_000)
USERS = [f"u-{number}" for number in range(60)]


def served(user: str, version: str, number: int, reward: float, place: str = "rewarded") -> tuple[Generation, Score]:
    """One scored generation."""
    name = f"g-{user}-{version}-{number}"
    made = Generation(
        id=name, kind="tab", org="acme", user=user, key="k", conversation=f"c-{name}", version=version, arm="incumbent", consent="code",
        seed=1, sampling=Sampling(), prompt_tokens=1, completion_tokens=1, verdict="show", verdict_logprob=0.0, show_probability=1.0,
        finish="stop",
        text="x", path="", client_ms=1, created_ms=2_000, latency_ms=1.0,
    )  # fmt: skip
    return made, Score(name, place, "accepted", reward, {}, "s")  # type: ignore[arg-type]


def traffic_of(
    effect: float, per_user: int, luck: int, users: list[str] = USERS, spread: float = 0.15
) -> tuple[list[tuple[Generation, Score]], dict[str, float]]:
    """Scored generations since the canary began, and each user's past: users accept by temperament, the candidate adds `effect`."""
    draw = random.Random(luck)
    rows, before = [], {}
    for user in users:
        usual = min(max(draw.gauss(0.35, spread), 0.05), 0.9)
        past = [0.75 if draw.random() < usual else -0.25 for _ in range(20)]
        before[user] = sum(past) / len(past)
        version = assign(TRAFFIC, user)[0]
        chance = usual + (effect if version == TRAFFIC.canary else 0.0)
        rows += [served(user, version, n, 0.75 if draw.random() < chance else -0.25) for n in range(per_user)]
    return rows, before


def decide(rows: list[tuple[Generation, Score]], before: dict[str, float], release: Release = RELEASE) -> GateVerdict:
    return canary.decide(rows, before, TRAFFIC, release, 1, "c-1-canary-1", 1)


def test_equals_are_promoted_and_harm_is_stopped_at_once() -> None:
    even = [decide(*traffic_of(0.0, 12, luck)) for luck in range(40)]
    assert sum(found.decision == "pass" for found in even) / 40 > 0.75
    assert sum(found.reason.startswith("harm") for found in even) <= 1
    harmed = [decide(*traffic_of(-0.35, 12, luck)) for luck in range(40)]
    assert sum(found.decision == "fail" and found.reason.startswith("harm") for found in harmed) / 40 > 0.7
    assert not any(found.decision == "pass" for found in harmed)


def test_before_the_least_number_only_harm_ends_it() -> None:
    release = msgspec.structs.replace(RELEASE, canary_min=10_000, canary_max=20_000)
    assert decide(*traffic_of(0.0, 12, 1), release).decision == "extend"
    assert decide(*traffic_of(0.3, 12, 1), release).decision == "extend"
    assert decide(*traffic_of(-0.4, 12, 1), release).decision == "fail"


def test_a_small_loss_extends_and_at_the_last_look_fails() -> None:
    more, enough = msgspec.structs.replace(RELEASE, canary_max=10_000), msgspec.structs.replace(RELEASE, canary_max=60)
    extended = [case for luck in range(20) if decide(*(case := traffic_of(-0.1, 12, luck)), more).decision == "extend"]
    assert len(extended) >= 10
    for case in extended:
        last = decide(*case, enough)
        assert last.decision == "fail"
        assert "worse than the margin and one standard error allow" in last.reason


def test_it_says_what_it_could_have_seen() -> None:
    found = decide(*traffic_of(0.0, 12, 1))
    reward = found.metrics["reward"]
    assert reward["low"] < reward["difference"] < reward["high"]
    assert 0 < reward["detectable"] < 0.5
    assert f"{reward['detectable']:.3f} four times out of five" in found.reason
    few = decide(*traffic_of(0.0, 40, 1, users=USERS[:10]))
    assert few.metrics["reward"]["low"] is None
    assert "too few users to bound harm" in few.reason
    assert msgspec.json.decode(msgspec.json.encode(few), type=GateVerdict) == few


def test_a_past_that_predicts_makes_it_sharper() -> None:
    """Users differ a lot: without their past the standard error is that of the people, with it that of the effect."""
    rows, before = traffic_of(0.0, 20, 5, spread=0.3)
    known, blind = decide(rows, before), decide(rows, {})
    assert known.metrics["users"]["theta"] > 0.5
    assert blind.metrics["users"]["theta"] == 0.0
    width = [found.metrics["reward"]["high"] - found.metrics["reward"]["low"] for found in (known, blind)]
    assert width[0] < 0.75 * width[1]


def test_a_broken_assignment_is_found_whatever_the_rewards() -> None:
    """A gateway that gives the canary to a tenth of those it should."""
    rows, before = traffic_of(0.0, 12, 1)
    inside = sorted({generation.user for generation, _ in rows if generation.version == "v-b"})
    wrong = {user: "v-a" for user in inside[len(inside) // 10 :]}
    moved = [(msgspec.structs.replace(one, version=wrong.get(one.user, one.version)), score) for one, score in rows]
    found = decide(moved, before)
    assert found.decision == "fail"
    assert "sizes of their shares" in found.reason


def test_what_belongs_to_no_arm_counts_for_none() -> None:
    rows, before = traffic_of(0.0, 12, 1)
    inside = next(user for user in USERS if assign(TRAFFIC, user)[1] == "canary")
    # An open conversation of a canary user stays with the incumbent; the holdback's version is nobody's arm; nothing pending has a reward.
    odd = [served(inside, "v-a", 99, -9.0), served("u-holdback", "v-0", 1, -9.0), served(inside, "v-b", 98, 0.0, place="pending")]
    plain, mixed = decide(rows, before), decide([*rows, *odd], before)
    assert mixed.metrics["reward"] == plain.metrics["reward"]
    assert mixed.metrics["opportunities"]["incumbent"] == plain.metrics["opportunities"]["incumbent"]


def test_nobody_in_an_arm_extends() -> None:
    rows, before = traffic_of(0.0, 12, 1)
    assert decide([row for row in rows if row[0].version != "v-b"], {}).decision in ("extend", "fail")
    lone = [row for row in rows if row[0].version == "v-b"][:12] + [row for row in rows if row[0].version == "v-a"][:24]
    assert decide(lone, before).decision == "extend"
