"""Who is answered by which version: a pure function of the traffic record and the user's hash."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from keepgrad.policy.traffic import assign, named, unit_interval, user_hash
from keepgrad.records import Traffic

USERS = [user_hash("acme", f"dev-{number}") for number in range(4000)]
OPEN = Traffic(
    incumbent="v-a", previous="v-0", canary="v-b", canary_share=0.3, holdback="v-base", holdback_share=0.1, force=False, reason="", at_ms=1
)


def test_shares_are_met() -> None:
    arms = [assign(OPEN, user)[1] for user in USERS]
    assert abs(arms.count("holdback") / len(arms) - 0.1) < 0.02
    assert abs(arms.count("canary") / len(arms) - 0.3) < 0.03


def test_a_user_hash_is_the_same_everywhere_and_names_one_user() -> None:
    assert user_hash("acme", "ann") == "u-4f1cef6a2f9378fa7e7251b3"
    assert len({user_hash(org, user) for org, user in [("a", "b/c"), ("a/b", "c"), ("a/b/c", ""), ("", "a/b/c"), ("b", "a")]}) == 5


@given(st.text(), st.text())
def test_the_interval_is_half_open(org: str, user: str) -> None:
    assert 0 <= unit_interval(user_hash(org, user)) < 1


@given(st.sampled_from(USERS), st.floats(0, 1), st.floats(0, 1))
def test_a_wider_canary_moves_nobody_out_of_it(user: str, one: float, other: float) -> None:
    narrow, wide = sorted((one, other))
    before = assign(msgspec.structs.replace(OPEN, canary_share=narrow), user)
    after = assign(msgspec.structs.replace(OPEN, canary_share=wide), user)
    assert before == after or (before == ("v-a", "incumbent") and after == ("v-b", "canary"))


@given(st.sampled_from(USERS))
def test_an_arm_without_a_version_is_the_incumbents(user: str) -> None:
    bare = msgspec.structs.replace(OPEN, canary="", holdback="")
    assert assign(bare, user) == ("v-a", "incumbent")
    assert named(bare) == {"v-a", "v-0"}


@given(st.sampled_from(USERS))
def test_the_end_of_a_canary_leaves_the_holdback_alone(user: str) -> None:
    if assign(OPEN, user)[1] == "holdback":
        assert assign(msgspec.structs.replace(OPEN, incumbent="v-b", canary=""), user) == ("v-base", "holdback")
