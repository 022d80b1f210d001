"""The clock of samples: the same whichever step is asked for first."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.sample_clock import SampleClock

ramps = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 60)), max_size=3).map(
    lambda stages: tuple((batch, until) for batch, until in sorted(stages, key=lambda stage: stage[1]))
)


@given(st.integers(1, 20), ramps)
def test_steps_follow_each_other(batch, ramp):
    clock = SampleClock(batch, ramp)
    used = 0
    for step in range(1, 90):
        assert clock.before(step) == used
        stage = next((size for size, until in ramp if used < until), batch)
        assert clock.at(step) == stage
        used += clock.at(step)
        assert clock.steps_of(used) == step
        assert clock.steps_of(used - clock.at(step) + 1) == step
