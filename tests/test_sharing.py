"""Fair sharing against systems solved by hand, in the manner of SimGrid's max-min tests.

A system is the capacity of each link and flows, each with the bytes that it puts on links for a
byte of payload. The comment above a test has the system, the expectation and the reason. `level` is
the bandwidth of a flow on the link that binds it when it is alone: its rate x its weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.kernels import events, sharing
from simulator.traffic import Traffic

INF = float("inf")


class Flow(NamedTuple):
    """Bytes on each link for a byte of payload, and the rate that the flow reaches when free."""

    uses: Mapping[int, float]
    limit: float = INF


def traffic_of(capacity: Sequence[float], flows: Sequence[Flow]) -> Traffic:
    """Return flows as demands of their own."""
    return Traffic(
        capacity=np.array(capacity, np.float64),
        names=tuple(f"link {k}" for k in range(len(capacity))),
        offset=np.cumsum([0, *(len(f.uses) for f in flows)]).astype(np.int64),
        links=np.array([link for f in flows for link in f.uses], np.int32),
        coefficient=np.array([c for f in flows for c in f.uses.values()], np.float64),
        size=np.ones(len(flows)),
        limit=np.array([f.limit for f in flows], np.float64),
        demand=np.zeros((0, 1), np.int32),
    )


def solve(
    capacity: Sequence[float], *flows: Flow, only: Sequence[int] | None = None
) -> list[float]:
    """Return the rates of flows that share links; `only` some of them, in that order."""
    t = traffic_of(capacity, flows)
    numbers = np.arange(len(flows))
    chosen = numbers if only is None else np.array(only, np.int64)
    found = []
    for share in (sharing.share, events.share):
        left, pressure = np.full((2, len(capacity)), 7.0)
        users = np.zeros(len(capacity), np.int64)
        rate = np.full(len(flows), -7.0)
        share(
            chosen, numbers, t.offset, t.links, t.coefficient, t.weight, t.limit, t.capacity, left,
            pressure, users, rate,
        )  # fmt: skip
        assert not users.any()
        assert (np.delete(rate, chosen) == -7.0).all()
        found.append(rate[chosen].tolist())
    assert found[0] == found[1]  # interpreted and compiled give the same floats
    return found[0]


def levels(capacity: Sequence[float], flows: Sequence[Flow], rates: Sequence[float]) -> list[float]:
    """Return the bandwidth of each flow on the link that binds it when it is alone."""
    found: list[float] = (np.array(rates) * traffic_of(capacity, flows).weight).tolist()
    return found


# System: one link of 12; one flow that uses it once. Expect 12: nobody else is there.
def test_a_flow_alone_gets_the_whole_link() -> None:
    assert solve([12.0], Flow({0: 1.0})) == [12.0]


# System: links of 12, 5 and 9 in a row; one flow over all. Expect 5: the narrowest binds.
def test_a_flow_alone_goes_as_fast_as_its_narrowest_link() -> None:
    assert solve([12.0, 5.0, 9.0], Flow({0: 1.0, 1: 1.0, 2: 1.0})) == [5.0]


# System: one link of 12; one flow with limit 3. Expect 3: the limit is below the link. With limit
# 0.1 and coefficient 3 expect 0.1 itself, not 0.1 x 3 / 3, which is another float.
def test_a_flow_alone_keeps_its_own_limit() -> None:
    assert solve([12.0], Flow({0: 1.0}, 3.0)) == [3.0]
    assert solve([12.0], Flow({0: 3.0}, 0.1)) == [0.1]


# System: no link; flows with limit 7 and without any. Expect 7 and inf: nothing else stops them.
def test_a_flow_that_uses_no_link_is_stopped_by_its_limit_only() -> None:
    assert solve([], Flow({}, 7.0)) == [7.0]
    assert solve([], Flow({})) == [INF]


# System: one link of 12; two flows. Expect 6 and 6: x + x = 12.
def test_two_equal_flows_get_half_each() -> None:
    assert solve([12.0], Flow({0: 1.0}), Flow({0: 1.0})) == [6.0, 6.0]


# System: one link of 1; seven flows. Expect 1/7 each: they stop at one level, by one division.
def test_many_equal_flows_get_equal_shares() -> None:
    assert solve([1.0], *[Flow({0: 1.0})] * 7) == [1 / 7] * 7
    assert solve([1.0], *[Flow({0: 1.0})] * 4096) == [1 / 4096] * 4096


# System: one link of 12; flows with limits 2, inf, inf. Expect 2, 5, 5: 12 - 2 is left for two.
def test_a_limit_below_the_share_frees_the_rest_for_others() -> None:
    assert solve([12.0], Flow({0: 1.0}, 2.0), Flow({0: 1.0}), Flow({0: 1.0})) == [2.0, 5.0, 5.0]


# System: one link of 12; flows with limits 7, 8, inf. Expect 4 each: no limit is below 12/3.
def test_a_limit_above_the_share_changes_nothing() -> None:
    assert solve([12.0], Flow({0: 1.0}, 7.0), Flow({0: 1.0}, 8.0), Flow({0: 1.0})) == [4.0] * 3


# System: one link of 12; flows with limits 1, 2, 3, inf. Expect 1, 2, 3 and 12 - 6 = 6.
def test_limits_are_reached_in_order() -> None:
    flows = [Flow({0: 1.0}, limit) for limit in (3.0, 1.0, INF, 2.0)]
    assert solve([12.0], *flows) == [3.0, 1.0, 6.0, 2.0]


# System: one link of 12; flows with limits 4, 4, 4. Expect 4 each: limits and link bind at once.
def test_a_limit_equal_to_the_share_is_no_contradiction() -> None:
    assert solve([12.0], *[Flow({0: 1.0}, 4.0)] * 3) == [4.0] * 3
    assert solve([12.0], Flow({0: 1.0}, 4.0), Flow({0: 1.0}), Flow({0: 1.0})) == [4.0] * 3


# System: links x, y of 1; a over both, b over x, c over y. Expect 1/2 each: x and y are full at
# level 1/2 at once.
def test_three_flows_on_two_equal_links_get_half_each() -> None:
    assert solve([1.0, 1.0], Flow({0: 1.0, 1: 1.0}), Flow({0: 1.0}), Flow({1: 1.0})) == [0.5] * 3


# System: links x, y of 3; a over both, b and c over x, d over y.
# Expect a = b = c = 1 (x is full at level 3/3) and d = 3 - 1 = 2 (y has the rest).
def test_who_is_stopped_elsewhere_leaves_more_to_others() -> None:
    flows = [Flow({0: 1.0, 1: 1.0}), Flow({0: 1.0}), Flow({0: 1.0}), Flow({1: 1.0})]
    assert solve([3.0, 3.0], *flows) == [1.0, 1.0, 1.0, 2.0]


# System: links of 2, 4, 8; one flow over all, one over each. Expect 1 for the long one and 1 on the
# first (2/2), then 4 - 1 = 3 and 8 - 1 = 7 for the others.
def test_a_parking_lot_gives_the_long_flow_its_share_of_the_narrowest_link() -> None:
    flows = [Flow({0: 1.0, 1: 1.0, 2: 1.0}), Flow({0: 1.0}), Flow({1: 1.0}), Flow({2: 1.0})]
    assert solve([2.0, 4.0, 8.0], *flows) == [1.0, 1.0, 3.0, 7.0]


# System: links of 1, 3, 7, 15; flow k over links k and k + 1, the last over the last.
# Expect 1 (1/1 < 3/2), 3 - 1 = 2 (< 7/2), 7 - 2 = 5 (< 15/2), 15 - 5 = 10.
def test_a_chain_of_bottlenecks_is_solved_one_after_the_other() -> None:
    flows = [Flow({k: 1.0, k + 1: 1.0}) for k in range(3)] + [Flow({3: 1.0})]
    assert solve([1.0, 3.0, 7.0, 15.0], *flows) == [1.0, 2.0, 5.0, 10.0]
    assert solve([1.0, 3.0, 7.0, 15.0], *flows, only=[3, 1, 0, 2]) == [10.0, 2.0, 1.0, 5.0]


# System: one link of 12; a puts 2 bytes on it for one of payload, b puts 1.
# Expect 6 of the link for each: a moves 6/2 = 3 of payload, b 6.
def test_flows_share_bandwidth_and_not_progress() -> None:
    assert solve([12.0], Flow({0: 2.0}), Flow({0: 1.0})) == [3.0, 6.0]


# System: two ring edges of 12; all-reduces of 4 and of 2 ranks, coefficients 2(n-1)/n = 1.5 and 1.
# Expect alone 12/1.5 = 8 and 12; together 6 of each edge for each: 6/1.5 = 4 and 6.
def test_rings_share_their_edges_by_bandwidth() -> None:
    large, small = Flow({0: 1.5, 1: 1.5}), Flow({0: 1.0, 1: 1.0})
    assert solve([12.0, 12.0], large) == [8.0]
    assert solve([12.0, 12.0], small) == [12.0]
    assert solve([12.0, 12.0], large, small) == [4.0, 6.0]


# System: links x, y of 12; a puts 1 on x and 2 on y, b puts 1 on x.
# Alone a is bound by y (2/12 > 1/12): its bandwidth is 2 x rate, so it puts 1/2 byte on x for a
# byte of bandwidth. x is full at level 12/(1/2 + 1) = 8 < 12 of y. Expect a = 8/2 = 4, b = 8.
def test_the_weight_is_that_of_the_link_which_binds_alone() -> None:
    flows = [Flow({0: 1.0, 1: 2.0}), Flow({0: 1.0})]
    assert traffic_of([12.0, 12.0], flows).weight.tolist() == [2.0, 1.0]
    assert solve([12.0, 12.0], *flows) == [4.0, 8.0]


# The same with y of 48: alone a is bound by x (1/12 > 2/48), its weight is 1, x is full at 12/2.
def test_a_wider_link_no_longer_gives_the_weight() -> None:
    flows = [Flow({0: 1.0, 1: 2.0}), Flow({0: 1.0})]
    assert traffic_of([12.0, 48.0], flows).weight.tolist() == [1.0, 1.0]
    assert solve([12.0, 48.0], *flows) == [6.0, 6.0]


# System: x of 12, y of 6; a puts 1 on x and 2 on y, b puts 1 on y, c puts 1 on x.
# a is bound by y: weight 2. y is full at 6/(2/2 + 1) = 3 < 12/(1/2 + 1) = 8 of x: a = 3/2, b = 3.
# x has 12 - 3/2 left for c: 10.5.
def test_different_coefficients_on_two_links_are_taken_off_each() -> None:
    flows = [Flow({0: 1.0, 1: 2.0}), Flow({1: 1.0}), Flow({0: 1.0})]
    assert solve([12.0, 6.0], *flows) == [1.5, 3.0, 10.5]


# System: x of 10; a with coefficient 2 and limit 1.5 of payload (level 3), b with coefficient 1.
# Expect a = 1.5, which puts 3 on x, and b = 7: level 3 is below 10/2.
def test_a_limit_counts_payload_and_the_link_counts_bytes() -> None:
    assert solve([10.0], Flow({0: 2.0}, 1.5), Flow({0: 1.0})) == [1.5, 7.0]


# System: x of 4 with two flows, y of 6 with three. Expect 2 and 2; 2, 2, 2: no flow is on both, and
# the levels 4/2 and 6/3 are equal. Then y of 60: x does not notice.
def test_components_that_do_not_touch_do_not_disturb_each_other() -> None:
    flows = [Flow({0: 1.0})] * 2 + [Flow({1: 1.0})] * 3
    assert solve([4.0, 6.0], *flows) == [2.0] * 5
    assert solve([4.0, 60.0], *flows) == [2.0, 2.0, 20.0, 20.0, 20.0]


# System: x of 2^-30, y of 2^40; a over both, b over y. Expect a = 2^-30, b = 2^40 - 2^-30, which
# is 2^40 in floats of 53 bits. Nobody stands still.
def test_a_link_of_tiny_capacity_stops_only_who_uses_it() -> None:
    rates = solve([2.0**-30, 2.0**40], Flow({0: 1.0, 1: 1.0}), Flow({1: 1.0}))
    assert rates == [2.0**-30, 2.0**40]


# System: x of 10 and y of 1; ten flows over x, one of them over y too. Expect all at 1: ties
# between the links do not lose or gain anybody.
def test_two_links_that_are_full_at_one_level_tie() -> None:
    flows = [Flow({0: 1.0, 1: 1.0})] + [Flow({0: 1.0})] * 9
    assert solve([10.0, 1.0], *flows) == [1.0] * 10


# System: x of 0.3; coefficients 0.1 and 0.2, three flows. No number is exact in binary: levels 0.1,
# rates 0.1/0.1 = 1, 0.1/0.2 = 0.5 and 1.
def test_shares_that_are_not_exact_in_binary_are_close() -> None:
    rates = solve([0.3], Flow({0: 0.1}), Flow({0: 0.2}), Flow({0: 0.1}))
    assert rates == pytest.approx([1.0, 0.5, 1.0], rel=1e-12)


# System: the parking lot above. The long flow leaves: 2, 4, 8. The first leaves instead: the long
# one meets the second at 4/2 = 2, which is all that the first link has, and 8 - 2 = 6 is left.
def test_shares_are_made_anew_when_a_flow_has_left() -> None:
    flows = [Flow({0: 1.0, 1: 1.0, 2: 1.0}), Flow({0: 1.0}), Flow({1: 1.0}), Flow({2: 1.0})]
    assert solve([2.0, 4.0, 8.0], *flows, only=[1, 2, 3]) == [2.0, 4.0, 8.0]
    assert solve([2.0, 4.0, 8.0], *flows, only=[0, 2, 3]) == [2.0, 2.0, 6.0]


# A counterexample to keep in mind: x of 2, y of 10; a over both, b over y. a = 2, b = 8. When c
# comes to x, a = c = 1 and b = 9: a newcomer may speed up those whom it does not meet itself.
def test_a_newcomer_may_speed_up_whom_it_does_not_meet() -> None:
    flows = [Flow({0: 1.0, 1: 1.0}), Flow({1: 1.0}), Flow({0: 1.0})]
    assert solve([2.0, 10.0], *flows, only=[0, 1]) == [2.0, 8.0]
    assert solve([2.0, 10.0], *flows) == [1.0, 9.0, 1.0]


# One byte at 2^40 bytes/s takes 0.9 ticks: one tick. A byte at 1e12 bytes/s takes one tick too,
# 1000 bytes 1000 and no more (1000 / 1e12 x 1e12 is more in floats), 1e12 bytes at 1e9 bytes/s take
# 1000 s = 1e15 ticks, and no bytes a tick.
@pytest.mark.parametrize(
    ("size", "rate", "ticks"),
    [
        (1.0, 2.0**40, 1), (1.0, 1e12, 1), (1e3, 1e12, 1000), (1e12, 1e9, 10**15),
        (1.0, 1.0, 10**12), (0.0, 1.0, 1), (1.0, INF, 1), (3.0, 2e12, 2), (-1e-9, 1.0, 1),
    ],
)  # fmt: skip
def test_a_flow_ends_at_the_first_tick_at_which_its_bytes_have_moved(
    size: float, rate: float, ticks: int
) -> None:
    for foresee in (sharing.foresee, events.foresee):
        finish = np.zeros(1, np.int64)
        foresee(np.zeros(1, np.int64), 5, np.array([size]), np.array([rate]), finish)
        assert finish.tolist() == [5 + ticks]


# 10 bytes at 2 bytes/s from tick 0: after 3 s = 3e12 ticks 6 have moved; at 4 bytes/s the rest
# moves in 1 s.
def test_bytes_that_have_moved_are_taken_off() -> None:
    for advance in (sharing.advance, events.advance):
        flows, since = np.array([1]), np.zeros(3, np.int64)
        remaining, rate = np.full(3, 10.0), np.full(3, 2.0)
        advance(flows, 3 * 10**12, remaining, since, rate)
        assert remaining.tolist() == [10.0, 4.0, 10.0]
        assert since.tolist() == [0, 3 * 10**12, 0]
        rate[1] = 4.0
        advance(flows, 4 * 10**12, remaining, since, rate)
        assert remaining[1] == 0.0


class System(NamedTuple):
    capacity: list[float]
    flows: list[Flow]


AMOUNTS = st.one_of(
    st.sampled_from([1.0, 2.0, 3.0, 1e12]), st.floats(1e-3, 1e12), st.floats(0.1, 10.0)
)
COEFFICIENTS = st.one_of(st.sampled_from([0.5, 1.0, 1.75, 2.0]), st.floats(0.01, 100.0))


@st.composite
def systems(draw: st.DrawFn) -> System:
    capacity = draw(st.lists(AMOUNTS, min_size=1, max_size=6))
    numbers = st.integers(0, len(capacity) - 1)
    flows = st.builds(
        Flow,
        uses=st.dictionaries(numbers, COEFFICIENTS, min_size=1, max_size=4),
        limit=st.one_of(st.just(INF), AMOUNTS),
    )
    return System(capacity, draw(st.lists(flows, min_size=1, max_size=9)))


def loads(system: System, rates: Sequence[float]) -> list[float]:
    """Return the bytes/s on each link."""
    load = [0.0] * len(system.capacity)
    for flow, rate in zip(system.flows, rates, strict=True):
        for link, coefficient in flow.uses.items():
            load[link] += coefficient * rate
    return load


# This is what defines weighted max-min fair rates: they are the only ones with both properties.
@settings(max_examples=500, deadline=None)
@given(system=systems())
def test_every_flow_is_stopped_by_its_limit_or_by_a_full_link_on_which_nobody_has_more(
    system: System,
) -> None:
    rates = solve(system.capacity, *system.flows)
    load, level = loads(system, rates), levels(*system, rates)
    for have, most in zip(load, system.capacity, strict=True):
        assert have <= most * (1 + 1e-9)
    for f, flow in enumerate(system.flows):
        assert 0.0 < rates[f] <= flow.limit
        assert rates[f] == flow.limit or any(
            load[link] >= system.capacity[link] * (1 - 1e-9)
            and all(
                level[f] >= level[g] * (1 - 1e-9)
                for g, other in enumerate(system.flows)
                if link in other.uses
            )
            for link in flow.uses
        )


# Scaling by powers of two is exact in binary; other numbers of links change no division.
@settings(max_examples=200, deadline=None)
@given(system=systems(), power=st.integers(-20, 20), data=st.data())
def test_rates_scale_with_capacities_and_do_not_depend_on_the_numbers_of_links(
    system: System, power: int, data: st.DataObject
) -> None:
    rates, scale = solve(system.capacity, *system.flows), 2.0**power
    scaled = [flow._replace(limit=flow.limit * scale) for flow in system.flows]
    assert solve([c * scale for c in system.capacity], *scaled) == [r * scale for r in rates]
    order = data.draw(st.permutations(range(len(system.capacity))))
    moved = [Flow({order[k]: c for k, c in f.uses.items()}, f.limit) for f in system.flows]
    there = [system.capacity[order.index(k)] for k in range(len(order))]
    assert solve(there, *moved) == rates


@settings(max_examples=200, deadline=None)
@given(system=systems(), data=st.data())
def test_the_order_of_flows_matters_to_the_last_digits_only(
    system: System, data: st.DataObject
) -> None:
    rates = solve(system.capacity, *system.flows)
    order = data.draw(st.permutations(range(len(system.flows))))
    mixed = solve(system.capacity, *system.flows, only=order)
    assert mixed == pytest.approx([rates[f] for f in order], rel=1e-9)


# Without the newcomer, what the others have beside it is still possible; fair levels are the best
# possible ones, compared from the slowest up. (No flow by itself is promised not to speed up.)
@settings(max_examples=300, deadline=None)
@given(system=systems())
def test_a_newcomer_makes_the_slowest_no_faster(system: System) -> None:
    rates = solve(system.capacity, *system.flows)
    others = system.flows[:-1]
    without = solve(system.capacity, *system.flows, only=range(len(others)))
    before = sorted(levels(system.capacity, others, without))
    after = sorted(levels(system.capacity, others, rates[:-1]))
    for old, new in zip(before, after, strict=True):
        if new != pytest.approx(old, rel=1e-7):
            assert new < old
            break


# On one link there is nobody whom a newcomer does not meet: it speeds up nobody.
@settings(max_examples=200, deadline=None)
@given(system=systems())
def test_a_newcomer_on_the_only_link_speeds_up_nobody(system: System) -> None:
    flows = [Flow({0: next(iter(f.uses.values()))}, f.limit) for f in system.flows]
    rates = solve(system.capacity[:1], *flows)
    without = solve(system.capacity[:1], *flows, only=range(len(flows) - 1))
    for old, new in zip(without, rates, strict=False):
        assert new <= old * (1 + 1e-9)


# Exactly: the two components are solved by the same divisions whether together or apart.
@settings(max_examples=200, deadline=None)
@given(one=systems(), other=systems())
def test_flows_that_share_no_link_change_nothing_for_each_other(one: System, other: System) -> None:
    count, links = len(one.flows), len(one.capacity)
    shifted = [Flow({k + links: c for k, c in f.uses.items()}, f.limit) for f in other.flows]
    together = solve(one.capacity + other.capacity, *one.flows, *shifted)
    assert together[:count] == solve(one.capacity, *one.flows)
    assert together[count:] == solve(other.capacity, *other.flows)


@settings(max_examples=100, deadline=None)
@given(system=systems())
def test_a_demand_alone_has_the_rate_of_its_narrowest_link_or_limit(system: System) -> None:
    solo = traffic_of(*system).solo
    for flow, rate in zip(system.flows, solo, strict=True):
        best = min(system.capacity[k] / c for k, c in flow.uses.items())
        assert rate == pytest.approx(min(best, flow.limit), rel=1e-12)
