"""`strategy=auto`: one process on one device, DDP where more are asked for."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy


class Auto:
    """Turns the trainer's device keys into Lightning's `strategy` argument."""

    def prepare(self, source: Any) -> None:
        """Settings of the model that follow from the strategy, before any model is built: none here."""

    def trainer_arguments(self, *, accelerator: str, world_size: int) -> dict[str, Any]:
        if world_size == 1:
            return {"strategy": "auto"}
        backend = "nccl" if accelerator in ("gpu", "cuda") else "gloo"
        return {"strategy": DDPStrategy(process_group_backend=backend)}
