"""How many sequences each step takes: a constant, or a ramp that grows with the samples seen.

Decides what the loader serves, how many slots the plan has and how far the run is in tokens, all from the step alone.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from megatron_essh.config import RunConfig


@dataclass(frozen=True)
class Stage:
    """Steps of one batch size; a stage lasts until the next one begins."""

    first_step: int
    first_sample: int
    batch: int


@dataclass(frozen=True)
class BatchSchedule:
    """The stages of a run, in order, the first from step 0 and sample 0."""

    stages: tuple[Stage, ...]

    @classmethod
    def constant(cls, batch: int) -> BatchSchedule:
        """Every step takes `batch` sequences."""
        assert batch >= 1, f"a batch of {batch}"
        return cls((Stage(0, 0, batch),))

    @classmethod
    def ramp(cls, start: int, increment: int, samples: int, batch: int) -> BatchSchedule:
        """From `start` sequences in equal increments to `batch`, which the step takes that finds `samples` consumed.

        Every size but the last lasts for the same number of samples, to within a step: a step at c samples takes
        start + increment * floor(c * increments / samples) sequences, as Megatron's --rampup-batch-size has it.
        """
        increments = (batch - start) // increment
        stages = [Stage(0, 0, start)]
        for number in range(1, increments + 1):
            last = stages[-1]
            wanted = -(-samples * number // increments)  # samples from which on this size is due
            steps = max(0, -(-(wanted - last.first_sample) // last.batch))
            stage = Stage(last.first_step + steps, last.first_sample + steps * last.batch, start + number * increment)
            if steps == 0:
                stages.pop()  # one step of the size before passed over this one
            stages.append(stage)
        return cls(tuple(stages))

    @classmethod
    def of_pretraining(cls, config: RunConfig) -> BatchSchedule:
        """As data.batch_ramp and training.global_batch say."""
        ramp, batch = config.data.batch_ramp, config.training.global_batch
        if ramp is None:
            return cls.constant(batch)
        return cls.ramp(ramp.start, ramp.increment, ramp.samples, batch)

    def batch(self, step: int) -> int:
        """Sequences of `step` (from 0)."""
        return self._stage_of_step(step).batch

    def samples_before(self, step: int) -> int:
        """Sequences of all steps before `step`; of a whole run of `step` steps."""
        stage = self._stage_of_step(step)
        return stage.first_sample + (step - stage.first_step) * stage.batch

    def batch_after(self, samples: int) -> int:
        """Sequences that are due once `samples` are consumed."""
        return self._stage_after(samples).batch

    def step_at(self, samples: int) -> int:
        """The step that begins after `samples` samples.

        Raises:
            ValueError: none does.
        """
        stage = self._stage_after(samples)
        steps, rest = divmod(samples - stage.first_sample, stage.batch)
        if rest:
            raise ValueError(f"no step begins after {samples} samples")
        return stage.first_step + steps

    def _stage_after(self, samples: int) -> Stage:
        return self.stages[bisect_right([s.first_sample for s in self.stages], samples) - 1]

    def _stage_of_step(self, step: int) -> Stage:
        return self.stages[bisect_right([s.first_step for s in self.stages], step) - 1]
