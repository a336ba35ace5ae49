"""Which version answers whom, as pure functions of the traffic record and a user's hash: the same user, the same arm, everywhere."""

import hashlib

from keepgrad.records import Arm, Traffic

_BITS = 53  # the most that a float in [0, 1) holds exactly


def user_hash(org: str, user: str) -> str:
    """The name under which a user appears in the ledger: a hash of organisation and user name, the same on every machine."""
    digest = hashlib.sha256(f"{len(org)}:{org}/{user}".encode()).hexdigest()  # the length keeps ("a/b", "c") and ("a", "b/c") apart
    return f"u-{digest[:24]}"


def unit_interval(user: str) -> float:
    """A user hash as a number, uniform in [0, 1)."""
    digest = hashlib.sha256(b"arm/" + user.encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - _BITS)) / (1 << _BITS)


def assign(traffic: Traffic, user: str) -> tuple[str, Arm]:
    """(version, arm) of a user hash: first the holdback share, then the canary share, then the incumbent for all others.

    An arm without a version belongs to the incumbent. The canary share begins where the holdback share ends, so users of one arm stay in
    it for as long as the shares stay.
    """
    at = unit_interval(user)
    if at < traffic.holdback_share:
        return (traffic.holdback, "holdback") if traffic.holdback else (traffic.incumbent, "incumbent")
    if traffic.canary and at < traffic.holdback_share + traffic.canary_share:
        return traffic.canary, "canary"
    return traffic.incumbent, "incumbent"


def named(traffic: Traffic) -> frozenset[str]:
    """The versions that may answer while this record is in force: those it names."""
    return frozenset(filter(None, (traffic.incumbent, traffic.previous, traffic.canary, traffic.holdback)))
