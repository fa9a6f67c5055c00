"""Owns what it is estimated to cost to preempt a request on a platform: to compute tokens again, or to move blocks.

It must not know when anybody is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpage.runner.programs import StagePrograms
from jaxpage.scheduler.preemption import PreemptionPolicy

RATES = {"cpu": (1e11, 4e9), "gpu": (2e14, 2e10), "tpu": (2e14, 1e10)}
"""Orders of magnitude by platform: operations a second in a prefill, bytes a second between device and host."""


def preemption_policy(mode: str, num_params: int, stages: Sequence[StagePrograms], platform: str) -> PreemptionPolicy:
    """Two operations a parameter to compute a token again, against the bytes of a block over the bus.

    A token passes all stages, whose devices share the operations of each; a block has a part on every device.

    Args:
        num_params: of all stages together, whichever processes have them.
        stages: all of them too.
    """
    operations_per_s, bytes_per_s = RATES.get(platform, RATES["gpu"])
    layout = stages[0].placement.layout
    num_devices = 1 if layout is None else layout.mesh.size
    return PreemptionPolicy(
        mode,
        seconds_per_token=2 * num_params / num_devices / operations_per_s,
        seconds_per_block=sum(stage.device_bytes_per_block for stage in stages) / bytes_per_s,
    )
